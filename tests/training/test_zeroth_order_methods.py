"""Directions, clips and update rules through the trainer: resume, replay, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_runs import SECRET, build, config, same, stopping, tiny_model, weights

from hf_dpzero.ledger.replay import UPDATE_RULES, directions_of, replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.privacy.schedules import MechanismSchedule

ADAPTIVE = {"clipping": "adaptive", "clipping_config.count_noise": 3.0}
VARIANTS = {
    "adaptive": ADAPTIVE,
    "adaptive-K": {**ADAPTIVE, "num_directions": 3},
    "momentum": {"update_rule": "momentum", "update_window": 3},
    "momentum-K": {"update_rule": "momentum", "num_directions": 2},
    "momentum-adaptive": {"update_rule": "momentum", **ADAPTIVE},
    "stacked": {"performance.perturbation_strategy": "stacked", "num_directions": 4},
}


assert {v.get("update_rule", "sgd") for v in VARIANTS.values()} == {*UPDATE_RULES}


@pytest.mark.parametrize("name", VARIANTS)
def test_replay_and_resume_give_the_weights_of_a_straight_run(tmp_path, name):
    settings = {**VARIANTS[name], "save_strategy": "steps", "save_steps": 3}
    straight = build(tmp_path / "a", **settings)
    straight.train()
    straight.save_model()
    rebuilt = tiny_model()
    replay(rebuilt, Trajectory.load(tmp_path / "a" / "trajectory.safetensors"))
    assert same(weights(rebuilt), weights(straight.model))
    assert not same(weights(rebuilt), weights(tiny_model()))

    build(tmp_path / "b", trainer_settings=stopping(3), **settings).train()
    resumed = build(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed.model), weights(straight.model))


def test_dpgd_0th_with_k_directions_clips_the_vector(tmp_path):
    """With a clip that binds and next to no noise, a step of B = n is at most C long."""
    trainer = build(
        tmp_path, method="dpgd-0th", num_directions=3, clip=1e-3, noise_multiplier=2.0**-10,
        sampling="full_batch", expected_batch_size=120, max_steps=1, learning_rate=1.0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    moved = [v - before[k] for k, v in weights(trainer.model).items()]
    size = float(torch.cat([m.view(-1) for m in moved]).norm())
    d = trainer.space.dimension
    noise = 2.0**-10 * 1e-3 / 120 * math.sqrt(d)
    assert 0 < size <= 1e-3 * (1 + 1e-4) + 2 * noise + 1e-5 * math.sqrt(d) * 0.1


def test_an_adaptive_clip_follows_the_quantile(tmp_path):
    """The clip starts far too small and ends near the median of |x|."""
    trainer = build(
        tmp_path, clipping="adaptive", clip=0.03,
        clipping_config={"learning_rate": 1.0, "count_noise": 1.0},
        noise_multiplier=0.25, max_steps=16, learning_rate=0.0, expected_batch_size=60,
        microbatch_size=120,
    )  # fmt: skip
    trainer.train()
    values = [r.values for r in trainer.trajectory.releases]
    assert all(len(v) == 2 for v in values)
    found = MechanismSchedule(trainer.plan.mechanism).after(trainer.trajectory.releases).clip
    differences = trainer.step.differences(
        [trainer.run.rows.collate_rows(list(range(120)))],
        [d for s in range(1000, 1008) for d in directions_of(s, trainer.trajectory.header)],
    )
    trainer.space.settle_()
    median = float(differences.abs().median())
    assert median / 3 < found < median * 3 and median > 0.3


def test_the_epsilon_of_adaptive_clipping_covers_both_releases(tmp_path):
    fixed = config(tmp_path, noise_multiplier=1.0).plan(120)
    adaptive = config(tmp_path, noise_multiplier=1.0, **ADAPTIVE).plan(120)
    assert adaptive.epsilon(1e-3) >= fixed.epsilon(1e-3)
    assert adaptive.mechanism.noise_scale > fixed.mechanism.noise_scale


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"update_rule": "momentum", "momentum": 1.5}, "momentum"),
        ({"update_rule": "kalman"}, "update_rule='kalman' is not one of sgd, momentum"),
        ({"method": "dpgd-0th", "update_rule": "momentum"}, "released scalars"),
        ({"clipping": "adaptive", "clipping_config.count_noise": 0.1}, "clip_count_noise"),
        ({"clipping": "adaptive", "noise_distribution": "laplace"}, "gaussian"),
    ],
)
def test_refusals(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **settings).train()


def test_the_seed_of_a_run_that_is_not_private_fixes_it_and_no_private_one(tmp_path):
    def keys(name: str, **settings: object) -> tuple[str, list[tuple[float, ...]]]:
        trainer = build(tmp_path / name, max_steps=2, **{**SECRET, **settings})
        trainer.train()
        releases = [release.values for release in trainer.trajectory.releases]
        return trainer.trajectory.header["direction_key"], releases

    mezo = {"method": "mezo", "noise_multiplier": None, "testing.direction_key": None}
    first = keys("a", seed=5, **mezo)
    assert first == keys("b", seed=5, **mezo)
    assert first[0] != keys("c", seed=6, **mezo)[0]
    private = [keys(name, seed=5, **{"testing.direction_key": None}) for name in "de"]
    assert private[0][0] != private[1][0] and private[0][1] != private[1][1]
