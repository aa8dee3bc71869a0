"""The benchmark: it runs, its keys exist, its yardsticks are what they say. No timing is judged."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch

from hf_dpzero.ledger.digests import digest_tensors
from scripts.benchmarks import capacity, clock, memory, timing
from scripts.benchmarks.command import build_parser, main
from scripts.benchmarks.settings import StepBench
from scripts.benchmarks.shapes import PUBLISHED, empty_model
from scripts.benchmarks.timed_steps import (
    Forwards,
    ReferenceStep,
    Step,
    build,
    largest_difference,
)

TINY = ["step", "--shape", "tiny", "--batch_size", "2", "--seq_length", "8"]


def tiny(**settings: Any) -> StepBench:
    plain = {"batch_size": 2, "seq_length": 8, "repeats": 2, "memory": False, "one_batch": True}
    return StepBench(**{"shape": "tiny", **plain, **settings})


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*TINY, "--repeats", "2", "--no_memory", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_option_reaches_the_process_that_measures_memory():
    own = {"dtype": "bfloat16", "num_directions": 2, "trainable": "classifier"}
    bench = tiny(**own, strategy="layerwise", skip_reference=True, memory=True)
    parsed = vars(build_parser().parse_args(["step", *memory.words_of(bench)]))
    for name in ("what", "json", "phase", "no_memory"):
        del parsed[name]
    assert StepBench(**parsed) == bench


COMMON = {
    "ratio_to_two_forwards", "ratio_quartiles", "seconds", "all_seconds", "restore_error",
    "dimension", "settings", "threads", "machine", "versions", "instruction_sets",
    "rows_per_pass", "blank_share",
}  # fmt: skip
REFERENCE = {
    f"reference_{n}" for n in ("ratio_to_two_forwards", "ratio_quartiles", "restore_error")
}
STEP = {
    "strategy",
    "noise",
    "notes",
    "bytes_per_parameter",
    "breakdown",
    "restore_error_after_3_cycles",
}
MARGINAL = {"seconds_per_direction", "marginal_ratio_per_direction"}


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        ("--direction gaussian --num_directions 3", "whole_model"),
        ("--method mezo --direction sphere --trainable classifier", "whole_model"),
        ("--dtype bfloat16 --one_batch", "layerwise"),
        ("--dtype bfloat16 --microbatch_size 1", "whole_model"),  # two passes, of a row each
        ("--dtype float16 --shape tiny-opt --strategy whole_model", "whole_model"),
        ("--strategy layerwise", "layerwise"),
    ],
)
def test_the_command_prints_the_documented_keys(words, strategy, capsys):
    result = run(capsys, *words.split())
    assert (result["notes"], result["strategy"]) == ([], strategy)
    assert set(result) == COMMON | REFERENCE | STEP | (MARGINAL if "gaussian" in words else set())
    assert result["restore_error"] == result["restore_error_after_3_cycles"] == 0.0
    assert 0 < result["ratio_quartiles"][0] <= result["ratio_to_two_forwards"]
    assert len(result["all_seconds"]["step"]) == 2
    assert all(math.isfinite(s) and s > 0 for s in result["seconds"].values())
    assert all(result["breakdown"][part] > 0 for part in ("forwards", "perturbation", "rest"))
    assert result["settings"]["num_directions"] == (3 if "gaussian" in words else 1)
    assert ("classifier" in words) == (result["dimension"] == 2 * 16 + 2)


def test_the_method_or_the_reference_alone(capsys):
    """The reference loop says that it does not restore; DP-AdamW perturbs nothing."""
    ours = run(capsys, "--skip_reference")
    assert set(ours) == COMMON | STEP and "reference" not in ours["seconds"]
    loop = run(capsys, "--method", "reference")
    assert set(loop) == COMMON | REFERENCE and "step" not in loop["seconds"]
    assert loop["ratio_to_two_forwards"] == loop["reference_ratio_to_two_forwards"]
    assert loop["restore_error"] > 0
    pytest.importorskip("opacus")
    first = run(capsys, "--method", "dp-adamw", "--shape", "tiny-opt", "--microbatch_size", "1")
    assert set(first) == COMMON | REFERENCE and first["restore_error"] is None
    assert first["seconds"]["step"] > 0


def test_the_table_is_for_people(capsys):
    assert main([*TINY, "--repeats", "2", "--no_memory", "--num_directions", "2"]) == 0
    printed = capsys.readouterr()
    for part in ("2 x 8 tokens", "4 bare forward passes", "dpzero step", "reference loop", "time x",
                 "quartiles", "each further direction", "of the step: perturbation", "were blanks",
                 "bytes a parameter, whole_model", "restore error after 3 cycles"):  # fmt: skip
        assert part in printed.out
    assert "building tiny" in printed.err and "round 2 of 3" in printed.err


@pytest.mark.parametrize(
    ("settings", "traffic"),
    [
        ({}, 16),  # twice 4 bytes read and 4 written: the update joins the next step's first pass
        ({"num_directions": 3}, 48),  # 2 K times
        ({"dtype": "bfloat16", "strategy": "whole_model"}, 10),  # one sweep updates and perturbs
    ],
)
def test_the_step_really_updates_and_defers_as_the_trainer_does(settings, traffic):
    """Of the tiny shape's 14 034 weights a few more are padding, hence the tolerance."""
    bench = tiny(**settings)
    model, batch = build(bench)
    step = Step(bench, model, batch)
    before = digest_tensors(model.named_parameters())
    step(0)
    assert step.space.waiting
    step.space.settle_()
    assert step.step.trajectory.next_step == 1
    assert digest_tensors(model.named_parameters()) != before
    moved = timing.bytes_per_parameter(step)
    assert moved == pytest.approx(traffic, rel=0.04) and moved >= traffic


def test_a_restore_that_is_not_exact_is_found(monkeypatch):
    """The check can fail: an engine that leaves a weight one unit in the last place off."""
    step = Step(tiny(), *build(tiny()))
    assert step.restore_errors(3) == (0.0, 0.0)
    settle, weight = step.space.settle_, step.space.tensors[3].view(-1)

    def sloppy() -> None:
        settle()
        with torch.no_grad():
            weight[0] += 2.0**-20

    monkeypatch.setattr(step.space, "settle_", sloppy)
    one, many = step.restore_errors(5)
    assert one == pytest.approx(2.0**-20, rel=0.5)
    assert many == pytest.approx(5 * one, rel=0.5)


def test_the_reference_loop_adds_a_standard_normal_vector():
    """A difference counts signs of zero as equal, and NaN as infinite."""
    zero = torch.zeros(3)
    assert largest_difference([zero, zero], [-zero, zero + 2]) == 2.0
    assert largest_difference([-zero], [zero]) == 0.0
    assert largest_difference([zero], [zero * torch.nan]) == math.inf
    reference = ReferenceStep(tiny(), *build(tiny()))
    theta = [p.detach().clone() for p in reference.parameters]
    reference.add(7, 0.5)
    z = [(p.detach() - t) / 0.5 for p, t in zip(reference.parameters, theta, strict=True)]
    reference.add(7, -0.5)
    flat = torch.cat([part.reshape(-1) for part in z])
    assert abs(float(flat.std()) - 1) < 0.05  # 14 034 normals: standard error 0.006
    assert 0 < reference.restore_error() < 1e-5
    assert largest_difference(theta, reference.parameters) < 1e-5


def test_the_yardstick_runs_the_objectives_forward(monkeypatch):
    """Same keywords as the objective's model call, no labels, no gradients, twice for each K."""
    bench = tiny(shape="tiny-opt", num_directions=3)
    model, batch = build(bench)
    calls: list[dict[str, Any]] = []
    forward = model.forward

    def watched(**inputs: Any) -> Any:
        calls.append({**inputs, "grad": torch.is_grad_enabled(), "training": model.training})
        return forward(**inputs)

    monkeypatch.setattr(model, "forward", watched)
    model.train()
    Forwards(bench, model, batch)(0)
    yardstick = list(calls)
    step = Step(bench, model, batch)
    calls.clear()
    step(0)
    assert len(yardstick) == len(calls) == 6
    for bare, own in zip(yardstick, calls, strict=True):
        assert bare.keys() == own.keys() and "labels" not in bare
        assert (bare["grad"], bare["training"], bare["use_cache"]) == (False, False, False)
        assert all(bare[name] is own[name] for name in ("input_ids", "attention_mask"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_created_in_their_dtype_and_differ(dtype):
    before = torch.get_default_dtype(), torch.random.get_rng_state()
    model: Any = build(tiny(dtype=dtype))[0]
    assert torch.get_default_dtype() is before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    for name, p in model.named_parameters():
        assert p.dtype is getattr(torch, dtype)
        assert bool(p.isfinite().all()) and float(p.detach().float().std()) > 0, name
    norm = model.bert.embeddings.LayerNorm.weight
    assert 0.9 < float(norm.detach().float().mean()) < 1.1
    assert model.bert.embeddings.position_ids[0, :3].tolist() == [0, 1, 2]


def test_a_quantised_base_is_packed_and_only_adapters_and_head_train():
    """NF4 packs two weights into a byte; its losses stay near those of the weights it rounds."""
    plain: Any = build(tiny(dtype="bfloat16"))[0]
    model: Any = build(tiny(dtype="bfloat16", load_in_4bit=True, lora_rank=4))[0]
    packed = {n: p for n, p in model.named_parameters() if p.dtype is torch.uint8}
    linear = [m for m in plain.bert.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(p.numel() for p in packed.values()) == sum(m.weight.numel() // 2 for m in linear)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n or "classifier" in n for n in trained)
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        exact, rounded = plain(ids).logits.float(), model(ids).logits.float()
    assert 0 < float((exact - rounded).abs().max()) < 0.1


def test_shapes_have_the_published_sizes():
    """Parameters of the checkpoints' bodies, to 1 % (heads differ), counted without memory."""
    published = {
        "minilm": 22.7e6, "roberta-base": 124.6e6, "roberta-large": 355e6, "opt-125m": 125.2e6,
        "opt-1.3b": 1.316e9, "opt-2.7b": 2.65e9, "opt-6.7b": 6.66e9, "opt-13b": 12.85e9,
        "smollm2-135m": 134.5e6,
    }  # fmt: skip
    assert published.keys() == set(PUBLISHED)
    for shape, size in published.items():
        model = empty_model(shape, "float32", "meta")
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.01), shape


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "repeats=0: it must be at least 1"),
        (["--seq_length", "4096"], "seq_length=4096 is more than tiny has positions for"),
        (["--method", "dp-adamw", "--dtype", "float16"], "dtype=float16 with method=dp-adamw"),
        (["--method", "dp-adamw", "--num_directions", "2"], "it has no directions"),
        (["--method", "dp-adamw", "--strategy", "layerwise"], "it perturbs nothing"),
        (["--microbatch_size", "1", "--one_batch"], "split their batch"),
        (["--method", "reference", "--skip_reference"], "nothing would be left to measure"),
        (["--load_in_4bit"], "packed weights cannot be trained"),
        (["--lora_rank", "-1"], "lora_rank=-1: it must be at least 0"),
    ],
)
def test_bad_settings_are_refused(words, message, capsys):
    assert main([*TINY, "--no_memory", *words]) == 2 and message in capsys.readouterr().err


def test_an_unknown_shape_names_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["memory", "--shapes", "minilm", "gpt5"])
    assert "roberta-base" in capsys.readouterr().err
    with pytest.raises(ValueError, match="shape='gpt5' is unknown; use one of minilm"):
        StepBench(shape="gpt5")


def test_the_marginal_cost_is_per_round_and_per_direction():
    rounds = {
        "step": [10.0, 13.0, 11.0],
        "step_of_one_direction": [4.0, 4.0, 2.0],
        "two_forwards_beside_step": [8.0, 4.0, 8.0],  # 2 K = 8 passes
    }
    cost = timing.marginal(rounds, 4)
    assert cost["seconds_per_direction"] == 3.0  # median of 2, 3, 3
    assert cost["marginal_ratio_per_direction"] == 1.5  # median of 2/2, 3/1, 3/2


def test_the_stopwatch_counts_nested_time_once(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(ticks)))
    watch = clock.Stopwatch("cpu")
    inner = watch.wrap("inner", lambda: "result")
    with watch.running("outer"):  # tick 0
        assert inner() == "result"  # ticks 1 and 2
        assert inner() == "result"  # ticks 3 and 4
    assert watch.seconds == {"outer": 3.0, "inner": 2.0}  # 0-1, 2-3, 4-5; 1-2, 3-4


def test_steps_take_turns_and_are_prepared_off_the_clock(monkeypatch):
    log: list[str] = []

    class Prepared:
        def __call__(self, step: int) -> None:
            log.append(f"b{step}")

        def prepare(self) -> None:
            log.append("ready")

    ticks = itertools.count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: log.append("tick") or next(ticks))
    seconds = clock.interleaved([lambda step: log.append(f"a{step}"), Prepared()], 1, "cpu")
    one = ["tick", "a0", "tick", "ready", "tick", "b0", "tick"]
    assert log == one + [entry.replace("0", "1") for entry in one] and seconds == [[1], [1]]


@pytest.mark.parametrize("shape", ["minilm", "roberta-base", "opt-125m", "smollm2-135m"])
def test_an_estimate_of_every_architecture(shape):
    found = capacity.estimates(capacity.CapacityTable(dtype="bfloat16", batch_size=8), shape)
    assert 0 < found["inference"] <= found["step"] < found["reference"] < found["dp-adamw"]


@pytest.mark.slow
def test_the_estimate_agrees_with_what_a_fresh_process_takes():
    """MiniLM on the CPU: what fits is said with some room."""
    asked = capacity.CapacityTable(shapes=("minilm",), batch_size=2)
    measured = memory.in_fresh_process(asked.bench("minilm", "step"), "step")
    assert 0.7 < capacity.estimates(asked, "minilm")["step"] / measured < 1.3


def test_a_private_step_draws_a_batch_for_every_round_in_fixed_shapes(capsys):
    """By default: Poisson batches, and the yardstick runs the very same microbatches."""
    bench = tiny(batch_size=24, one_batch=False, microbatch_size=5)
    assert bench.fixed_shapes and not tiny(method="mezo").fixed_shapes
    assert bench.placement.sizes == (1, 4, 5) and bench.placement.shares == {8: 1.0}
    model, batches = build(bench)
    drawn = [batches(number) for number in range(40)]
    sizes = [sum(part.examples for part in parts) for parts in drawn]
    assert (
        24 - 5 < sum(sizes) / 40 < 24 + 5 and len(set(sizes)) > 8
    )  # standard error 24^0.5 / 40^0.5
    for parts in drawn:
        shapes = [tuple(part["input_ids"].shape) for part in parts]
        assert shapes == [(bench.placement.rows_of(8, i), 8) for i in range(len(parts))]
    assert batches(3) is drawn[3]
    passes = sum(map(len, drawn))
    assert passes / 40 == pytest.approx(bench.passes, abs=1.5) and 24 / 5 < bench.passes < 24
    rows = sum(len(part["input_ids"]) for parts in drawn for part in parts)
    assert batches.blank_share() == pytest.approx(1 - sum(sizes) / rows) and rows > sum(sizes)
    assert batches.rows_per_pass() == rows / passes
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    Forwards(bench, model, batches)(5)
    assert len(calls) == 2 * len(drawn[5])
    step = Step(bench, model, batches)
    calls.clear()
    step(5)
    assert len(calls) == 2 * len(drawn[5])


def test_what_fits_is_estimated_and_measured(monkeypatch, capsys):
    """A process that takes twice the estimate; 13 GiB of weights are not tried in 12."""
    monkeypatch.setattr(capacity, "_available_bytes", lambda device: 12 << 30)
    words = ["memory", "--shapes", "tiny", "opt-6.7b", "--dtype", "float16"]
    asked = capacity.CapacityTable(shapes=("tiny",), dtype="float16")
    twice = {phase: 2 * size for phase, size in capacity.estimates(asked, "tiny").items()}
    monkeypatch.setattr(capacity, "in_fresh_process", lambda bench, phase: twice[phase])
    assert main([*words, "--measure", "--device_memory", "30"]) == 0
    title, head, small, ratios, large = capsys.readouterr().out.splitlines()
    assert ratios.split() == ["/", "measured", "0.50", "0.50", "0.50", "-"]
    assert "float16" in title and "! needs more than 30 GiB" in title
    assert "mezo reference loop" in head and small.split()[0] == "tiny" and "!" not in small
    assert "!" not in large and large.split()[-1] == "-"  # 12.4 GiB of weights; no dp-adamw
    assert main([*words, "--device_memory", "12", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[1]
    assert row["fits"] == {"inference": False, "step": False, "reference": False}
    assert row["estimate"]["step"] > 6.65e9 * 2
    assert main(["memory", "--device_memory", "0"]) == 2
    assert "device_memory=0.0" in capsys.readouterr().err


@pytest.mark.slow
def test_fixed_costs_are_of_steps_that_take_turns_and_of_their_parts(capsys):
    words = ["fixed", "--rows", "300", "--batch_size", "4", "--steps", "3", "--json"]
    assert main(words) == 0
    printed = capsys.readouterr().out  # the trainers' logs come first
    result = json.loads(printed[printed.index('{\n "settings"') :])
    assert set(result["seconds"]) == {"dpzero", "trainer"}
    assert {"sample", "noise", "ledger"} <= {k for k, taken in result["parts"].items() if taken > 0}
