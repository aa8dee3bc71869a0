"""Group-robust training in the trainer: weights, releases, replay, resume, reports and metrics."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_runs import KEY, build, config, same, tiny_data, tiny_model, weights

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import evaluation_mode
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.privacy.words import group_warning
from hf_dpzero.reporting.hub import write_model_card
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.verification import bound_to
from hf_dpzero.training.progress import banner

SHARES = {"few": 0.2, "many": 0.8}
GROUPS = {"group_robust.column": "where", "group_robust.shares": SHARES}
FIXED = {"sampling": "fixed_batches"}
WAYS = {
    "balanced": {},
    "per_step": {},
    "prefix_sum": FIXED,
    "vertex": {**FIXED, "group_robust.draws": 3},
}


def with_groups(data: Dataset | None = None, every: int = 5) -> Dataset:
    data = tiny_data() if data is None else data
    names = ["few" if i % every == 0 else "many" for i in range(len(data))]
    return data.add_column("where", names)


def made(tmp_path, **settings):
    defaults = {"data": with_groups(), **GROUPS}
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
    data = with_groups(tiny_data(30), every=3)
    lengths = [3 + i % 6 for i in range(30)]
    mask = [[1] * n + [0] * (8 - n) for n in lengths]
    data = data.remove_columns("attention_mask").add_column("attention_mask", mask)
    settings = {"noise_multiplier": 0.0, "sampling": "full_batch", "max_steps": 3, "clip": 1e6}
    shares = {"few": 1 / 3, "many": 2 / 3}
    run = made(
        tmp_path / "run",
        data=data,
        group_robust={"shares": shares, "rate": 4.0, "loss_bound": 1.5},
        expected_batch_size=30,
        learning_rate=1.0,
        trainer_settings={"eval_dataset": None},
        **settings,
    )
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
    assert run.step.weighting.groups.softmax(np.array(first.values[1:]), 30, 3) == pytest.approx(y)
    assert run.step.weighting.groups.example_weights(y) == pytest.approx([y[0] * 3, y[1] * 1.5])
    plain = build(
        tmp_path / "plain",
        data=data,
        expected_batch_size=30,
        learning_rate=1.0,
        trainer_settings={"eval_dataset": None},
        **settings,
    )
    plain.train()
    # y = (1/2, 1/2) in the first step: the value is the mean of the two groups' mean differences
    assert len(plain.trajectory.releases[0].values) == 1
    assert second.values[0] != plain.trajectory.releases[1].values[0]


@pytest.mark.parametrize("way", WAYS)
def test_one_group_is_the_plain_method(tmp_path, way):
    """All rows of one group of share 1 weigh 1: the same numbers along the same directions."""
    data = tiny_data().add_column("where", ["all"] * 120)
    one = {
        "data": data,
        "group_robust.shares": {"all": 1.0},
        "group_robust.weights": way,
        **WAYS[way],
    }
    robust = made(tmp_path / "robust", **one)
    plain = build(tmp_path / "plain", **(FIXED if "sampling" in WAYS[way] else {}))
    robust.train(), plain.train()
    values = [release.values[:1] for release in robust.trajectory.releases]
    assert values == [release.values for release in plain.trajectory.releases]
    assert same(weights(robust.model), weights(plain.model))


@pytest.mark.parametrize("gradients", ["dense", "ghost"])
def test_first_order_weights_stand_before_the_clip(tmp_path, gradients):
    """Each example's gradient times its weight, clipped; the groups' losses are those of that pass."""
    data = with_groups(tiny_data(20), every=4)
    shares = {"few": 0.25, "many": 0.75}
    trainer = made(
        tmp_path,
        data=data,
        group_robust={"shares": shares},
        method="dp-sgd",
        noise_multiplier=0.0,
        sampling="full_batch",
        expected_batch_size=20,
        max_steps=1,
        clip=0.7,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        performance={"per_example_gradients": gradients},
        trainer_settings={"eval_dataset": None},
    )
    losses = losses_of(trainer)
    before = weights(trainer.model)
    rows, total = trainer.run.rows, {}
    scaled = []
    with evaluation_mode(trainer.model):
        for i in range(20):
            loss = select_objective(trainer.model)(trainer.model, rows.collate_rows([i])).sum()
            parameters = dict(trainer.model.named_parameters())
            own = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            weight = 0.5 / (0.25 if i % 4 == 0 else 0.75)
            own = [torch.zeros(()) if g is None else weight * g for g in own]
            norm = math.sqrt(sum(float(g.square().sum()) for g in own))
            scaled.append(norm)
            factor = min(1.0, 0.7 / (1 + 2.0**-8) / norm)
            for name, g in zip(parameters, own, strict=True):
                total[name] = total.get(name, 0) + factor * g
    assert min(scaled) < 0.7 < max(scaled), "some are clipped, and some are not"
    trainer.train()
    for name, value in weights(trainer.model).items():
        assert torch.allclose(before[name] - value, total[name] / 20, atol=2e-5), name
    centred = (losses.clamp(0, 2) - 1).numpy() / (1 + 2.0**-8)
    few = np.arange(20) % 4 == 0
    released = trainer.trajectory.releases[0].values
    assert released == pytest.approx([centred[few].sum(), centred[~few].sum()], abs=1e-5)


def test_losses_and_differences_that_are_no_numbers_count_nothing(tmp_path):
    def broken(model, inputs):
        losses = torch.nn.functional.cross_entropy(
            model(**{k: v for k, v in inputs.items() if k != "labels"}).logits,
            inputs["labels"],
            reduction="none",
        )
        first = inputs["input_ids"][:, 0]
        return torch.where(first > 40, losses * torch.nan, losses)

    trainer = made(
        tmp_path, trainer_settings={"compute_per_example_loss": broken, "eval_dataset": None}
    )
    trainer.train()
    assert all(math.isfinite(v) for r in trainer.trajectory.releases for v in r.values)


def test_empty_batches_release_noise_alone(tmp_path):
    trainer = made(tmp_path, data=with_groups(tiny_data(40)), expected_batch_size=0.05)
    trainer.train()
    values = [v for r in trainer.trajectory.releases for v in r.values]
    assert len(values) == 18 and all(values)


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

    class Crash(Exception):
        pass

    broken = made(tmp_path / "broken", **settings)
    take = broken.training_step

    def training_step(*args, **kwargs):
        if broken.trajectory.next_step == 4:
            raise Crash
        return take(*args, **kwargs)

    broken.training_step = training_step
    with pytest.raises(Crash):
        broken.train()
    again = made(tmp_path / "broken", **settings)
    again.train(resume_from_checkpoint=True)
    assert again.trajectory.releases == straight.trajectory.releases
    assert same(weights(again.model), weights(straight.model))


@pytest.mark.parametrize("way", ["prefix_sum", "vertex"])
@pytest.mark.parametrize("sampling", ["fixed_batches", "full_batch"])
def test_runs_whose_state_is_secret_cannot_be_resumed(tmp_path, way, sampling):
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "group_robust.weights": way,
        "sampling": sampling,
        "expected_batch_size": 120 if sampling == "full_batch" else 12,
    }
    first = made(tmp_path, **settings)
    take = first.training_step
    first.training_step = lambda *a, **k: (
        (_ for _ in ()).throw(KeyboardInterrupt)
        if first.trajectory.next_step == 4
        else take(*a, **k)
    )
    with pytest.raises(KeyboardInterrupt):
        first.train()
    with pytest.raises(LedgerError, match="cannot go on.*must not be written down"):
        made(tmp_path, **settings).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("way", ["prefix_sum", "vertex"])
def test_hidden_state_is_in_no_file(tmp_path, way):
    """What a run leaves has the released numbers, and no other that its un-noised sums would match."""
    trainer = made(
        tmp_path, group_robust={"weights": way}, save_strategy="steps", save_steps=3, **WAYS[way]
    )
    seen = []
    player = None

    def remember(*args, **kwargs):
        nonlocal player
        player = trainer.step.weighting._player
        seen.append(trainer.step.weighting.groups)
        return original(*args, **kwargs)

    original = trainer.training_step
    trainer.training_step = remember
    trainer.train()
    trainer.save_model()
    assert len(seen) == 6
    state = json.dumps(
        [json.loads(p.read_text()) for p in Path(tmp_path).rglob("*.json")], default=str
    )
    for name in ("_sums", "scores", "log_weights", "row_groups"):
        assert name not in state
    if way == "prefix_sum":
        numbers = [n for row in player._sums for n in row if n]
        assert numbers and not any(str(n) in state for n in numbers)
    assert "few" in state, "names and shares are public"


# ---------------------------------------------------------------- refusals


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
        (
            {"group_robust.weights": "vertex", "group_robust.rate": 0.1, **FIXED},
            "follows from the budget",
        ),
        (
            {"group_robust.draws": 0, "group_robust.weights": "vertex", **FIXED},
            "group_robust.draws",
        ),
        ({"group_robust.column": 3}, "group_robust.column"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **{**GROUPS, **settings}).plan(120)


@pytest.mark.parametrize(
    "alone",
    [
        {"group_robust.shares": SHARES},
        {"group_robust.budget": 0.2},
        {"group_robust.weights": "vertex"},
    ],
)
def test_settings_of_groups_without_a_column_are_refused(tmp_path, alone):
    with pytest.raises(ValueError, match="without group_robust.column"):
        config(tmp_path, **alone)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "mezo", "noise_multiplier": None}, "'dpzero' .with noise_multiplier=0"),
        ({"method": "dpgd-0th"}, "use 'dpzero'"),
        ({"method": "sgd", "noise_multiplier": None}, "'dp-sgd'"),
        ({"clipping": "averaged"}, "clipping='fixed'"),
        ({"noise_distribution": "laplace"}, "noise_distribution='gaussian'"),
        ({"group_robust.weights": "prefix_sum"}, "sampling='fixed_batches'"),
        ({"group_robust.weights": "vertex"}, "sampling='fixed_batches'"),
    ],
)
def test_combinations_without_an_account_are_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **GROUPS, **settings).plan(120)


def test_settings_may_be_a_text_of_json(tmp_path):
    text = json.dumps({"column": "where", "shares": SHARES})
    plan = config(tmp_path, group_robust=text).plan(120)
    assert plan.groups.names == ("few", "many") and plan.groups.shares == (0.2, 0.8)


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
    trainer = made(
        tmp_path,
        testing={"insecure_noise_seed": None, "sampler_key": None},
        num_directions=2,
    )
    trainer.train()
    trainer.save_model()
    logged = [entry for entry in trainer.state.log_history if "group_weight_few" in entry]
    assert len(logged) == 3
    assert all(e["group_weight_few"] + e["group_weight_many"] == pytest.approx(1) for e in logged)
    report = PrivacyReport.load(tmp_path)
    assert report.private and "noise multiplier 3" in report.groups
    assert "few 0.2, many 0.8" in report.statement
    assert bound_to(report, tmp_path) == report
    card = write_model_card(tmp_path).read_text() if write_model_card(tmp_path) else ""
    card = card or (tmp_path / "README.md").read_text()
    assert "per_step" in card
    older = {k: v for k, v in report.to_dict().items() if k != "groups"}
    assert PrivacyReport.from_dict(older).groups == ""


def test_fixed_batches_without_groups_train_and_refuse_to_resume(tmp_path):
    trainer = build(tmp_path, **FIXED, noise_multiplier=None, target_epsilon=2.0)
    trainer.train()
    assert trainer.plan.epsilon(1e-3) <= 2.0
    rows = [i for step in range(10) for i in trainer.plan.sampler.batch(step, bytes.fromhex(KEY))]
    assert sorted(rows) == list(range(120))


def test_noise_of_the_groups_is_secret_and_independent_of_the_direction_key(tmp_path):
    values = []
    for name in ("a", "b"):
        trainer = made(tmp_path / name, testing={"insecure_noise_seed": None})
        assert isinstance(trainer.noise, SecureNoise)
        trainer.train()
        values.append([release.values[1:] for release in trainer.trajectory.releases])
    assert values[0] != values[1]
