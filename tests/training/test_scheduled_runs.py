"""Schedules of noise, clip and smoothing in whole runs: released, reported, resumed, replayed."""

from __future__ import annotations

import json
import math

import pytest
from tiny_runs import SECRET, build, config, same, tiny_model, weights

from hf_dpzero.cli import main
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.ledger.replay import replay
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.privacy.schedules import (
    Exponential,
    Given,
    LearningRateAware,
    MechanismSchedule,
    Momentum,
    Subsampled,
)
from hf_dpzero.settings.schedules import factors_of

PRIVATE = {"noise_multiplier": None, "target_epsilon": 6.0, **SECRET}


class Recorded(InsecureSeededNoise):
    """Remembers the scale of every draw."""

    def __init__(self) -> None:
        super().__init__(3)
        self.scales: list[float] = []

    def gaussian(self, scale, count, step):
        self.scales.append(scale * 2.0**-30)
        return super().gaussian(scale, count, step)


@pytest.mark.parametrize("method", ["dpzero", "dpgd-0th", "dp-sgd", "dp-adamw"])
def test_every_private_method_takes_its_noise_from_the_plan_of_the_step(method, tmp_path):
    trainer = build(tmp_path, method=method, schedules={"noise": "exp(gamma=0.5)"}, **PRIVATE)
    seen = []
    original = type(trainer.plan.mechanism)

    def note(step):
        mechanism = type(trainer.plan).mechanism_at(trainer.plan, step)
        seen.append((step, mechanism.noise_scale))
        assert isinstance(mechanism, original)
        return mechanism

    object.__setattr__(trainer.plan, "mechanism_at", note)
    trainer.train()
    taken = dict(seen)
    assert sorted(taken) == list(range(6))
    ratios = [taken[t + 1] / taken[t] for t in range(5)]
    assert ratios == pytest.approx([0.5**0.25] * 5)
    report = trainer.privacy_report()
    assert report.private and 5.9 < report.epsilon <= 6.0
    assert "exp(gamma=0.5): multiplier" in report.schedules["noise"]
    assert "noise schedule exp(gamma=0.5)" in report.statement


def test_the_draws_have_the_scales_of_the_schedule(tmp_path):
    noise = Recorded()
    settings = {"schedules.noise": "3,2,2,1,1,1", "schedules.clip": "linear(0.5)"}
    trainer = build(tmp_path, clipping="fixed", trainer_settings={"noise": noise}, **settings)
    trainer.train()
    levels = [3, 2, 2, 1, 1, 1]
    unit = math.sqrt(sum(level**-2 for level in levels) / 6)
    assert noise.scales == pytest.approx([unit * level for level in levels], rel=1e-6)
    assert [trainer.plan.mechanism_at(t).clip for t in (0, 5)] == [5.0, 2.5]


def test_adaptive_clips_and_schedules_go_through_one_door(tmp_path):
    settings = {"clipping": "adaptive", "clip": 5.0, "schedules.noise": "exp(gamma=0.5)"}
    trainer = build(tmp_path, **settings, **PRIVATE)
    trainer.train()
    assert trainer.privacy_report().private
    schedule = MechanismSchedule(trainer.plan.mechanism, trainer.plan.scheduled)
    last = schedule.after(trainer.trajectory.releases[:5])
    assert last.clip != 5.0
    assert last.noise_multiplier == pytest.approx(trainer.plan.multipliers[5])


def test_smoothing_is_scheduled_and_costs_nothing(tmp_path):
    sizes = []
    trainer = build(tmp_path, smoothing=1e-2, schedules={"smoothing": "exp(0.1)"}, **PRIVATE)
    original = FiniteDifferences.with_losses

    def spy(self, *given):
        sizes.append(self.smoothing)
        return original(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FiniteDifferences, "with_losses", spy)
        trainer.train()
    assert sizes[-6:] == pytest.approx([10 ** (-2 - 0.2 * t) for t in range(6)])
    plain = build(tmp_path / "plain", smoothing=1e-2, **PRIVATE)
    assert trainer.plan == plain.plan
    base = tiny_model()
    replay(base, trainer.trajectory)
    assert same(weights(base), weights(trainer.model))


def test_killed_resumed_and_replayed_bit_for_bit(tmp_path):
    settings = {
        "schedules.noise": "momentum(kappa=5, beta=0.5)",
        "schedules.clip": "exp(0.5)",
        "clipping": "fixed",
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = build(tmp_path / "whole", **settings)
    whole.train()
    whole.save_model()
    again = build(tmp_path / "whole", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3"))
    assert same(weights(again.model), weights(whole.model))
    base = tiny_model()
    replay(base, whole.trajectory)
    assert same(weights(base), weights(whole.model))
    report = json.loads((tmp_path / "whole/privacy_report.json").read_text())
    assert set(report["schedules"]) == {"noise", "clip"}


def test_a_schedule_that_loses_is_warned_of(tmp_path, caplog):
    settings = {**PRIVATE, "target_epsilon": 1.0, "expected_batch_size": 2, "max_steps": 40}
    trainer = build(tmp_path, schedules={"noise": "exp(gamma=0.8)"}, **settings)
    with caplog.at_level("WARNING", logger="hf_dpzero"):
        trainer.train()
    assert "which is more, at sampling probability 0.0167" in caplog.text
    assert "subsampled(gamma=..)" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exp(gamma=0.9)", Exponential(gamma=0.9)),
        ("exp(0.9)", Exponential(gamma=0.9)),
        ("gd(kappa=20)", Exponential(gamma=0.95)),
        ("momentum(kappa=20, beta=0.5)", Momentum(gamma=0.95, beta=0.5)),
        (
            "learning_rate(gamma=0.9)",
            LearningRateAware(gamma=0.9, learning_rate="linear", warmup_steps=2),
        ),
        ("subsampled(kappa=10)", Subsampled(gamma=0.9, learning_rate="linear", warmup_steps=2)),
        ("6,5,4,3,2,1", Given(levels=(6.0, 5.0, 4.0, 3.0, 2.0, 1.0))),
        ("[6, 5, 4, 3, 2, 1]", Given(levels=(6.0, 5.0, 4.0, 3.0, 2.0, 1.0))),
        ("uniform", None),
        (None, None),
    ],
)
def test_settings_name_schedules(text, expected, tmp_path):
    plan = config(tmp_path, schedules={"noise": text}, warmup_steps=2).plan(120)
    assert plan.noise_schedule == expected


@pytest.mark.parametrize("name", ["levels.json", "levels.csv", "levels.txt", "levels.yaml"])
def test_files_hold_schedules(name, tmp_path):
    text = {"json": "[6,5,4,3,2,1]", "csv": "6,5,4\n3,2,1\n", "txt": "6\n5\n4\n3\n2\n1\n"}
    kind = name.partition(".")[2]
    (tmp_path / name).write_text(text.get(kind, "- 6\n- 5\n- 4\n- 3\n- 2\n- 1\n"))
    plan = config(tmp_path, schedules={"noise": str(tmp_path / name)}).plan(120)
    assert plan.noise_schedule == Given(levels=(6.0, 5.0, 4.0, 3.0, 2.0, 1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"schedules.noise": "expo(0.9)"},
            r"'expo\(0.9\)' is unknown; use one of uniform, gd, exp",
        ),
        ({"schedules.noise": "exp"}, "needs gamma"),
        ({"schedules.noise": "exp(gamma=2)"}, r"gamma=2.0 must be in \(0, 1\]"),
        ({"schedules.noise": "exp(gamma=x)"}, "is no number"),
        ({"schedules.noise": "gd(kappa=1)"}, "kappa=1.0: a condition number above 1"),
        ({"schedules.noise": "exp(gamma=0.9, kappa=10)"}, "both kappa and gamma"),
        ({"schedules.noise": "1,2,3"}, "3 levels for 6 steps"),
        ({"schedules.noise": "1,2,3,4,5,-6"}, "entry 5 is -6.0"),
        ({"schedules.noise": "1,2,3,4,5,inf"}, "entry 5 is inf"),
        ({"schedules.noise": "1,2,three"}, "is no schedule"),
        ({"schedules.noise": "nowhere.json"}, "cannot be read"),
        (
            {"schedules.noise": "exp(0.9)", "method": "mezo", "noise_multiplier": None},
            "noise_schedule",
        ),
        (
            {"schedules.noise": "learning_rate(0.9)", "lr_scheduler_type": "polynomial"},
            "list or file",
        ),
        ({"schedules.clip": "linear(0)"}, "schedules.clip='linear\\(0\\)'"),
        ({"schedules.clip": "linear(0.5)", "clipping": "adaptive"}, "follows the releases already"),
        ({"schedules.smoothing": "exp(2)"}, "raises the smoothing"),
    ],
)
def test_bad_settings_are_one_clear_line(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **settings).train()


def test_the_plan_shows_schedule_gain_and_what_is_spent_when(capsys):
    words = (
        "plan --num_examples 1000 --sampling full_batch --max_steps 100 --target_epsilon 2 --json "
    )
    words += "--target_delta 1e-5 --schedules"
    assert main.main([*words.split(), '{"noise": "gd(kappa=20)"}']) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["gain_against_uniform"] == pytest.approx(1.496, rel=0.003)
    spent = [facts[f"epsilon_after_{steps}_steps"] for steps in (25, 50, 75)]
    assert 0 < spent[0] < spent[1] < spent[2] < facts["epsilon"] <= 2.0
    assert spent[1] < 0.5 * facts["epsilon"]
    assert facts["noise_schedule"].startswith("exp(gamma=0.95): multiplier")


def test_factors_have_names():
    assert factors_of("clip_schedule", "linear(0.5)").factors(3).tolist() == [1.0, 0.75, 0.5]
    assert factors_of("clip_schedule", "exp(end=0.25)").factors(3).tolist() == [1.0, 0.5, 0.25]
    assert factors_of("clip_schedule", "1,2").factors(2).tolist() == [1.0, 2.0]
    assert factors_of("clip_schedule", "constant") is None
