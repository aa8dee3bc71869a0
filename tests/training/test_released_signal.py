"""A run that fails to learn says so: a statistic of releases, warnings, and checks before step 0."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from tiny_runs import build, tiny_data, tiny_model
from transformers import TrainerCallback

from hf_dpzero.checks.invented_rows import tokens_of_a_pass
from hf_dpzero.checks.public_rows import judge_differences, leaving_out
from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.objectives.losses import classification_losses, token_losses
from hf_dpzero.privacy.correlated.correlation import Correlation, sensitivity
from hf_dpzero.privacy.correlated.stream import CorrelatedNoise
from hf_dpzero.privacy.mechanisms import mechanism_from_dict
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FixedBatchesSampler
from hf_dpzero.training import zeroth_order_method
from hf_dpzero.training.signal import ReleasedSignal, Signal, noise_variance, some_numbers

SCALAR = {"name": "dpzero", "clip": 6.0, "noise_multiplier": 2.0, "expected_batch_size": 4}


def scalar_signal(values, **settings) -> ReleasedSignal:
    """The statistic of one-direction releases of `SCALAR`, whose noise has deviation 2 * 6 / 4 = 3."""
    mechanism = mechanism_from_dict(SCALAR | settings)
    signal = ReleasedSignal(mechanism)
    signal.follow([Release(i, (float(v),), 0.1) for i, v in enumerate(values)])
    return signal


# ---- the statistic


def test_of_equal_releases_it_is_their_square_over_the_variance():
    whole = scalar_signal([4.5] * 8).whole
    assert whole.ratio == pytest.approx(1.5**2 - 1)
    assert whole.deviation == pytest.approx(math.sqrt(2 / 8))


def test_the_window_forgets_and_the_whole_does_not():
    signal = scalar_signal([0.0] * 50 + [3.0] * 50)
    assert signal.recent.ratio == pytest.approx(0.0)
    assert signal.whole.ratio == pytest.approx(-0.5)
    assert signal.steps == 100 and scalar_signal([]).recent is None


@pytest.mark.parametrize(
    ("settings", "draw", "deviation"),
    [
        ({}, lambda rng: rng.normal(0, 3, 2000), math.sqrt(2 / 2000)),
        # scale b = 3: variance 18, fourth moment 24 b^4 = 6 times the variance squared
        ({"distribution": "laplace"}, lambda rng: rng.laplace(0, 3, 2000), math.sqrt(5 / 2000)),
    ],
)
def test_noise_alone_is_within_three_deviations_and_a_planted_mean_shows(settings, draw, deviation):
    noise = draw(np.random.default_rng(0))
    variance = 18.0 if settings else 9.0
    whole = scalar_signal(noise, **settings).whole
    assert whole.deviation == pytest.approx(deviation)
    assert abs(whole.ratio) < 3 * deviation
    # mean^2 / variance = 4; the deviation of the estimate is at most sqrt((5 + 4 * 4) / n) = 0.1
    planted = scalar_signal(noise + 2 * math.sqrt(variance), **settings).whole
    assert planted.visible and abs(planted.ratio - 4.0) < 0.31


def test_an_adaptive_clip_is_that_of_each_step_and_its_count_is_left_out():
    adaptive = {"clip_quantile": 0.5, "clip_learning_rate": 0.2, "clip_count_noise": 2.0}
    mechanism = mechanism_from_dict(SCALAR | {"name": "dpzero-adaptive", **adaptive})
    releases = [Release(0, (1.0, 1.5), 0.1), Release(1, (1.0, 0.5), 0.1), Release(2, (1.0, 9.0), 0)]
    signal = ReleasedSignal(mechanism)
    signal.follow(releases[:1])
    signal.follow(releases)
    first = (mechanism.sum_multiplier * 6.0 / 4) ** 2  # C_0; then C exp(-0.2 (1.5 - 0.5)), twice
    after = first * math.exp(-0.4)
    assert signal.whole.ratio == pytest.approx((1 / first + 2 / after) / 3 - 1)


# ---- noise that is correlated over steps

STEPS, PLAIN_STD = 64, math.sqrt(2 / 64)


def correlated_plan(kind="banded", **settings) -> PrivacyPlan:
    return PrivacyPlan(
        sampler=FixedBatchesSampler(num_examples=4 * STEPS, expected_batch_size=4),
        mechanism=mechanism_from_dict(SCALAR | {"name": "dp-sgd", "dimension": 50}),
        steps=STEPS,
        correlation=Correlation(kind=kind, bands=32 if kind == "banded" else 0, **settings),
    )


def correlated_releases(plan, size: int, seed: int, mean: float = 0.0) -> np.ndarray:
    """What the plan's mechanism makes of a gradient in units of independent noise: [T, size]."""
    factorization = plan.correlation.factorization(STEPS)
    noise = CorrelatedNoise(InsecureSeededNoise(seed), factorization, sensitivity(plan), size)
    total = np.full(size, mean * plan.mechanism.noise_scale)
    return np.stack([plan.mechanism.release_part(total, noise, t, 0) for t in range(STEPS)])


def statistic(plan, released) -> Signal:
    """Of releases [T, n]."""
    signal = ReleasedSignal(plan.mechanism, plan)
    for step, values in enumerate(released):
        signal.add_release(step, values, noise_variance(plan.mechanism))
    assert signal.last_norm == pytest.approx(np.linalg.norm(released[-1]))
    return signal.whole


RUNS = 6000


@pytest.mark.parametrize("kind", ["toeplitz", "banded", "optimized", "tree"])
def test_correlated_noise_alone_has_the_stated_spread(kind):
    """Of many runs with one number a step: mean 0, deviation sqrt(2 / T), within 5 standard errors."""
    plan = correlated_plan(kind)
    innovations, ratios = ReleasedSignal(plan.mechanism, plan).innovations, -np.ones(RUNS)
    for step, values in enumerate(correlated_releases(plan, RUNS, seed=1)):
        rest, factor = innovations.of(step, values)
        ratios += rest**2 / (factor * noise_variance(plan.mechanism)) / STEPS
    assert abs(ratios.mean()) < 5 * PLAIN_STD / math.sqrt(RUNS)
    assert ratios.std() == pytest.approx(PLAIN_STD, rel=5 * math.sqrt(0.6 / RUNS))


@pytest.mark.parametrize("kind", ["toeplitz", "banded", "optimized"])
def test_a_mean_that_stays_shows_under_correlated_noise(kind):
    """Half of the deviation that independent noise has, in 4 numbers: C^{-1} takes little of it away,
    and C adds 64 steps of it up."""
    plan = correlated_plan(kind)
    assert not statistic(plan, correlated_releases(plan, 4, seed=2)).visible
    found = statistic(plan, correlated_releases(plan, 4, seed=2, mean=0.5))
    assert found.visible and found.ratio > 3 * found.deviation


def test_noise_of_another_deviation_is_not_taken_for_the_plans():
    plan = correlated_plan()
    released = correlated_releases(plan, 2000, seed=3)
    deviation = math.sqrt(2 / (2000 * STEPS))
    assert abs(statistic(plan, released).ratio) < 3 * deviation
    for wrong in (1.02, 0.98):
        assert abs(statistic(plan, wrong * released).ratio) > 5 * deviation
    # whitened by other weights than it was made with
    assert abs(statistic(correlated_plan("toeplitz"), released).ratio) > 5 * deviation


def test_long_vectors_are_looked_at_in_part(monkeypatch):
    monkeypatch.setattr("hf_dpzero.training.signal.REMEMBERED", 5)
    parts = [torch.arange(7.0).view(7, 1), torch.arange(7.0, 9.0), torch.arange(9.0, 13.0)]
    assert some_numbers(parts).tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    monkeypatch.setattr("hf_dpzero.training.signal.REMEMBERED", 13)
    assert some_numbers(parts).tolist() == list(range(13))


CORRELATED = {
    "sampling": "fixed_batches",
    "correlated_noise.kind": "banded",
    "correlated_noise.bands": 3,
    "max_steps": 10,
    "clip": 0.01,
}


@pytest.mark.parametrize(
    "settings",
    [{"method": "dp-adamw"}, {"correlated_noise.hold_direction_for": 4, "num_directions": 2}],
)
def test_runs_with_correlated_noise_use_its_covariance(tmp_path, settings):
    """Of a tiny clip the mean gradient is far below the noise: within 4 deviations of 0."""
    trainer = build(tmp_path, **CORRELATED, **settings)
    trainer.train()
    whole = trainer.watch.signal.whole
    assert trainer.watch.signal.innovations is not None and trainer.watch.signal.steps == 10
    of_a_step = settings.get("num_directions") or sum(p.numel() for p in trainer.model.parameters())
    numbers = 10 * of_a_step
    assert whole.deviation == pytest.approx(math.sqrt(2 / numbers))
    if "method" in settings:
        assert abs(whole.ratio) < 4 * whole.deviation
    logged = [row["released_signal"] for row in trainer.state.log_history if "epsilon" in row]
    assert logged[-1] == pytest.approx(whole.ratio)


# ---- in runs


class SumsOfGradients(TrainerCallback):
    """What the optimizer is handed: sums of squares and numbers."""

    def __init__(self):
        self.squares, self.numbers = 0.0, 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            self.squares += float(p.grad.double().square().sum())
            self.numbers += p.numel()


def test_first_order_runs_measure_the_gradient_that_the_optimizer_gets(tmp_path):
    seen = SumsOfGradients()
    trainer = build(tmp_path, method="dp-sgd", trainer_settings={"callbacks": [seen]})
    trainer.train()
    whole = trainer.watch.signal.whole
    variance = (1.0 * 5.0 / 12) ** 2
    assert whole.ratio == pytest.approx(seen.squares / seen.numbers / variance - 1, abs=1e-5)
    assert abs(whole.ratio) < 3 * whole.deviation  # of clip 5 at 6000 coordinates little is seen
    logged = [row["released_signal"] for row in trainer.state.log_history if "epsilon" in row]
    assert len(logged) == 3 and logged[-1] == pytest.approx(whole.ratio)


@pytest.mark.parametrize("method", ["mezo", "dpgd-0th"])
def test_runs_without_noised_numbers_log_none(tmp_path, method):
    noise = None if method == "mezo" else 1.0
    trainer = build(tmp_path, method=method, noise_multiplier=noise)
    trainer.train()
    assert not any("released_signal" in row for row in trainer.state.log_history)


def flat_where_labelled_zero(model, inputs):
    """A loss that is constant on rows of label 0; public rows of label 1 do not show it."""
    losses = classification_losses(model(inputs["input_ids"]).logits, inputs["labels"])
    return torch.where(inputs["labels"] == 0, 0.7 + 0.0 * losses, losses)


FEW_LOGS = {"max_steps": 24, "logging_steps": 20}


def flat_run(folder, **settings):
    rows = tiny_data()
    public = {"eval_dataset": tiny_data(40, seed=2).filter(lambda row: row["labels"] == 1)}
    public["compute_per_example_loss"] = flat_where_labelled_zero
    data = rows.remove_columns("labels").add_column("labels", [0] * len(rows))
    return build(folder, data=data, trainer_settings=public, **FEW_LOGS, **settings)


@pytest.mark.parametrize("way", ["warn", "stop", "ignore"])
def test_a_run_on_constant_losses_warns_once_and_names_settings(tmp_path, caplog, way):
    """A run that stops there leaves budget, and its report counts the steps taken."""
    trainer = flat_run(tmp_path, on_no_signal=way)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    said = [r.getMessage() for r in caplog.records if "told from noise" in r.getMessage()]
    assert len(said) == (way != "ignore")
    named = ("clip=5", "noise_multiplier=1", "expected_batch_size=12", "smoothing=0.001")
    assert all(setting in text for text in said for setting in (*named, "learning_rate"))
    steps = 20 if way == "stop" else 24
    assert trainer.state.global_step == steps == trainer.trajectory.next_step
    assert ("after 20 of 24 steps" in caplog.text) == (way == "stop")
    report = trainer.privacy_report()
    assert (report.steps, report.planned_steps) == (steps, 24)
    assert (trainer.epsilon_spent < trainer.plan.epsilon(1e-3)) == (way == "stop")
    trainer.save_model()


def test_another_word_for_what_happens_without_signal_is_refused(tmp_path):
    with pytest.raises(ValueError, match="on_no_signal='never' is not one of warn, stop, ignore"):
        build(tmp_path, on_no_signal="never")


def test_a_run_that_sees_something_does_not_warn(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = build(tmp_path, clip=0.2, learning_rate=1e-3, **FEW_LOGS)
        trainer.train()
    assert trainer.watch.signal.whole.visible
    assert not [r for r in caplog.records if "told from noise" in r.getMessage()]


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd", "dp-adamw"])
def test_an_update_longer_than_the_weights_is_warned_of_once(tmp_path, caplog, monkeypatch, method):
    """Whether the rate was given, or (for dpzero) chosen from a clip that is far too small alone."""
    monkeypatch.setattr(zeroth_order_method, "public_microbatches", lambda *_, **__: [])
    with caplog.at_level(logging.WARNING):
        build(tmp_path / "small", method=method).train()
        assert "far too large" not in caplog.text
        build(tmp_path / "large", method=method, learning_rate=30.0, max_steps=3).train()
        if method == "dpzero":
            build(tmp_path / "own", learning_rate=None, clip=1e-3, max_steps=3).train()
    said = [r.getMessage() for r in caplog.records if "far too large" in r.getMessage()]
    assert said[0].startswith("step 0 moved") and "learning_rate=30" in said[0]
    assert said[0].endswith("Lower it.") and len(said) == 1 + (method == "dpzero")
    assert method != "dpzero" or "from the plan: give a smaller one, or more max_steps" in said[1]


def test_weights_that_start_at_zero_are_not_compared_with_their_updates(tmp_path, caplog):
    """A head of zeros takes its size from its first steps; obeying the warning would cost accuracy."""
    model = tiny_model()
    torch.nn.init.zeros_(model.classifier.weight)
    with caplog.at_level(logging.WARNING):
        build(tmp_path, model, trainable="classifier", learning_rate=None, clip=None).train()
    assert "far too large" not in caplog.text


class Overflow(TrainerCallback):
    """Weights as an update could leave them that is too large."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                model.classifier.bias.fill_(math.inf)
            self.trainer.method.weights.note()


def test_weights_that_are_not_finite_stop_the_run_whatever_is_set(tmp_path, caplog):
    overflow = Overflow()
    settings = {"callbacks": [overflow]}
    trainer = build(tmp_path, method="dp-sgd", on_no_signal="ignore", trainer_settings=settings)
    overflow.trainer = trainer
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 3 == trainer.trajectory.next_step
    assert "no longer finite: lower learning_rate" in caplog.text


def test_a_resumed_run_looks_back_to_its_first_step(tmp_path):
    trainer = build(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    again = build(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.watch.signal.whole == trainer.watch.signal.whole


# ---- before step 0


def test_a_model_of_nan_is_refused(tmp_path):
    model = tiny_model()
    torch.nn.init.constant_(model.bert.embeddings.word_embeddings.weight, math.nan)
    with pytest.raises(ValueError, match="the loss is NaN or infinite on every public row"):
        build(tmp_path, model).train()
    assert not (tmp_path / "trajectory.ledger").exists()


@pytest.mark.parametrize("settings", [{}, {"eval_dataset": None}])
def test_a_smoothing_below_the_rounding_of_the_loss_is_refused(tmp_path, settings):
    with pytest.raises(
        ValueError, match="smoothing=1e-12 does not change the loss.*raise smoothing"
    ):
        build(tmp_path, smoothing=1e-12, trainer_settings=settings).train()
    build(tmp_path).train()  # the folder is as free as before
    assert Trajectory.load(tmp_path / "trajectory.ledger").next_step == 6


def test_parameters_that_the_loss_does_not_use_are_refused(tmp_path):
    model = tiny_model()
    model.unused = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="does not depend on what is trained: look at trainable"):
        build(tmp_path, model, trainable="unused").train()


def test_changes_of_a_few_roundings_are_warned_of(caplog):
    loss = torch.full((8, 1), 0.75)
    step = 2.0**-24  # spacing of float32 below 1
    with caplog.at_level(logging.WARNING):
        judge_differences(loss, loss + 100 * step, 1e-3)
        assert not caplog.records
        judge_differences(loss, loss + step, 1e-3)
        assert "mostly float32 rounding: raise smoothing" in caplog.text
        caplog.clear()
        judge_differences(0 * loss, 0 * loss, 1e-3)
        assert "nothing can be learned" in caplog.text
    with pytest.raises(ValueError, match="smoothing=5.0 makes the loss NaN or infinite"):
        judge_differences(loss * math.nan, loss, 5.0)


def test_public_rows_that_a_loss_does_not_take_are_left_out_but_not_our_own_mistakes():
    def theirs(model, inputs):
        raise TypeError("a loss of its own kind")

    with leaving_out("not tried"):
        theirs(None, None)
    with pytest.raises(TypeError), leaving_out("not tried"):
        tokens_of_a_pass("many", "cpu")


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_a_label_out_of_range_is_refused_in_words(tmp_path, method):
    rows = tiny_data()
    data = rows.remove_columns("labels").add_column("labels", [7] * len(rows))
    with pytest.raises(ValueError, match="the model has 2 logits, so labels are 0 to 1") as refusal:
        build(tmp_path, data=data, method=method).train()
    assert "7" not in str(refusal.value)


def test_losses_check_labels_and_leave_ignored_ones():
    logits = torch.zeros(2, 3)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="a label is out of range"):
            classification_losses(logits, torch.tensor([0, wrong]))
        with pytest.raises(ValueError, match="a label is out of range"):
            token_losses(logits[None], torch.tensor([[0, wrong]]))
    ignored = token_losses(logits[None], torch.tensor([[0, -100]]))
    assert ignored.item() == pytest.approx(math.log(3))
