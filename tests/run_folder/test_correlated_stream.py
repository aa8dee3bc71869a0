"""What the trainer releases under correlated noise is C^{-1} Z, weight by weight, of the whole matrix.

Runs at rate 0 with noise 10^4 times the clip, so that clipped sums vanish beside it. The weights are
regressed from what was released on the base draws: the rounding to the grid leaves 0.002 deviations in a
number, so bands that are wrong by 2 % stand out.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import build, tiny_model
from transformers import TrainerCallback

from hf_dpzero.privacy.correlated.stream import KeyedNoise
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.run_folder import keys as noise_keys

STEPS, BANDS, EPOCH = 64, 5, 10
RUN = {
    "sampling": "fixed_batches",
    "correlated_noise.kind": "banded",
    "correlated_noise.bands": BANDS,
    "max_steps": STEPS,
    "learning_rate": 0.0,
    "noise_multiplier": 1e4,
    "on_no_signal": "ignore",
}
KEYS = [bytes([7] * 32), bytes([9] * 32), bytes([11] * 32)]


class _Watch(TrainerCallback):
    """Keeps what the optimizer gets, by step; stops the run where it is told to."""

    def __init__(self, stop: int = STEPS) -> None:
        self.stop, self.seen = stop, {}

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step >= self.stop:
            raise KeyboardInterrupt

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        grads = [p.grad for p in model.parameters()]
        if all(grad is not None for grad in grads):  # else the ledger holds the step
            flat = torch.cat([grad.detach().double().flatten() for grad in grads])
            self.seen[state.global_step] = flat.numpy()


def whole_matrices(size: int, bands: int) -> tuple[np.ndarray, np.ndarray]:
    """C^{-1} and C of the banded factorisation, from its definition alone."""
    weights = [1.0]
    for k in range(1, bands):
        weights.append(weights[-1] * (1 - 1.5 / k))
    inverse = sum(w * np.eye(size, k=-k) for k, w in enumerate(weights))
    return inverse, np.linalg.inv(inverse)


def sensitivity_of(c: np.ndarray) -> float:
    """Of one row in each epoch, always at the same place."""
    return max(np.abs(c[:, p::EPOCH].T @ c[:, p::EPOCH]).sum() for p in range(EPOCH)) ** 0.5


def lags(found: np.ndarray, draws: np.ndarray, most: int) -> np.ndarray:
    """Weights of the draws 0 .. most - 1 steps old in what was released, by least squares."""
    steps = range(most, len(found))
    columns = [np.concatenate([draws[t - k] for t in steps]) for k in range(most)]
    wanted = np.concatenate([found[t] for t in steps])
    return np.linalg.lstsq(np.stack(columns, axis=1), wanted, rcond=None)[0]


def draws_of(base, sizes) -> np.ndarray:
    return np.stack(
        [
            np.concatenate([base.normals(n, step, part) for part, n in enumerate(sizes)])
            for step in range(STEPS)
        ]
    )


def is_the_stream(found: np.ndarray, draws: np.ndarray, inverse: np.ndarray) -> bool:
    """Released numbers in units of S sigma C / B against C^{-1} Z: each lag, and what is left."""
    estimated = lags(found, draws, BANDS + 2)
    exact = inverse[BANDS + 1, BANDS + 1 :: -1]
    left = found - inverse @ draws
    return bool(np.abs(estimated - exact).max() < 1e-4 and left.std() < 2.0**-8 * 0.6)


@pytest.mark.false_alarm(1e-12)  # 30 deviations
@pytest.mark.parametrize(
    ("method", "resumed"),
    [
        ("dp-sgd", True),
        pytest.param("dp-sgd", False, marks=pytest.mark.slow),
        pytest.param("dp-adamw", True, marks=pytest.mark.slow),
        pytest.param("dp-adamw", False, marks=pytest.mark.slow),
    ],
)
def test_first_order_runs_release_the_whole_matrix_times_the_draws(
    tmp_path, monkeypatch, method, resumed
):
    """Seven epochs; resumed: killed in step 37, begun again from 32 with a key of its own."""
    given = iter(KEYS)
    monkeypatch.setattr(noise_keys, "new_noise_key", lambda: next(given))
    settings = {
        **RUN,
        "method": method,
        "testing.insecure_noise_seed": None,
        "testing.sampler_key": None,
    }
    if resumed:
        settings |= {"save_strategy": "steps", "save_steps": 16}
    watch = _Watch(37 if resumed else STEPS)
    trainer = build(tmp_path, trainer_settings={"callbacks": [watch]}, **settings)
    seen, keys = watch.seen, [(0, KEYS[0])]
    if resumed:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        again = _Watch()
        trainer = build(tmp_path, trainer_settings={"callbacks": [again]}, **settings)
        trainer.train(resume_from_checkpoint=True)
        assert sorted(again.seen) == list(range(37, STEPS))  # no released step is taken again
        seen, keys = {**seen, **again.seen}, [*keys, (37, KEYS[1])]
    else:
        trainer.train()
    assert sorted(seen) == list(range(STEPS))
    inverse, c = whole_matrices(STEPS, BANDS)
    found = np.stack([seen[step] for step in range(STEPS)]) * 12 / (1e4 * 5 * sensitivity_of(c))
    draws = draws_of(KeyedNoise(tuple(keys)), [p.numel() for p in tiny_model().parameters()])
    assert is_the_stream(found, draws, inverse)
    for lag in range(1, BANDS):  # 2 % of any band are seen, and another deviation
        wrong = inverse + 0.02 * np.diag(np.diag(inverse, -lag), -lag)
        assert not is_the_stream(found, draws, wrong)
    assert not is_the_stream(1.02 * found, draws, inverse)


@pytest.mark.parametrize("directions", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_held_directions_release_the_blocks_matrix_times_the_draws(tmp_path, directions):
    """K numbers a step, held for 8 steps, noise anew in each block; seven epochs."""
    held = {
        "correlated_noise.hold_direction_for": 8,
        "num_directions": directions,
        "clipping": "fixed",
    }
    trainer = build(tmp_path, **{**RUN, **held})
    trainer.train()
    block, _ = whole_matrices(8, BANDS)
    inverse = np.kron(np.eye(8), block)
    scale = 1e4 * 5 * sensitivity_of(np.linalg.inv(inverse)) / 12
    found = np.array([release.values for release in trainer.trajectory.releases]) / scale
    base = InsecureSeededNoise(3)
    draws = np.stack([base.normals(directions, step, 0) for step in range(STEPS)])
    assert (found - inverse @ draws).std() < 2.0**-8 * 0.6
    for lag in (1, 2):
        wrong = inverse + 0.04 * np.diag(np.diag(inverse, -lag), -lag)
        change = (inverse - wrong) @ draws  # its share in what was released, 0 where it is right
        share = ((found - inverse @ draws) * change).sum() / (change**2).sum()
        assert abs(share) < 0.5
