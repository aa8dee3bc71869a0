"""Adaptive clipping: one Gaussian of multiplier z, its noise, and a clip that finds the quantile."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from hf_dpzero.ledger.trajectory import Release
from hf_dpzero.privacy.discretization import GRID_RADIUS, discretisation_slack
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.mechanisms.adaptive import (
    AdaptiveDPAdamW,
    AdaptiveDPSGD,
    AdaptiveScalarMechanism,
)
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import (
    PoissonSampler,
)
from hf_dpzero.privacy.schedules import MechanismSchedule

COUNTED = 2**36 // 65
"""What a row adds to the count at most, in units of 2^-31: 2^30 / (1 + 2^-6)."""

CLASSES = [AdaptiveScalarMechanism, AdaptiveDPSGD, AdaptiveDPAdamW]
DELTA = 1e-5


def adaptive(cls=AdaptiveScalarMechanism, **changes):
    """z = 3, 2 sigma_b = 5, so z_d = 15/4."""
    base = {"clip": 2.0, "noise_multiplier": 3.0, "expected_batch_size": 16,
            "clip_count_noise": 2.5}  # fmt: skip
    return cls(**{**base, **changes})


def plan(mechanism, **changes) -> PrivacyPlan:
    sampler = PoissonSampler(num_examples=1000, expected_batch_size=16)
    return PrivacyPlan(**{"sampler": sampler, "mechanism": mechanism, "steps": 100, **changes})


# --- The joint event ------------------------------------------------------------------------------


def test_the_two_multipliers_spend_z_and_not_more():
    """z_d^-2 + (2 sigma_b)^-2 <= z^-2 in exact arithmetic, and hardly less."""
    for z in (2.0**-10, 0.7, 12.5, 100.0):
        for ratio in (1 + 1e-10, 1 + 1e-6, 1.01, 100.0):
            m = adaptive(noise_multiplier=z, clip_count_noise=z * ratio / 2)
            parts = [1 / Fraction(v) ** 2 for v in (m.sum_multiplier, m.count_multiplier)]
            allowed = 1 / Fraction(z) ** 2
            assert allowed * Fraction(1 - 2.0**-44) <= sum(parts) <= allowed
            assert m.count_multiplier == 2 * m.clip_count_noise


def contributions(m: AdaptiveScalarMechanism, rows: torch.Tensor) -> list[list[Fraction]]:
    """p_i of every row alone, exactly: the integers of its total over the noise's integer scales."""
    scales = [Fraction(m.sum_multiplier)] * m.num_directions + [Fraction(2 * m.clip_count_noise)]
    return [
        [Fraction(n, GRID_RADIUS) / s for n, s in zip(m.clip_sum(row[None]), scales, strict=True)]
        for row in rows
    ]


def squared(p: list[Fraction], q: list[Fraction] | None = None) -> Fraction:
    other = q or [Fraction(0)] * len(p)
    return sum(((a - b) ** 2 for a, b in zip(p, other, strict=True)), Fraction(0))


@pytest.mark.parametrize("k", [1, 3])
def test_one_exchanged_example_moves_both_parts_most_at_the_ends_of_the_ramp(k):
    """From 3C/4 (counted whole) to -9 (clipped, not counted); the sum of two squares is convex."""
    m = adaptive(num_directions=k)
    sizes = torch.tensor([[0.0], [0.3], [-1.2], [1.5], [1.9], [2.5], [-9.0], [math.nan]])
    rows = sizes.double() * torch.eye(k)[:1]
    points = contributions(m, rows)
    moves = [squared(p, q) for p in points for q in points]
    parts = (
        (Fraction(256, 257) + Fraction(3, 4)) / Fraction(m.sum_multiplier),
        Fraction(2 * 64, 65 * 5),
    )
    bound = sum(part**2 for part in parts)
    assert bound * Fraction(1 - 1e-8) <= max(moves) <= bound < Fraction(4, 9)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_count_falls_linearly_from_three_to_five_quarters_of_the_clip(cls):
    m = adaptive(cls, clip=4.0)
    halves = {0.0: 0.5, 3.0: 0.5, 3.5: 0.25, 4.0: 0.0, 4.25: -0.125, 5.0: -0.5, 1e300: -0.5}
    for norm, half in halves.items():
        norms = torch.tensor([norm], dtype=torch.float64)
        *_, count = m.clip_sum(norms[:, None]) if hasattr(m, "clip_sum") else m.count(norms)
        assert count == int(2 * half * (COUNTED + 1 / 65))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_moves_neither_part(value):
    m = adaptive(num_directions=2)
    good = torch.tensor([[0.1, 0.2], [5.0, 5.0]])
    bad = torch.tensor([[value, 0.0]])
    assert m.clip_sum(torch.cat([good, bad])) == m.clip_sum(good)
    gradients = adaptive(AdaptiveDPSGD)
    assert gradients.count(torch.tensor([1.0, 7.0, 0.5, value])) == [COUNTED]
    assert gradients.weights(torch.tensor([value])).tolist() == [0.0]


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


@pytest.mark.parametrize(
    ("relation", "delta"),
    [("add_or_remove_one", 1e-4), ("replace_one", 1e-2), ("replace_special", 1e-3)],
)  # fmt: skip
def test_one_sampled_step_costs_what_the_plane_says(relation, delta):
    """The two releases as one density in the plane, integrated: no composition, no accountant."""
    q, m = 0.3, adaptive(noise_multiplier=0.8, clip_count_noise=0.6, expected_batch_size=300)
    sampler = PoissonSampler(num_examples=1000, expected_batch_size=300)
    claim = plan(m, sampler=sampler, steps=1, relation=relation).epsilon(delta)
    axis_a = np.linspace(-8, 8, 1601) * m.sum_multiplier
    axis_b = np.linspace(-8, 8, 1601) * m.clip_count_noise
    a, b = np.meshgrid(axis_a, axis_b, indexing="ij")

    def density(total: float, count: float) -> np.ndarray:
        x = ((a - total) / m.sum_multiplier) ** 2 + ((b - count) / m.clip_count_noise) ** 2
        found = np.exp(-x / 2)
        return found / found.sum()

    absent = density(0.0, 0.0)
    first = (1 - q) * absent + q * density(1.0, 0.5)  # sum in units of C
    other = (1 - q) * absent + q * density(-1.0, -0.5) if relation == "replace_one" else absent
    truth = max(hockey_stick(first, other, claim), hockey_stick(other, first, claim))
    assert delta * 0.97 <= truth <= delta * (1 + 1e-3)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_adaptive_plan_costs_what_a_fixed_one_with_z_costs(cls):
    fixed = ScalarMechanism(clip=2.0, noise_multiplier=3.0, expected_batch_size=16)
    for relation in ("add_or_remove_one", "replace_one", "replace_special"):
        costs = [plan(m, relation=relation).epsilon(DELTA) for m in (adaptive(cls), fixed)]
        grid = 0.0 if cls is AdaptiveScalarMechanism else 1e-3  # of the dense noise
        assert costs[1] * (1 - 1e-9) <= costs[0] <= costs[1] * (1 + 1e-9 + grid)


def test_every_draw_has_its_slack():
    """h of K + 1 coordinates at the smallest multiplier, z."""
    p = plan(adaptive(num_directions=4, noise_multiplier=2.0**-9, clip_count_noise=1.0))
    assert p.spec.num_directions == 5
    assert p.spec.noise_multiplier == 2.0**-9
    slack = discretisation_slack(2.0**-9, 5 * 100)
    parts = 100 * (4 * discretisation_slack(p.mechanism.sum_multiplier, 1)
                   + discretisation_slack(2.0, 1))  # fmt: skip
    assert parts < slack


def test_calibration_says_when_the_count_has_too_little_noise():
    p = plan(adaptive(noise_multiplier=0.0, clip_count_noise=0.4))
    message = r"clip_count_noise=0\.4 must be above half of the noise multiplier .*raise clip_count"
    with pytest.raises(ValueError, match=message):
        p.calibrate(epsilon=0.1, delta=DELTA)
    assert p.calibrate(epsilon=20.0, delta=DELTA).epsilon(DELTA) <= 20.0


# --- What is released -----------------------------------------------------------------------------


def test_release_of_scalars():
    m = adaptive(num_directions=2, noise_multiplier=0.0, clip=2.0 * 257 / 256)
    assert not m.private
    x = torch.tensor([[1.0, -1.0], [3.0, 4.0], [0.5, 0.5]])  # norms 1.41, 5, 0.71; the radius is 2
    expected = [(1.0 + 1.2 + 0.5) / 16, (-1.0 + 1.6 + 0.5) / 16, (2 - 1) / 2 / 16 + 0.5]
    assert m.release(m.clip_sum(x), 0, SecureNoise()) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="total has 2 entries"):
        m.release([0, 0], 0, SecureNoise())


@pytest.mark.false_alarm(3e-7)  # two of 1e-7, and 4e-8 of the power at 500 draws
def test_the_noise_of_the_count_has_the_accounted_scale():
    """(1 + 2^-6) sigma_b / B on the fraction, and neither 2/3 nor 3/2 of it by the sum of squares."""
    m, dense, source = adaptive(), adaptive(AdaptiveDPAdamW), SecureNoise()
    for count in (
        lambda: m.release([0, 0], 0, source)[1],
        lambda: dense.release_count([0], 0, source)[0],
    ):
        draws = (np.array([count() for _ in range(500)]) - 0.5) / (2.5 * 65 / 64 / 16)
        assert stats.kstest(draws, "norm").pvalue > 1e-7
        square, law = float((draws**2).sum()), stats.chi2(500)
        assert law.sf(square * 9 / 4) < 1e-12 and law.cdf(square * 4 / 9) < 1e-12


@pytest.mark.false_alarm(1e-11)  # Student, r = 0.3 of 500
@pytest.mark.parametrize("source", [SecureNoise(), InsecureSeededNoise(0)], ids=lambda s: s.name)
def test_the_count_has_a_draw_of_its_own(source):
    m = adaptive()
    released = np.array([m.release([0, 0], step, source) for step in range(500)])
    assert abs(np.corrcoef(released.T)[0, 1]) < 0.3  # 6 / sqrt(500)


# --- The clip -------------------------------------------------------------------------------------


def at(mechanism, past):
    """The mechanism of the step after releases of the values `past`."""
    return mechanism.after_fractions(math.fsum(values[-1] for values in past), len(past))


@pytest.mark.parametrize("cls", CLASSES)
def test_the_clip_is_a_function_of_the_past(cls):
    m = adaptive(cls, clip_quantile=0.75, clip_learning_rate=0.5)
    past = [(0.1,) * (m.values_per_release - 1) + (f,) for f in (1.0, 0.5, 0.25)]
    assert at(m, past).clip == pytest.approx(2.0 * math.exp(-0.5 * (1.75 - 3 * 0.75)))
    assert at(m, past[::-1]) == at(m, past)
    assert at(m, []) == m
    assert at(m, past[:1]).clip < m.clip
    same = {**at(m, past).to_dict(), "clip": m.clip}
    assert same == m.to_dict()


def test_following_a_growing_past_is_the_same_to_the_last_bit():
    rng = np.random.default_rng(0)
    m = adaptive(clip_learning_rate=0.01)
    past = [(0.0, float(np.float32(v))) for v in rng.normal(0.5, 3.0, 400)]
    releases = [Release(step, values, 0.1) for step, values in enumerate(past)]
    follow = MechanismSchedule(m)
    for n in (0, 1, 2, 3, 100, 101, 400, 400):
        assert follow.after(releases[:n]) == at(m, past[:n])
    assert len({at(m, past[:n]).clip for n in range(100)}) == 100
    fixed = ScalarMechanism(clip=2.0, noise_multiplier=3.0, expected_batch_size=16)
    assert MechanismSchedule(fixed).after(releases[:1]) is fixed
    with pytest.raises(ValueError, match="3 releases after 400 were seen: follow another run"):
        follow.after(releases[:3])


def test_the_clip_stays_in_range():
    m = adaptive(clip_learning_rate=1.0)
    assert at(m, [(0.0, 1e6)]).clip == pytest.approx(2.0 * 2.0**-10)
    assert at(m, [(0.0, -1e6)]).clip == pytest.approx(2.0 * 2.0**20)
    assert at(adaptive(clip=2.0**60), [(0.0, -1e6)]).clip == 2.0**64


@pytest.mark.parametrize(("quantile", "start"), [(0.2, 0.01), (0.9, 100.0)])
def test_the_clip_finds_the_quantile(quantile, start):
    """Log-normal norms, Poisson batches: from a hundred times off to within the noise."""
    rng = np.random.default_rng(1)
    truth = math.exp(stats.norm.ppf(quantile))
    m = adaptive(clip=start * truth, clip_quantile=quantile, expected_batch_size=200,
                 noise_multiplier=2.0, clip_count_noise=10.0, clip_learning_rate=0.2)  # fmt: skip
    source, releases, clips = InsecureSeededNoise(2), [], []
    step_mechanism, follow = m, MechanismSchedule(m)
    for step in range(500):
        norms = np.exp(rng.standard_normal(rng.poisson(200)))
        x = torch.from_numpy(norms * rng.choice([-1.0, 1.0], norms.size))[:, None]
        values = step_mechanism.release(step_mechanism.clip_sum(x), step, source)
        releases.append(Release(step, values, 0.1))
        step_mechanism = follow.after(releases)
        clips.append(step_mechanism.clip)
    settled = np.log(np.array(clips[-200:]) / truth)
    assert abs(settled.mean()) < 0.1
    assert settled.std() < 0.3
    assert abs(math.log(clips[0] / truth)) > 4
