"""Signal against rounding: the estimate is compared with float64, where both can be computed."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_runs
import torch
from transformers import BertForSequenceClassification

from hf_dpzero import DPZeroTrainer
from hf_dpzero.checks.precision import low_precision
from hf_dpzero.estimators import precision_diagnostics
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.estimators.precision_diagnostics import (
    PrecisionDiagnostic,
    measure,
    random_tokens,
)
from hf_dpzero.objectives.heads import select_objective, sequence_classification_objective
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.training import zeroth_order_method

ROWS = 8


def lively_model(seed: int = 0) -> BertForSequenceClassification:
    """Wide enough initial weights that rounding and signal are both far from 0."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    wide = {"max_position_embeddings": 40, "initializer_range": 0.1}
    return tiny_runs.tiny_model(seed, **sizes, **wide).eval()


def public() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 64, (ROWS, 16), generator=generator)
    labels = torch.randint(0, 2, (ROWS,), generator=generator)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}]


def differences_of(model: Any, smoothing: float, autocast: bool) -> FiniteDifferences:
    def objective(model: Any, inputs: Any) -> torch.Tensor:
        low = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with low:
            return sequence_classification_objective(model, inputs)

    space = ParameterSpace.from_model(model, smoothing=smoothing)
    space.snap_()
    return FiniteDifferences(model, space, objective, smoothing)


@torch.no_grad()
def half_differences_in_float64(model: Any, smoothing: float, direction: Direction) -> torch.Tensor:
    """(f(theta + lambda u) - f(theta - lambda u)) / 2 with float64 arithmetic, [B]."""
    exact = copy.deepcopy(model).float()
    space = ParameterSpace.from_model(exact, smoothing=smoothing)
    losses = []
    for sign in (1.0, -1.0):
        space.move_to_(((direction, sign * smoothing),))
        twin = copy.deepcopy(exact).double()
        (batch,) = public()
        logits, labels = twin(input_ids=batch["input_ids"]).logits, batch["labels"]
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    return (losses[0] - losses[1]) / 2.0


@pytest.mark.parametrize(
    ("dtype", "autocast", "smoothing"),
    [
        (torch.float32, True, 4e-3),
        (torch.bfloat16, False, 4e-3),
        (torch.float16, False, 1e-4),
        (torch.float32, False, 1e-5),
    ],
)
def test_both_numbers_are_those_of_float64(dtype, autocast, smoothing):
    """Signal to 30 % where it is visible; rounding within a factor of 2. Other directions there."""
    model = lively_model().to(dtype)
    theta = copy.deepcopy(model)
    differences = differences_of(model, smoothing, autocast)
    found = measure(differences, public(), "any", draws=8)
    signal, error = [], []
    for step in range(8):
        direction = Direction(99, step, 0)
        truth = half_differences_in_float64(theta, smoothing, direction)
        computed = differences(public(), [direction])[:, 0] * smoothing
        differences.space.settle_()
        signal.append(truth)
        error.append(computed - truth)
    true_signal = float(torch.stack(signal).square().mean(dim=0).sqrt().median())
    true_rounding = float(torch.stack(error).square().mean(dim=0).sqrt().median())
    assert 0.5 < found.rounding / true_rounding < 2.0
    if true_signal > 2.0 * true_rounding:
        assert 0.7 < found.signal / true_signal < 1.3
    assert (found.ratio < 1.0) <= (true_signal < 2.0 * true_rounding)


def test_the_suggestion_reaches_the_ratio_it_promises():
    """Linear in smoothing: measured at a ratio near 1, checked where it points to."""
    weak = measure(differences_of(lively_model(), 1e-4, True), public(), "", draws=16)
    assert 0.3 < weak.ratio < 3.0
    assert weak.suggestion is not None
    there = measure(differences_of(lively_model(), weak.suggestion, True), public(), "")
    assert there.ratio > 2.0  # 3, but for the sampling error of both


def test_a_smooth_function_has_no_rounding_but_for_its_cubic_term():
    """o(a) = g a + c a^3: r = o(l) - 3 o(l/3) = 8/9 c l^3, so rounding = 8 c l^3 / (9 sqrt 10)."""
    smoothing, slope, cubic = 0.1, 2.0, 5.0

    def o(a: float) -> torch.Tensor:
        return torch.full((3, 2), slope * a + cubic * a**3, dtype=torch.float64)

    found = precision_diagnostics._diagnose(o(smoothing), o(smoothing / 3), "", smoothing)
    assert found.rounding == pytest.approx(8 * cubic * smoothing**3 / (9 * math.sqrt(10)))
    assert found.signal == pytest.approx(
        math.sqrt((slope * smoothing + cubic * smoothing**3) ** 2 - found.rounding**2)
    )


def test_the_median_is_over_examples_and_infinite_losses_are_left_out():
    whole = torch.tensor([[1.0, 2.0, 100.0, math.nan, math.inf]]).double()
    found = precision_diagnostics._diagnose(whole, whole / 3, "", 1.0)
    assert found.signal == pytest.approx(2.0)
    assert found.rounding == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="no public example has a finite loss"):
        precision_diagnostics._diagnose(whole[:, 3:], whole[:, 3:], "", 1.0)


@pytest.mark.parametrize(
    ("signal", "rounding", "ratio", "factor"),
    [
        (0.75, 1.0, 0.75, 4),
        (0.74, 1.0, 0.74, 8),
        (2.9, 1.0, 2.9, 2),
        (3.0, 1.0, 3.0, 1),
        (1.0, 0.0, math.inf, 1),
        (0.0, 1.0, 0.0, None),
    ],
)
def test_ratio_and_suggestion(signal, rounding, ratio, factor):
    """The smallest power of two k with k * ratio >= 3; none where no signal is seen."""
    found = PrecisionDiagnostic(signal, rounding, "bf16", smoothing=0.5)
    assert found.ratio == ratio
    assert found.suggestion == (None if factor is None else 0.5 * factor)


def test_the_text_has_both_numbers_and_what_to_do():
    text = str(PrecisionDiagnostic(0.00123, 0.00246, "bf16 autocast", 1e-3))
    assert "bf16 autocast" in text and "0.0012" in text and "0.0025" in text
    assert "Set smoothing=0.008" in text
    assert "No signal is visible" in str(PrecisionDiagnostic(0.0, 1.0, "", 1e-3))
    assert "Set" not in str(PrecisionDiagnostic(4.0, 1.0, "", 1e-3))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_and_smoothing_are_as_before(dtype, fails):
    differences = differences_of(lively_model().to(dtype), 4e-3, autocast=False)
    before = copy.deepcopy(differences.model.state_dict())
    inner, calls = differences.objective, []

    def counted(model: Any, inputs: Any) -> torch.Tensor:
        calls.append(1)
        if fails and len(calls) == 3:  # at lambda / 3
            raise KeyError("from the model")
        return inner(model, inputs)

    differences.objective = counted
    expected = pytest.raises(KeyError, match="model") if fails else contextlib.nullcontext()
    with expected:
        measure(differences, public(), "")
    after = differences.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert differences.smoothing == 4e-3
    assert not differences.space.position


HALF = "parameters that are not float32 (weight, ...)"


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        (torch.float32, {}, ""),
        (torch.bfloat16, {}, HALF),
        (torch.float32, {"mixed_precision": "bf16", "bf16": True}, "bf16=True"),
        (torch.float32, {"tf32": True}, "tf32=True"),
        (torch.bfloat16, {"tf32": True}, f"tf32=True and {HALF}"),
    ],
)
def test_low_precision_names_what_is_below_float32(dtype, settings, expected):
    args = SimpleNamespace(
        **{"mixed_precision": "no", "bf16": False, "fp16": False, "tf32": None, **settings}
    )
    assert low_precision(torch.nn.Linear(2, 2).to(dtype), args) == expected


def schema(label_dimensions: int, width: int = 5) -> dict[str, torch.Tensor]:
    ids = torch.full((2, width), 7)
    labels = torch.zeros(2, dtype=torch.int64) if label_dimensions == 1 else ids
    return {"input_ids": ids, "attention_mask": ids, "labels": labels}


@pytest.mark.parametrize(
    ("factory", "label_dimensions"), [("tiny_bert", 1), ("tiny_gpt2", 2), ("tiny_t5", 2)]
)
def test_random_tokens_suit_every_architecture(factory, label_dimensions, request):
    model = request.getfixturevalue(factory)()
    batch = random_tokens(schema(label_dimensions), model)
    assert batch is not None
    width = 32 if factory == "tiny_t5" else 20  # half of 40 positions; T5 has no bound
    assert batch["input_ids"].shape == (precision_diagnostics.ROWS, width)
    end = getattr(model.config, "eos_token_id", None)
    inside = batch["input_ids"][:, :-1] if end is not None else batch["input_ids"]
    special = {getattr(model.config, f"{n}_token_id", None) for n in ("pad", "bos", "eos")}
    assert not special & set(inside.unique().tolist())
    with torch.no_grad():
        losses = select_objective(model)(model, batch)
    assert (
        losses.shape == (precision_diagnostics.ROWS,)
        and losses.isfinite().all()
        and losses.std() > 0
    )


def test_random_tokens_do_not_depend_on_values_or_sizes(tiny_bert):
    """Both are decided by private rows."""
    model, first = tiny_bert(), schema(1, width=5)
    second = {k: (v + 9).repeat(3, *[2] * (v.dim() - 1)) for k, v in schema(1, width=8).items()}
    one, two = random_tokens(first, model), random_tokens(second, model)
    assert one is not None and two is not None
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_labels_of_every_kind(tiny_bert):
    model, base = tiny_bert(num_labels=3), schema(1)
    cases = {
        "classes": (torch.zeros(2, dtype=torch.int64), (8,), torch.int64),
        "regression": (torch.zeros(2), (8,), torch.float32),
        "several labels": (torch.zeros(2, 3), (8, 3), torch.float32),
        "tokens": (torch.zeros(2, 5, dtype=torch.int64), (8, 20), torch.int64),
    }
    for like, shape, dtype in cases.values():
        batch = random_tokens({**base, "labels": like}, model)
        assert batch is not None
        assert batch["labels"].shape == shape and batch["labels"].dtype == dtype
    classes = random_tokens(base, model)["labels"]
    assert set(classes.tolist()) <= {0, 1, 2}
    spans = random_tokens(
        {"input_ids": base["input_ids"], "start_positions": base["labels"]}, model
    )
    assert spans["start_positions"].max() < 20
    types = random_tokens({**base, "token_type_ids": base["input_ids"]}, model)
    assert not types["token_type_ids"].any()


def test_inputs_without_an_obvious_random_value_give_none(tiny_bert):
    model = tiny_bert()
    assert random_tokens({"pixel_values": torch.zeros(2, 3, 4, 4)}, model) is None
    assert random_tokens({**schema(1), "boxes": torch.zeros(2, 5, 4)}, model) is None
    assert random_tokens({**schema(1), "labels": torch.zeros(2, 5, 4).long()}, model) is None
    assert random_tokens({"input_ids": torch.zeros(2, 4, 5).long()}, model) is None
    assert random_tokens(schema(1), torch.nn.Linear(2, 2)) is None


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 64, (count, 8), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0] > 33)}
        for row in ids
    ]


def build(folder: Any, evaluation: Any = None, **settings: Any) -> DPZeroTrainer:
    settings = {"max_steps": 1, "expected_batch_size": 4, "microbatch_size": 1, **settings}
    return tiny_runs.build(
        folder,
        lively_model(),
        data=rows(40, seed=1),
        trainer_settings={"eval_dataset": evaluation},
        **{"bf16": True, **settings},
    )


def warnings_of(caplog: Any, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level and "public" in r.message]


@pytest.fixture
def caplog_of_package(caplog):
    """Info messages of the trainer reach caplog."""
    logger = logging.getLogger("hf_dpzero")
    before = logger.level
    logger.setLevel(logging.INFO)
    with caplog.at_level(logging.INFO):
        yield caplog
    logger.setLevel(before)


def test_a_lost_signal_warns_with_both_numbers(tmp_path, caplog_of_package):
    build(tmp_path, smoothing=1e-6).train()  # on random tokens
    (message,) = warnings_of(caplog_of_package)
    assert message.startswith("bf16=True: on public data smoothing=1e-06 changes the loss by")
    ratio = float(re.search(r"rounding by .*; ratio ([\d.]+)\. ", message)[1])
    assert ratio < 2  # what changes the loss is rounding itself


def test_a_visible_signal_does_not_warn(tmp_path, caplog_of_package):
    build(tmp_path, rows(10, seed=2), smoothing=4e-3).train()
    assert not warnings_of(caplog_of_package)
    (message,) = warnings_of(caplog_of_package, logging.INFO)
    assert "changes the loss by" in message


def test_float32_measures_nothing(tmp_path, monkeypatch):
    def never(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(precision_diagnostics, "measure", never)
    build(tmp_path, bf16=False).train()
    with pytest.raises(AssertionError, match="measured"):
        build(tmp_path / "low").train()


def test_it_sees_public_rows_only_split_as_the_run_is(tmp_path, monkeypatch):
    seen: list[Any] = []

    def spy(differences: Any, public: Any, dtype: str) -> PrecisionDiagnostic:
        seen.append(public)
        return PrecisionDiagnostic(4.0, 1.0, dtype, 1e-3)

    monkeypatch.setattr(precision_diagnostics, "measure", spy)
    held_out = rows(10, seed=2)
    build(tmp_path / "rows", held_out).train()
    build(tmp_path / "parts", {"first": held_out[:3], "second": held_out}).train()
    build(tmp_path / "none").train()
    given, part, drawn = seen
    assert [len(m["labels"]) for m in given] == [1] * precision_diagnostics.ROWS
    ids = torch.cat([m["input_ids"] for m in given])
    assert torch.equal(
        ids, torch.stack([row["input_ids"] for row in held_out[: precision_diagnostics.ROWS]])
    )
    assert len(part) == 3
    expected = random_tokens(schema(1), lively_model())["input_ids"]
    assert torch.equal(torch.cat([one["input_ids"] for one in drawn]), expected)


def test_the_run_is_the_same_with_and_without_it(tmp_path, monkeypatch):
    """Weights, releases, ledger and the global generators."""
    with_it = build(tmp_path / "with", rows(10, seed=2), smoothing=4e-3)
    state = torch.get_rng_state()
    with_it.train()
    middle = torch.get_rng_state()
    monkeypatch.setattr(zeroth_order_method, "low_precision", lambda *_: "")
    without = build(tmp_path / "without", rows(10, seed=2), smoothing=4e-3)
    torch.set_rng_state(state)
    without.train()
    assert torch.equal(torch.get_rng_state(), middle)
    assert with_it.trajectory.releases == without.trajectory.releases
    assert with_it.epsilon_spent == without.epsilon_spent
    for one, two in zip(with_it.model.parameters(), without.model.parameters()):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["data", "shape"])
def test_public_data_that_cannot_be_used_does_not_stop_the_run(tmp_path, caplog_of_package, kind):
    held_out: Any = rows(10, seed=2)
    if kind == "shape":
        held_out[0]["input_ids"] = torch.ones(3, 3).long()
    else:
        held_out = {1, 2, 3}  # a length, but no random access
    trainer = build(tmp_path, held_out)
    trainer.train()
    assert len(trainer.trajectory.releases) == 1
    told = "were not compared" if kind == "shape" else "changes the loss by"  # of random tokens
    assert any(told in r.getMessage() for r in caplog_of_package.records)


def test_a_write_to_the_parameters_does_stop_it(tmp_path, monkeypatch):
    def writes(*_: Any) -> None:
        raise ParameterChanged("weight was written to")

    monkeypatch.setattr(precision_diagnostics, "measure", writes)
    with pytest.raises(ParameterChanged):
        build(tmp_path).train()
