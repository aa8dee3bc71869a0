"""The card promises a replay only where what is shipped makes it work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attacked_runs import SECRET, finished, loaded, lora, pretrained_base
from safetensors.torch import load_file
from tiny_runs import tiny_model

from hf_dpzero.cli import main
from hf_dpzero.experiments.runner import discard_weights
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.run_folder import initial_values

pytestmark = pytest.mark.slow

VALUES = "initial_values.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return pretrained_base(tmp_path)


def shipped_run(run: Path, model: Any, hub: Path, **settings: Any) -> Path:
    """The Hub folder of a run of two steps."""
    finished(run, model, **{"max_steps": 2, **SECRET, **settings})
    return build_hub_folder(run, hub)


def replays(base: Path, log: Path, output: Path, capsys: Any, *words: Any) -> bool:
    given = ["replay", "--base", base, "--trajectory", log / "trajectory.safetensors", *words]
    status = main.main([str(word) for word in [*given, "--output_dir", output]])
    return status == 0 and "bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["model", "adapter", "frozen_encoder", "bfloat16"])
def test_base_and_log_rebuild_a_scripts_run(
    base: Path, tmp_path: Path, capsys: Any, kind: str
) -> None:
    """Its head and adapter were drawn from generators that nobody knows the state of."""
    settings: dict[str, Any] = {
        "frozen_encoder": {"trainable": "classifier"},
        "bfloat16": {"microbatch_size": 1, "smoothing": 0.05},
    }.get(kind, {})
    names = {0: "SECRET-A", 1: "SECRET-B", 2: "SECRET-C"}
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = loaded(base, dtype=dtype, id2label=names)
    model = lora(model) if kind == "adapter" else model
    folder = shipped_run(tmp_path / "run", model, tmp_path / "hub", **settings)
    assert "hf-dpzero replay --base base" in (folder / "README.md").read_text()
    assert replays(base, folder, tmp_path / "rebuilt", capsys)
    values = load_file(folder / VALUES)
    assert any("classifier" in name for name in values)
    assert not any("encoder" in name and "lora" not in name for name in values)
    for secret in (str(tmp_path).encode(), b"SECRET-A"):  # a path, names of labels
        assert secret not in (folder / VALUES).read_bytes()
    (folder / VALUES).unlink()
    assert not replays(base, folder, tmp_path / "again", capsys)


@pytest.mark.parametrize("kind", ["no_name", "own_head", "too_large", "whole_vectors"])
def test_what_cannot_be_rebuilt_is_not_promised(
    base: Path, tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    model = tiny_model() if kind == "no_name" else loaded(base)
    if kind == "own_head":
        hidden = model.config.hidden_size
        model.classifier = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(hidden, 2))
    if kind == "too_large":
        monkeypatch.setattr(initial_values, "LARGEST", 8)
    settings = {"method": "dp-sgd"} if kind == "whole_vectors" else {}
    folder = shipped_run(tmp_path / "run", model, tmp_path / "hub", **settings)
    assert not (folder / VALUES).exists()
    assert "hf-dpzero replay" not in (folder / "README.md").read_text()


def test_initial_values_of_another_run_promise_nothing(base: Path, tmp_path: Path) -> None:
    first = shipped_run(tmp_path / "a", loaded(base), tmp_path / "hub" / "a")
    shipped_run(tmp_path / "b", tiny_model(), tmp_path / "hub" / "b")
    (tmp_path / "b" / VALUES).write_bytes((first / VALUES).read_bytes())
    folder = build_hub_folder(tmp_path / "b", tmp_path / "hub" / "b")
    assert "hf-dpzero replay" not in (folder / "README.md").read_text()


def test_discarded_weights_can_be_rebuilt(base: Path, tmp_path: Path, capsys: Any) -> None:
    shipped_run(tmp_path / "run", loaded(base), tmp_path / "hub")
    discard_weights(tmp_path / "run")
    words = ("--expect", tmp_path / "hub")
    assert replays(base, tmp_path / "run", tmp_path / "rebuilt", capsys, *words)
