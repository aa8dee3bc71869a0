"""The benchmark: it runs, its keys exist, its yardsticks are what they say. No timing is judged."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from hf_dpzero import bench, cli
from hf_dpzero.bench import StepBench
from hf_dpzero.perturbation import digest_tensors

KEYS = {
    "ratio_to_two_forwards",
    "reference_ratio_to_two_forwards",
    "seconds",
    "all_seconds",
    "restore_error",
    "reference_restore_error",
    "dimension",
    "settings",
    "threads",
    "machine",
    "versions",
}
MEMORY_KEYS = {
    "peak_memory_over_inference",
    "reference_peak_memory_over_inference",
    "peak_bytes",
    "memory_method",
}
TINY = ["bench", "step", "--shape", "tiny", "--batch_size", "2", "--seq_length", "8"]


def tiny(**settings: Any) -> StepBench:
    plain = {"shape": "tiny", "batch_size": 2, "seq_length": 8, "repeats": 2, "memory": False}
    return StepBench(**{**plain, **settings})


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main([*TINY, "--repeats", "2", "--no_memory", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ["--direction", "gaussian", "--num_directions", "3"],
        ["--method", "mezo", "--direction", "sphere"],
        ["--dtype", "bfloat16"],
        ["--trainable", "classifier"],
    ],
)
def test_the_command_prints_the_documented_keys(words: list[str], capsys: Any):
    result = run(capsys, *words)
    assert set(result) == KEYS
    assert result["restore_error"] == 0.0
    assert result["ratio_to_two_forwards"] > 0
    assert len(result["all_seconds"]["step"]) == 2
    assert all(math.isfinite(s) and s > 0 for s in result["seconds"].values())
    assert result["settings"]["num_directions"] == (3 if "gaussian" in words else 1)
    if "classifier" in words:
        assert result["dimension"] == 2 * 16 + 2


def test_reference_alone_says_that_it_does_not_restore(capsys: Any):
    result = run(capsys, "--method", "reference")
    assert set(result) == KEYS
    assert "step" not in result["seconds"]
    assert result["ratio_to_two_forwards"] == result["reference_ratio_to_two_forwards"]
    assert result["restore_error"] > 0


def test_the_table_is_for_people(capsys: Any):
    assert cli.main([*TINY, "--repeats", "1", "--no_memory"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "2 x 8 tokens",
        "2 bare forward passes",
        "dpzero step",
        "reference loop",
        "time x",
    ):
        assert part in printed


def test_peak_memory_of_every_phase_is_a_number_of_bytes():
    """Only that a plausible number of bytes comes back: 14 034 weights are lost in the noise."""
    peaks = {phase: bench.peak_bytes(tiny(), phase) for phase in bench.PHASES}
    assert all(isinstance(peak, int) for peak in peaks.values())
    assert all(-(1 << 20) < peak < 1 << 28 for peak in peaks.values())


@pytest.mark.slow
def test_memory_is_measured_in_fresh_processes(capsys: Any):
    assert cli.main([*TINY, "--repeats", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == KEYS | MEMORY_KEYS
    assert set(result["peak_bytes"]) == {"inference", "step", "reference"}
    assert 0.2 < result["peak_memory_over_inference"] < 5


def test_the_step_really_updates_and_the_reference_loop_is_the_published_one():
    model = bench.build_model(tiny())
    batch = bench.build_batch(tiny(), 64)
    before = digest_tensors(model.named_parameters())
    step = bench.Step(tiny(), model, batch)
    step(0)
    assert step.space.position == ()
    assert step.step.trajectory.next_step == 1
    assert digest_tensors(model.named_parameters()) != before

    reference = bench.ReferenceStep(tiny(), model, batch)
    theta = [p.detach().clone() for p in reference.parameters]
    reference.add(7, 0.5)
    z = [(p.detach() - t) / 0.5 for p, t in zip(reference.parameters, theta, strict=True)]
    reference.add(7, -0.5)
    flat = torch.cat([part.reshape(-1) for part in z])
    assert abs(float(flat.std()) - 1) < 0.05  # 14 034 normals: standard error 0.006
    assert (
        max(
            float((p.detach() - t).abs().max())
            for p, t in zip(reference.parameters, theta, strict=True)
        )
        < 1e-5
    )


@pytest.mark.parametrize("shape", sorted(bench.SHAPES))
def test_shapes_have_the_published_sizes(shape: str):
    """Parameters of the checkpoints' bodies, to 1 % (heads differ), counted without memory."""
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(bench.build_config(shape))
    published = {
        "minilm": 22.7e6,
        "roberta-base": 124.6e6,
        "roberta-large": 355e6,
        "opt-125m": 125.2e6,
        "opt-1.3b": 1.316e9,
        "tiny": sum(p.numel() for p in model.parameters()),
    }
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(published[shape], rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "repeats=0: it must be at least 1"),
        (["--num_directions", "-1"], "num_directions=-1"),
        (["--seq_length", "4096"], "seq_length=4096 is more than tiny has positions for"),
    ],
)
def test_bad_settings_are_refused(words: list[str], message: str, capsys: Any):
    assert cli.main([*TINY, "--no_memory", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_shape_names_the_known_ones(capsys: Any):
    with pytest.raises(SystemExit):
        cli.main(["bench", "step", "--shape", "gpt5"])
    assert "roberta-base" in capsys.readouterr().err
