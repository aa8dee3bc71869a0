"""The card promises a replay only where what is shipped makes it work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_models_trained_before import SECRET, loaded, lora, save_base
from tiny_runs import build, tiny_model

from hf_dpzero.cli import main
from hf_dpzero.experiments.runner import discard_weights
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.run_folder import base_model

pytestmark = pytest.mark.slow

VALUES = "initial_values.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path)


def shipped(trainer: Any, folder: Path) -> Path:
    trainer.train()
    trainer.save_model()
    return build_hub_folder(trainer.output_dir, folder)


def replays(base: Path, folder: Path, output: Path, capsys: Any) -> bool:
    words = ["replay", "--base", base, "--trajectory", folder / "trajectory.safetensors"]
    status = main.main([str(word) for word in [*words, "--output_dir", output]])
    return status == 0 and "bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["model", "adapter", "frozen_encoder", "bfloat16"])
def test_base_and_log_rebuild_a_scripts_run(
    base: Path,
    tmp_path: Path,
    capsys: Any,
    kind: str,
) -> None:
    """Its head and adapter were drawn from generators that nobody knows the state of."""
    settings = dict(SECRET)
    if kind == "frozen_encoder":
        settings["trainable"] = "classifier"
    if kind == "bfloat16":
        settings |= {"microbatch_size": 1, "smoothing": 0.05}
    model = loaded(
        base, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32, num_labels=3
    )
    trainer = build(tmp_path / "run", lora(model) if kind == "adapter" else model, **settings)
    folder = shipped(trainer, tmp_path / "hub")
    assert "hf-dpzero replay --base base" in (folder / "README.md").read_text()
    assert replays(base, folder, tmp_path / "rebuilt", capsys)
    values = load_file(folder / VALUES)
    assert any("classifier" in name for name in values)
    assert not any("encoder" in name and "lora" not in name for name in values)
    assert str(tmp_path).encode() not in (folder / VALUES).read_bytes()
    (folder / VALUES).unlink()
    assert not replays(base, folder, tmp_path / "again", capsys)


def test_names_of_labels_stay_out_of_the_initial_values(base: Path, tmp_path: Path) -> None:
    model = lora(loaded(base, id2label={0: "SECRET-A", 1: "SECRET-B"}))
    folder = shipped(build(tmp_path / "run", model, **SECRET), tmp_path / "hub")
    assert b"SECRET-A" not in (folder / VALUES).read_bytes()


@pytest.mark.parametrize("kind", ["no_name", "own_head", "too_large", "whole_vectors"])
def test_what_cannot_be_rebuilt_is_not_promised(
    base: Path,
    tmp_path: Path,
    monkeypatch: Any,
    kind: str,
) -> None:
    settings = dict(SECRET)
    model = tiny_model() if kind == "no_name" else loaded(base)
    if kind == "own_head":
        hidden = model.config.hidden_size
        model.classifier = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(hidden, 2))
    if kind == "too_large":
        monkeypatch.setattr(base_model, "LARGEST", 8)
    if kind == "whole_vectors":
        settings["method"] = "dp-sgd"
    folder = shipped(build(tmp_path / "run", model, **settings), tmp_path / "hub")
    assert not (folder / VALUES).exists()
    assert "hf-dpzero replay" not in (folder / "README.md").read_text()


def test_initial_values_of_another_run_promise_nothing(base: Path, tmp_path: Path) -> None:
    first = shipped(build(tmp_path / "a", loaded(base), **SECRET), tmp_path / "hub" / "a")
    run = tmp_path / "b"
    shipped(build(run, tiny_model(), **SECRET), tmp_path / "hub" / "b")
    (run / VALUES).write_bytes((first / VALUES).read_bytes())
    folder = build_hub_folder(run, tmp_path / "hub" / "b")
    assert "hf-dpzero replay" not in (folder / "README.md").read_text()


def test_discarded_weights_can_be_rebuilt(base: Path, tmp_path: Path, capsys: Any) -> None:
    shipped(build(tmp_path / "run", loaded(base), **SECRET), tmp_path / "hub")
    discard_weights(tmp_path / "run")
    words = ["replay", "--base", base, "--trajectory", tmp_path / "run" / "trajectory.safetensors",
             "--output_dir", tmp_path / "rebuilt", "--expect", tmp_path / "hub"]  # fmt: skip
    assert main.main([str(word) for word in words]) == 0, capsys.readouterr().err
