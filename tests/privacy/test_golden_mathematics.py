"""The mathematics has the recorded values, which no later version may change.

`python tests/privacy/test_golden_mathematics.py` records what is new in `golden/mathematics.json`,
and leaves what is there. Directions and replays are in `golden/trajectory.json`, update rules in
`golden/update_rules.json`, words of samplers in `test_sampling.py`.

Clips are given as the norm that contributions are clipped to, which a mechanism may set below its
sensitivity. Numbers agree to 2^-26, more than clipped vectors leave for rounding and their grid;
what is released, to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_dpzero.privacy.correlated import factorization as factorizations
from hf_dpzero.privacy.correlated.factorization import epoch_sensitivity
from hf_dpzero.privacy.correlated.stream import CorrelatedNoise
from hf_dpzero.privacy.mechanisms import (
    DPSGD,
    AveragedScalarMechanism,
    ScalarMechanism,
    VectorMechanism,
)
from hf_dpzero.privacy.mechanisms.adaptive import AdaptiveScalarMechanism
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.privacy.schedules import factors_from_dict, noise_schedule_from_dict

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "mathematics.json"
RADIUS, STEPS = 2.0, 6
SETTINGS: dict[str, Any] = {"clip": RADIUS, "noise_multiplier": 1.5, "expected_batch_size": 4}
NOISE = InsecureSeededNoise(11)

ROWS = torch.tensor(
    [[0.5, -1.0, 0.25], [6.0, 8.0, 0.0], [0.0, float("nan"), 1.0], [-1e-3, 2.0, 3.0]],
    dtype=torch.float64,
)
GRAM = np.array([[4.0, 1.0, 0.0], [1.0, 9.0, -2.0], [0.0, -2.0, 1.0]])
TOTALS = [3 * 2**28 + 1, -(2**30), 7]


def to_radius(kind: Any, **more: Any) -> Any:
    """A mechanism that clips contributions to `RADIUS`."""
    mechanism = kind(**{**SETTINGS, **more})
    factor = getattr(mechanism, "radius", mechanism.clip) / mechanism.clip
    return kind(**{**SETTINGS, **more, "clip": RADIUS / factor})


def clipped(kind: Any, *given: Any, **more: Any) -> list[float]:
    """The clipped sum of `ROWS`, in the units of the clip."""
    mechanism = to_radius(kind, num_directions=3, **more)
    unit = getattr(mechanism, "granularity", 1.0)
    return [n * unit for n in mechanism.clip_sum(ROWS, *given)]


def weights(**more: Any) -> list[float]:
    norms = torch.tensor([0.5, 2.0, 8.0, float("inf")], dtype=torch.float64)
    return to_radius(DPSGD, **more).weights(norms).tolist()


def clips_after(fractions: list[float]) -> list[float]:
    mechanism = AdaptiveScalarMechanism(**SETTINGS, clip_count_noise=3.0)
    sums = np.cumsum(fractions).tolist()
    return [mechanism.after_fractions(total, n + 1).clip for n, total in enumerate(sums)]


def scheduled(name: str, **values: Any) -> list[float]:
    schedule = noise_schedule_from_dict({"name": name, **values})
    return schedule.multipliers(2.0, schedule.log_influence(STEPS)).tolist()


def factors(name: str) -> list[float]:
    return factors_from_dict({"name": name, "end": 0.25}).factors(STEPS).tolist()


def correlated(name: str, *more: Any) -> dict[str, Any]:
    """The matrix that mixes draws, sensitivities, and the noise that comes of fixed draws."""
    made = getattr(factorizations, name)(STEPS, *more)
    mixing = np.zeros((STEPS, STEPS))
    for step in range(STEPS):
        row = made.noise_row(step)
        mixing[step, list(row.draws)] = row.weights
    noise = CorrelatedNoise(NOISE, made, sensitivity=1.0, dimension=2)
    return {
        "mixing": mixing.tolist(),
        "sensitivity": [epoch_sensitivity(made, each) for each in (1, 2, 3, STEPS)],
        "noise": [noise.normals(2, step, 0).tolist() for step in range(STEPS)],
    }


NUMBERS: dict[str, Callable[[], Any]] = {
    "clipped gaussian": lambda: clipped(ScalarMechanism),
    "clipped laplace": lambda: clipped(ScalarMechanism, distribution="laplace"),
    "clipped vector": lambda: clipped(VectorMechanism, GRAM),
    "clipped means": lambda: clipped(AveragedScalarMechanism, [0, 0, 1, 1], clip_groups=2),
    "weights fixed": weights,
    "weights automatic": lambda: weights(clipping="automatic", clip_stability=0.5),
    "weights averaged": lambda: weights(clipping="averaged", clip_groups=2),
    "adaptive clips": lambda: clips_after([0.9, 0.1, -0.2, 1.4]),
    "noise exp": lambda: scheduled("exp", gamma=0.5),
    "noise learning_rate": lambda: scheduled(
        "learning_rate", gamma=0.9, learning_rate="cosine", warmup_steps=1
    ),
    "factors linear": lambda: factors("linear"),
    "factors exp": lambda: factors("exp"),
    "correlated toeplitz": lambda: correlated("toeplitz"),
    "correlated banded": lambda: correlated("banded", 3),
    "correlated tree": lambda: correlated("tree"),
}
"""Float64 arithmetic of one or a few operations each."""

RELEASES: dict[str, Callable[[], Any]] = {
    "gaussian": lambda: ScalarMechanism(**SETTINGS, num_directions=3).release(TOTALS, 5, NOISE),
    "laplace": lambda: ScalarMechanism(
        **SETTINGS, num_directions=3, distribution="laplace"
    ).release(TOTALS, 5, NOISE),
    "averaged": lambda: AveragedScalarMechanism(
        **SETTINGS, num_directions=3, clip_groups=2
    ).release(TOTALS, 5, NOISE),
    "vector": lambda: (
        DPSGD(**SETTINGS).release_part(np.array([0.5, -3.0, 1e9]), NOISE, 5, 1).tolist()
    ),
}
"""Integers, or multiples of a grid, over B, with the seeded noise of step 5."""


def test_everything_is_recorded():
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert recorded["numbers"].keys() == NUMBERS.keys() and len(NUMBERS) > 10
    assert recorded["releases"].keys() == RELEASES.keys() and len(RELEASES) > 3


def leaves(value: Any) -> np.ndarray:
    if isinstance(value, dict):
        return np.concatenate([leaves(value[name]) for name in sorted(value)])
    return np.asarray(value, dtype=np.float64).ravel()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_those_recorded(name):
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))["numbers"][name]
    found = leaves(NUMBERS[name]())
    assert np.isfinite(found).all() and np.unique(found).size > 2
    np.testing.assert_allclose(found, leaves(recorded), rtol=2.0**-26, atol=2.0**-26 * RADIUS)


@pytest.mark.parametrize("name", RELEASES)
def test_releases_are_those_recorded(name):
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))["releases"][name]
    assert list(RELEASES[name]()) == recorded


def test_the_clipped_sums_are_those_of_arithmetic():
    """By hand: rows of norm sqrt(1.3125) and sqrt(13), 10 and NaN, clipped to 2."""
    whole = np.array([0.5, -1.0, 0.25])
    last = np.array([-1e-3, 2.0, 3.0])
    expected = whole + np.array([1.2, 1.6, 0.0]) + last * 2 / np.linalg.norm(last)
    np.testing.assert_allclose(clipped(ScalarMechanism), expected, atol=1e-8)
    l1 = whole + np.array([6.0, 8.0, 0.0]) / 7  # of 1.75 and 14
    l1 += last * 2 / np.abs(last).sum()
    np.testing.assert_allclose(clipped(ScalarMechanism, distribution="laplace"), l1, atol=1e-8)


if __name__ == "__main__":
    old = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    made = {"numbers": NUMBERS, "releases": RELEASES}
    new = {
        kind: {name: old.get(kind, {}).get(name) or value() for name, value in values.items()}
        for kind, values in made.items()
    }
    GOLDEN.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
