"""Mechanisms: sensitivity attained and never exceeded, limits, released law, an audit."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from hf_dpzero.privacy.accounting import epsilon_after
from hf_dpzero.privacy.discretization import GRID_RADIUS
from hf_dpzero.privacy.events import StepSpec
from hf_dpzero.privacy.mechanisms import (
    NonPrivateMean,
    ScalarMechanism,
    VectorMechanism,
)
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise

NOISE = InsecureSeededNoise(0)
ROW = 2**38 // 257
"""What a row adds at most, in units of 2^-30 C: 2^30 / (1 + 2^-8)."""


def scalar(
    k: int = 1, clip: float = 1.0, distribution: str = "gaussian", **more
) -> ScalarMechanism:
    more = {"noise_multiplier": 1.0, "expected_batch_size": 8, **more}
    return ScalarMechanism(clip=clip, num_directions=k, distribution=distribution, **more)


@pytest.mark.parametrize(("size", "small"), [(1.0, 1), (1e9, 8)])
def test_the_integer_check_catches_what_float64_cannot_see(size, small):
    """(R, s) has norm^2 = R^2 + s^2 > R^2, and its float64 norm rounds to R exactly."""
    mechanism = scalar(2, 1.0)
    size *= mechanism.radius
    row = torch.tensor([[size, size * small / ROW]], dtype=torch.float64)
    assert float(row.norm()) == size
    first, second = mechanism.clip_sum(row)
    assert first**2 + second**2 <= ROW**2
    assert (first, second) == (ROW - 1, small - 1)


@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
def test_clipping_keeps_direction_and_truncates_toward_zero(distribution):
    mechanism = scalar(2, 5.0 * 257 / 256, distribution)
    assert mechanism.radius == 5.0
    at_bound = [3.0, -4.0] if distribution == "gaussian" else [15 / 7, -20 / 7]
    cases = [
        ([30.0, -40.0], at_bound),
        ([3e300, -4e300], at_bound),
        ([0.3, 0.4], [0.3, 0.4]),
        ([1e-3, 0.0], [1e-3, 0.0]),
    ]
    for row, expected in cases:
        total = mechanism.clip_sum(torch.tensor([row], dtype=torch.float64))
        got = np.array(total) * mechanism.granularity
        assert np.abs(got - expected).max() <= 2 * mechanism.granularity
        assert (np.abs(got) <= np.abs(expected) * (1 + 1e-15)).all()


def test_no_clip_and_no_noise_is_mezo_bit_for_bit():
    """Plain MeZO: the float64 mean of the finite differences, rounded to float32."""
    generator = torch.Generator().manual_seed(1)
    for trial in range(200):
        batch = 1 + trial % 65
        x = torch.randn(batch, 3, generator=generator) * 10 ** (trial % 7 - 3)
        mechanism = NonPrivateMean(expected_batch_size=batch, num_directions=3)
        plain = (x.double().sum(dim=0) / batch).float()
        released = mechanism.release(mechanism.clip_sum(x), trial, NOISE)
        assert released == tuple(plain.double().tolist())
    scaled = NonPrivateMean(expected_batch_size=2 * batch, num_directions=3)
    assert scaled.release(scaled.clip_sum(x), 0, NOISE) == tuple((plain / 2).double().tolist())


def test_a_clip_that_never_binds_without_noise_is_the_mean_to_the_grid():
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(2))
    mechanism = scalar(2, 64.0, noise_multiplier=0.0, expected_batch_size=50)
    assert not mechanism.private
    released = mechanism.release(mechanism.clip_sum(x), 0, SecureNoise())
    mean = x.double().mean(dim=0)
    tolerance = mechanism.granularity + 2.0**-24
    assert (torch.tensor(released, dtype=torch.float64) - mean).abs().max() <= tolerance


def test_release_is_float32_divides_by_the_public_batch_size_and_adds_noise_once():
    mechanism = scalar(2, 3.0, expected_batch_size=7, noise_multiplier=1.5)
    released = mechanism.release([GRID_RADIUS, -5], 9, NOISE)
    draws = NOISE.gaussian(1.5 * 2**30, 2, 9)
    expected = [(t + z) * 3.0 / 2**30 / 7 for t, z in zip([GRID_RADIUS, -5], draws, strict=True)]
    assert released == tuple(float(np.float32(v)) for v in expected)
    with pytest.raises(ValueError, match="total has 1 entries, this mechanism sums 2"):
        mechanism.release([0], 0, NOISE)


def vector(k: int = 1, clip: float = 6.0 * 257 / 256, **more) -> VectorMechanism:
    more = {"noise_multiplier": 1.0, "expected_batch_size": 2, **more}
    return VectorMechanism(clip=clip, num_directions=k, **more)


def along(norm: float) -> np.ndarray:
    return np.array([[norm**2]])


def test_vector_mechanism_clips_along_the_direction():
    mechanism = vector()
    bound = 6.0 / 4.0
    x = torch.tensor([[1.0], [1e30], [-0.25], [math.nan]])
    assert mechanism.clip_sum(x, along(4.0))[0] == pytest.approx(0.75 + bound, rel=2.0**-29)
    assert mechanism.clip_sum(torch.empty(0, 1), along(4.0)) == (0.0,)
    for norm in (1.0, 3.0, math.sqrt(7), 1e4, 355e6**0.5):
        for value in (1e30, -1e30, 6.0 / norm):
            (s,) = mechanism.clip_sum(torch.tensor([[value]], dtype=torch.float64), along(norm))
            assert abs(s) * norm <= 6.0 * (1 + 1e-15)
            assert abs(s) * norm >= 6.0 * (1 - 2.0**-29)


def test_several_directions_clip_the_vector_that_they_span():
    """Against d-vectors made in full: scaled to norm r = 2 as wholes, then added."""
    u = np.random.default_rng(3).choice([-1.0, 1.0], size=(3, 6))
    mechanism = vector(3, 2.0 * 257 / 256)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    vectors = x.numpy() @ u
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert (norms > 2).sum() > 5
    assert (norms < 2).sum() > 5
    expected = (vectors * np.minimum(1, 2.0 / norms)).sum(axis=0)
    found = np.array(mechanism.clip_sum(x, torch.from_numpy(u @ u.T))) @ u
    assert np.abs(found - expected).max() < 40 * 2.0 * 2.0**-20
    bad = torch.tensor([[math.nan, 0, 0], [0, math.inf, 0]], dtype=torch.float64)
    mixed = mechanism.clip_sum(torch.cat([bad, x]), u @ u.T)
    assert mixed == mechanism.clip_sum(x, u @ u.T)


def test_discrete_and_rounded_gaussian_are_as_close_as_the_proof_says():
    """Step 2 of the module's argument, at scales where 40 digits can see the difference."""
    mpmath.mp.dps = 40
    for s in (64, 1024):
        normaliser = mpmath.sqrt(2 * mpmath.pi) * s  # Poisson summation: exact to exp(-2 pi^2 s^2)
        root = s * mpmath.sqrt(2)
        for t in (0, 1, 4, 12):
            y = mpmath.mpf(t * s)
            discrete = mpmath.exp(-((y / root) ** 2)) / normaliser
            rounded = (mpmath.erfc((y - 0.5) / root) - mpmath.erfc((y + 0.5) / root)) / 2
            distance = abs(mpmath.log(discrete / rounded))
            bound = mpmath.mpf(t**2 + 2) / (12 * s**2)
            assert distance <= bound
            assert t < 4 or distance >= bound / 3


class Drawn:
    """Secure draws made in one call, handed out one by one: a call for each costs ten times as much."""

    correlated = False

    def __init__(self, distribution: str, scale: float, count: int) -> None:
        self.left = getattr(SecureNoise(), distribution)(scale, count, 0)
        self.scale = scale

    def gaussian(self, scale: float, size: int, step: int) -> list[int]:
        assert (scale, size) == (self.scale, 1)
        return [self.left.pop()]

    laplace = gaussian


@pytest.mark.false_alarm(3e-7)  # 1e-7 a case, and 6 deviations of the power
@pytest.mark.statistical
@pytest.mark.parametrize(
    ("distribution", "relation"), [("gaussian", "add_or_remove_one"), ("laplace", "replace_one")]
)
def test_audit_of_one_full_batch_step(distribution, relation):
    """An attacker with the best threshold test finds less than the claim, and most of it.

    Data set A: one example at +C among zeros. B: it is missing, or it is at -C. From 80 000
    releases of each, Clopper-Pearson bounds epsilon from below at delta = 0.02: two tails of 5e-8.
    """
    draws, delta = 80_000, 0.02
    sigma = 1.2 if relation == "add_or_remove_one" else 2.4
    mechanism = scalar(1, 2.0, distribution, noise_multiplier=sigma, expected_batch_size=3)
    a = torch.tensor([[1e30], [0.0], [0.0]])
    b = a[1:] if relation == "add_or_remove_one" else torch.tensor([[-1e30], [0.0], [0.0]])
    totals = [mechanism.clip_sum(x) for x in (a, b)]
    source = Drawn(distribution, sigma * GRID_RADIUS, 2 * draws)
    released = [
        np.array([mechanism.release(t, 0, source)[0] for _ in range(draws)]) for t in totals
    ]
    spec = StepSpec(
        sampling="full_batch",
        num_examples=3,
        batch_size=3.0,
        relation=relation,
        distribution=distribution,
        noise_multiplier=sigma,
    )
    claim = epsilon_after(spec, 1, delta)
    # The optimal threshold: halfway, plus the shift at which the log-likelihood ratio is `claim`.
    high, low = (t[0] * mechanism.granularity / 3 for t in totals)
    noise = mechanism.noise_scale / 3
    shift = claim * noise**2 / (high - low) if distribution == "gaussian" else claim * noise / 2
    threshold = (high + low) / 2 + shift
    hits_a, hits_b = (int((r > threshold).sum()) for r in released)
    assert hits_b > 100
    confident = 5e-8
    p_a = stats.beta.ppf(confident, hits_a, draws - hits_a + 1)
    p_b = stats.beta.ppf(1 - confident, hits_b + 1, draws - hits_b)
    lower = math.log((p_a - delta) / p_b)
    assert 0.6 * claim < lower < claim
