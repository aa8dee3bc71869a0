"""Group-robust training in the trainer: weights, releases, replay, resume, reports and metrics."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
import torch
from tiny_runs import (
    GROUPS,
    SECRET,
    build,
    config,
    same,
    stopping,
    tiny_data,
    tiny_model,
    weights,
    with_groups,
)

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import evaluation_mode
from hf_dpzero.privacy.words import group_warning
from hf_dpzero.reporting.hub import write_model_card
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.verification import bound_to
from hf_dpzero.training.progress import banner

SHARES = GROUPS["group_robust.shares"]
FIXED = {"sampling": "fixed_batches"}
WAYS = {
    "balanced": {},
    "per_step": {},
    "prefix_sum": FIXED,
    "vertex": {**FIXED, "group_robust.draws": 3},
}


def made(tmp_path, **settings):
    defaults = {"data": with_groups(tiny_data()), **GROUPS}
    return build(tmp_path, **{**defaults, **settings})


def losses_of(trainer) -> torch.Tensor:
    rows = trainer.run.rows.collate_rows(list(range(len(trainer.train_dataset))))
    with torch.no_grad(), evaluation_mode(trainer.model):
        return select_objective(trainer.model)(trainer.model, rows).double()


# ---------------------------------------------------------------- what a step does


@pytest.mark.parametrize("way", WAYS)
def test_a_run_replays_to_its_weights(tmp_path, way):
    trainer = made(tmp_path, group_robust={"weights": way}, num_directions=2, **WAYS[way])
    base = weights(trainer.model)
    trainer.train()
    trainer.save_model()
    log = Trajectory.load(tmp_path / LEDGER_NAME)
    assert len(log.releases) == 6
    assert log.num_values == 2 + (0 if way == "balanced" else 2)
    fresh = tiny_model()
    replay(fresh, log)
    assert same(weights(fresh), weights(trainer.model)) and not same(base, weights(fresh))
    report = PrivacyReport.load(tmp_path)
    assert (way in report.groups and "group losses" in report.statement) or not report.private
    assert any("group_robust.shares" in caveat for caveat in report.caveats)
    assert f"groups      {way}" in banner(trainer.run, trainer.privacy_report())


def test_without_noise_a_step_is_what_the_formulas_say(tmp_path):
    """Full batch, rows of several lengths: fixed shapes reorder them, and groups follow their rows."""
    lengths = [3 + i % 6 for i in range(30)]
    mask = [[1] * n + [0] * (8 - n) for n in lengths]
    data = with_groups(tiny_data(30), every=3).remove_columns("attention_mask")
    settings = {
        "data": data.add_column("attention_mask", mask), "noise_multiplier": 0.0, "max_steps": 3,
        "sampling": "full_batch", "clip": 1e6, "expected_batch_size": 30, "learning_rate": 1.0,
        "trainer_settings": {"eval_dataset": None},
    }  # fmt: skip
    groups = {"shares": {"few": 1 / 3, "many": 2 / 3}, "rate": 4.0, "loss_bound": 1.5}
    run = made(tmp_path / "run", group_robust=groups, **settings)
    losses = losses_of(run)
    run.train()
    first, second, _ = run.trajectory.releases
    of = np.array([0 if i % 3 == 0 else 1 for i in range(30)])
    scale = 1 + 2.0**-8  # of the losses, for a displaced row
    centred = (losses.clamp(0, 1.5) / 0.75 - 1).numpy() / scale
    expected = [centred[of == i].sum() for i in (0, 1)]
    assert first.values[1:] == pytest.approx(expected, abs=1e-3)  # smoothing moves the losses
    g = scale * np.array(first.values[1:]) * 1.5 / (2 * 30 * np.array([1 / 3, 2 / 3]))
    odds = np.exp(4.0 * g)
    y = odds / odds.sum()
    weighting = run.step.weighting
    assert weighting.groups.softmax(np.array(first.values[1:]), 30, 3) == pytest.approx(y)
    assert weighting.groups.example_weights(y) == pytest.approx([y[0] * 3, y[1] * 1.5])
    plain = build(tmp_path / "plain", **settings)
    plain.train()
    # y = (1/2, 1/2) in the first step: the value is the mean of the two groups' mean differences
    assert len(plain.trajectory.releases[0].values) == 1
    assert second.values[0] != plain.trajectory.releases[1].values[0]


@pytest.mark.parametrize("way", WAYS)
def test_one_group_is_the_plain_method(tmp_path, way):
    """All rows of one group of share 1 weigh 1: the same numbers along the same directions."""
    data = tiny_data().add_column("where", ["all"] * 120)
    one = {"group_robust.shares": {"all": 1.0}, "group_robust.weights": way}
    robust = made(tmp_path / "robust", data=data, **one, **WAYS[way])
    plain = build(tmp_path / "plain", **(FIXED if "sampling" in WAYS[way] else {}))
    robust.train(), plain.train()
    values = [release.values[:1] for release in robust.trajectory.releases]
    assert values == [release.values for release in plain.trajectory.releases]
    assert same(weights(robust.model), weights(plain.model))


@pytest.mark.parametrize("gradients", ["dense", "ghost"])
def test_first_order_weights_stand_before_the_clip(tmp_path, gradients):
    """Each example's gradient times its weight, clipped; the groups' losses are those of that pass."""
    trainer = made(
        tmp_path, data=with_groups(tiny_data(20), every=4), method="dp-sgd", noise_multiplier=0.0,
        group_robust={"shares": {"few": 0.25, "many": 0.75}}, sampling="full_batch", clip=0.7,
        expected_batch_size=20, max_steps=1, learning_rate=1.0, lr_scheduler_type="constant",
        performance={"per_example_gradients": gradients}, trainer_settings={"eval_dataset": None},
    )  # fmt: skip
    model, rows = trainer.model, trainer.run.rows
    losses, before, few = losses_of(trainer), weights(model), np.arange(20) % 4 == 0
    parameters = list(model.parameters())
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for i in range(20):
        with evaluation_mode(model):
            loss = select_objective(model)(model, rows.collate_rows([i])).sum()
        own = torch.autograd.grad(loss * 0.5 / (0.25 if few[i] else 0.75), parameters)
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in own)))
        for sum_, g in zip(total, own, strict=True):
            sum_ += min(1.0, 0.7 / (1 + 2.0**-8) / norms[-1]) * g
    assert min(norms) < 0.7 < max(norms), "some are clipped, and some are not"
    trainer.train()
    for (name, value), sum_ in zip(weights(model).items(), total, strict=True):
        assert torch.allclose(before[name] - value, sum_ / 20, atol=2e-5), name
    centred = (losses.clamp(0, 2) - 1).numpy() / (1 + 2.0**-8)
    released = trainer.trajectory.releases[0].values
    assert released == pytest.approx([centred[few].sum(), centred[~few].sum()], abs=1e-5)


@pytest.mark.parametrize("method", ["dpzero", "dp-adamw"])
def test_adaptive_clipping_keeps_its_fraction_apart_from_the_groups(tmp_path, method):
    trainer = made(tmp_path, method=method, clipping="adaptive", max_steps=8)
    trainer.train()
    own = 2 if method == "dpzero" else 1
    fractions = [release.values[own - 1] for release in trainer.trajectory.releases]
    assert all(len(release.values) == own + 2 for release in trainer.trajectory.releases)
    after = trainer.step._schedule.after(trainer.trajectory.releases)
    moved = -0.2 * (math.fsum(fractions) - 8 * 0.5)
    assert after.clip == pytest.approx(5.0 * math.exp(moved))


# ---------------------------------------------------------------- resume, processes


def test_a_resumed_run_of_noisy_losses_is_a_straight_one(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    straight = made(tmp_path / "straight", **settings)
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        killed = stopping(5, KeyboardInterrupt)
        made(tmp_path / "broken", trainer_settings=killed, **settings).train()
    again = made(tmp_path / "broken", **settings)
    again.train(resume_from_checkpoint=True)
    assert again.trajectory.releases == straight.trajectory.releases
    assert same(weights(again.model), weights(straight.model))


@pytest.mark.parametrize("way", ["prefix_sum", "vertex"])
@pytest.mark.parametrize("sampling", ["fixed_batches", "full_batch"])
def test_runs_whose_state_is_secret_cannot_be_resumed(tmp_path, way, sampling):
    settings = {"save_strategy": "steps", "save_steps": 2, "group_robust.weights": way}
    settings |= {
        "sampling": sampling,
        "expected_batch_size": 120 if sampling == "full_batch" else 12,
    }
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, trainer_settings=stopping(4, KeyboardInterrupt), **settings).train()
    with pytest.raises(LedgerError, match="cannot go on.*must not be written down"):
        made(tmp_path, **settings).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("way", ["prefix_sum", "vertex"])
def test_hidden_state_is_in_no_file(tmp_path, way):
    """What a run leaves has the released numbers, and no other that its un-noised sums would match."""
    trainer = made(
        tmp_path, group_robust={"weights": way}, save_strategy="steps", save_steps=3, **WAYS[way]
    )
    trainer.train()
    trainer.save_model()
    files = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
    state = json.dumps(files, default=str)
    for name in ("_sums", "scores", "log_weights", "row_groups"):
        assert name not in state
    if way == "prefix_sum":
        numbers = [n for row in trainer.step.weighting._player._sums for n in row if n]
        assert numbers and not any(str(n) in state for n in numbers)
    assert "few" in state, "names and shares are public"


# ---------------------------------------------------------------- refusals


VERTEX = {**FIXED, "group_robust.weights": "vertex"}
ALONE = {"group_robust.column": None, "group_robust.shares": None}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group_robust.shares": None}, "outside of the private rows"),
        ({"group_robust.shares": {"few": 0.5, "many": 0.4}}, "add up to 0.9"),
        ({"group_robust.shares": {"few": 0.0, "many": 1.0}}, "shares divide"),
        ({"group_robust.shares": {"few": "a fifth", "many": 0.8}}, "a number"),
        ({"group_robust.shares": "{few"}, "give every"),
        ({"group_robust.weights": "other"}, "group_robust.weights='other'"),
        ({"group_robust.budget": 1.0}, "group_robust.budget"),
        ({"group_robust.rate": 0.0}, "group_robust.rate"),
        ({**VERTEX, "group_robust.rate": 0.1}, "follows from the budget"),
        ({**VERTEX, "group_robust.draws": 0}, "group_robust.draws"),
        ({"group_robust.column": 3}, "group_robust.column"),
        # settings of groups without a column
        ({**ALONE, "group_robust.shares": SHARES}, "without group_robust.column"),
        ({**ALONE, "group_robust.budget": 0.2}, "without group_robust.column"),
        ({**ALONE, "group_robust.weights": "vertex"}, "without group_robust.column"),
        # combinations without an account
        ({"method": "mezo", "noise_multiplier": None}, "'dpzero' .with noise_multiplier=0"),
        ({"method": "dpgd-0th"}, "use 'dpzero'"),
        ({"method": "sgd", "noise_multiplier": None}, "'dp-sgd'"),
        ({"clipping": "averaged"}, "clipping='fixed'"),
        ({"noise_distribution": "laplace"}, "noise_distribution='gaussian'"),
        ({"group_robust.weights": "prefix_sum"}, "sampling='fixed_batches'"),
        ({"group_robust.weights": "vertex"}, "sampling='fixed_batches'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **{**GROUPS, **settings}).plan(120)


def test_settings_may_be_a_text_of_json_whose_truth_values_are_those_of_a_column(tmp_path):
    data = tiny_data().add_column("where", [i % 5 == 0 for i in range(120)])
    groups = json.dumps({"column": "where", "shares": {"true": 0.2, "false": 0.8}})
    trainer = build(tmp_path, data=data, group_robust=groups, max_steps=2)
    trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert {"group_weight_true", "group_weight_false"} <= logged


def test_a_missing_column_is_said_before_training(tmp_path):
    with pytest.raises(
        ValueError, match="group_robust.column='where' is no column of train_dataset"
    ):
        made(tmp_path, data=tiny_data()).train()
    assert not (tmp_path / LEDGER_NAME).exists()


def test_groups_that_are_too_small_for_the_noise_are_told_of(tmp_path, caplog):
    """After T steps the mean loss of a group has noise of deviation z b / (2 B pi sqrt T)."""
    z = 1.0 * math.sqrt(0.9 / 0.1)  # the weights' part has 1, of 0.9 of the budget
    share = z / (12 * math.sqrt(6))  # where that is b / 2
    for factor, warned in ((0.98, True), (1.02, False)):
        shares = {"few": share * factor, "many": 1 - share * factor}
        plan = config(tmp_path, **{**GROUPS, "group_robust.shares": shares}).plan(120)
        assert ("1 of 2 groups" in group_warning(plan)) == warned
    tiny = {**GROUPS, "group_robust.shares": {"few": 0.01, "many": 0.99}}
    for other in ({"group_robust.weights": "balanced"}, {"noise_multiplier": 0.0}):
        assert group_warning(config(tmp_path, **tiny, **other).plan(120)) == ""
    assert group_warning(config(tmp_path).plan(120)) == ""
    with caplog.at_level(logging.WARNING, logger="transformers"):
        made(
            tmp_path / "run", group_robust={"shares": tiny["group_robust.shares"]}, max_steps=1
        ).train()
    assert "their weights follow the noise" in caplog.text


def test_of_many_groups_the_largest_weight_is_logged(tmp_path):
    shares = {f"g{i}": 1 / 40 for i in range(40)}
    data = tiny_data().add_column("where", [f"g{i % 40}" for i in range(120)])
    trainer = made(tmp_path, data=data, group_robust={"shares": shares}, max_steps=2)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert all(1 / 40 < entry["largest_group_weight"] <= 1 for entry in logged) and logged
    assert not any("group_weight_g" in key for entry in logged for key in entry)


def test_rows_of_other_groups_are_refused_without_their_names(tmp_path):
    data = tiny_data().add_column("where", ["few", *["a private place"] * 119])
    with pytest.raises(ValueError, match=r"row 2 \(counted from 1\)") as error:
        made(tmp_path, data=data).train()
    assert "private place" not in str(error.value)
    assert not (tmp_path / LEDGER_NAME).exists()


def test_a_group_that_no_row_has_is_allowed(tmp_path):
    """Whether a declared group has rows is private: it may not be said."""
    shares = {"few": 0.1, "many": 0.8, "none": 0.1}
    trainer = made(tmp_path, group_robust={"shares": shares})
    trainer.train()
    assert all(len(r.values) == 4 for r in trainer.trajectory.releases)


# ---------------------------------------------------------------- reports, logs, metrics


def test_logs_show_released_weights_and_the_report_binds_them(tmp_path):
    trainer = made(tmp_path, num_directions=2, **SECRET)
    trainer.train()
    trainer.save_model()
    logged = [entry for entry in trainer.state.log_history if "group_weight_few" in entry]
    assert len(logged) == 3
    assert all(e["group_weight_few"] + e["group_weight_many"] == pytest.approx(1) for e in logged)
    report = PrivacyReport.load(tmp_path)
    assert report.private and "noise multiplier 3" in report.groups
    assert "few 0.2, many 0.8" in report.statement
    assert bound_to(report, tmp_path) == report
    write_model_card(tmp_path)
    assert "per_step" in (tmp_path / "README.md").read_text()
    older = {k: v for k, v in report.to_dict().items() if k != "groups"}
    assert PrivacyReport.from_dict(older).groups == ""
