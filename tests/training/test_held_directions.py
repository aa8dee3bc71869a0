"""Directions held for some steps: training, replay, resume, and noise correlated within them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import build, config, same, tiny_model, weights
from transformers import TrainerCallback

from hf_dpzero.ledger.replay import directions_of, replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.privacy.correlated.factorization import toeplitz
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.noise import InsecureSeededNoise

HELD = {
    "correlated_noise.hold_direction_for": 4,
    "clipping": "fixed",
    "num_directions": 2,
    "max_steps": 10,
}
CORRELATED = {**HELD, "sampling": "fixed_batches", "correlated_noise.kind": "toeplitz"}
SECRET = {"testing.sampler_key": None, "testing.insecure_noise_seed": None}


class _KilledAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step >= self.step:
            raise KeyboardInterrupt


def test_steps_share_the_directions_of_their_block():
    header = {
        "direction_key": f"{7:032x}",
        "num_directions": 2,
        "hold_direction_for": 4,
    }
    held = [directions_of(step, header) for step in range(9)]
    assert held[0] == held[3] == [Direction(7, 0, 0), Direction(7, 0, 1)]
    assert held[4] == held[7] == [Direction(7, 1, 0), Direction(7, 1, 1)]
    assert held[8] == [Direction(7, 2, 0), Direction(7, 2, 1)]
    del header["hold_direction_for"]
    assert directions_of(3, header)[0] == Direction(7, 3, 0)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(HELD, marks=pytest.mark.slow),
        {**HELD, "update_rule": "momentum", "update_window": 6},
        {**CORRELATED, "direction": "gaussian"},
        pytest.param(
            {**CORRELATED, "performance.defer_updates": False, "weight_decay": 0.1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_is_replayed_bit_for_bit(tmp_path, settings):
    trainer = build(tmp_path, **settings)
    trainer.train()
    rebuilt = tiny_model()
    replay(rebuilt, Trajectory.load(tmp_path / "trajectory.ledger"))
    assert same(weights(rebuilt), weights(trainer.model))


def test_the_weights_move_in_the_span_of_the_blocks_directions(tmp_path):
    """Ten steps with K = 2 held for 4: theta - theta_0 lies in the span of six directions."""
    trainer = build(tmp_path, **HELD, learning_rate=1e-3)
    trainer.train()
    before, space = tiny_model(), trainer.space
    start = torch.cat([p.detach().flatten() for p in before.parameters()]).double()
    end = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).double()
    basis = []
    for block in range(3):
        for query in range(2):
            stream = space.stream(Direction(7, block, query))
            basis.append(torch.cat([stream.raw(*place).double() for place in stream.layout]))
    moved = (end - start).numpy()
    span = torch.stack(basis, dim=1).numpy()
    rest = moved - span @ np.linalg.lstsq(span, moved, rcond=None)[0]
    assert np.linalg.norm(rest) < 0.02 * np.linalg.norm(moved)  # the start's snap to the grid


@pytest.mark.slow
@pytest.mark.parametrize("settings", [HELD, CORRELATED])
def test_killing_and_resuming_ends_in_what_its_ledger_says(tmp_path, settings):
    settings = {**settings, **SECRET, "save_strategy": "steps", "save_steps": 3}
    trainer = build(tmp_path, trainer_settings={"callbacks": [_KilledAt(7)]}, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    resumed = build(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.trajectory.next_step == 10
    rebuilt = tiny_model()
    replay(rebuilt, resumed.trajectory)
    assert same(weights(rebuilt), weights(resumed.model))


def test_what_is_released_has_the_blocks_noise(tmp_path):
    """At rate 0 with and without noise: numbers differ by S sigma C / B times C^{-1} Z, anew at 4, 8."""
    noisy = build(tmp_path / "a", **CORRELATED, learning_rate=0.0)
    noisy.train()
    quiet = build(
        tmp_path / "b", **{**CORRELATED, "correlated_noise.kind": "none"}, learning_rate=0.0,
        **{"noise_multiplier": 1e-3},
    )  # fmt: skip
    quiet.train()
    sensitivity = noisy.plan.correlation.sensitivity(10, 10)
    assert sensitivity == pytest.approx(toeplitz(4).sensitivity)
    base, scale = InsecureSeededNoise(3), 5.0 * sensitivity / 12
    for step, (one, other) in enumerate(zip(noisy.trajectory.releases, quiet.trajectory.releases)):
        row = toeplitz(4).noise_row(step % 4)
        expected = sum(
            weight * base.normals(2, int(j) + step - step % 4, 0)
            for j, weight in zip(row.draws, row.weights)
        )
        found = (np.array(one.values) - np.array(other.values)) / scale
        assert np.abs(found - expected).max() < 2.0**-8 + 0.01


def test_rounded_scalars_follow_the_clipped_total():
    mechanism = ScalarMechanism(
        clip=3.0, noise_multiplier=1.0, expected_batch_size=4, num_directions=2
    )

    class Known(InsecureSeededNoise):
        correlated = True
        base_deviation = 2.0

        def normals(self, size, step, part):
            return np.full(size, 0.25)

    values = mechanism.release([2**30, -(2**29)], 0, Known())
    assert values == pytest.approx([(3.0 + 1.5) / 4, (-1.5 + 1.5) / 4], abs=3.0 * 2 * 2.0**-9)


def test_the_report_says_where_noise_begins_anew(tmp_path):
    trainer = build(tmp_path, **{**CORRELATED, **SECRET})
    trainer.train()
    report = trainer.privacy_report()
    assert report.private and "anew every 4 steps" in report.statement
    assert report.noise_source == "os_entropy_key_on_grid"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"correlated_noise.hold_direction_for": 1}, "fresh direction"),
        ({"sampling": "poisson"}, "Use sampling='fixed_batches'"),
        ({"noise_distribution": "laplace"}, "gaussian"),
    ],
)
def test_what_is_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **{**CORRELATED, **changed}).plan(120)


def test_chosen_clipping_is_refused_with_correlated_noise(tmp_path):
    settings = {**CORRELATED, "clip": None, "clipping": None}
    with pytest.raises(ValueError, match="clipping='fixed'"):
        config(tmp_path, **settings).plan(120)
