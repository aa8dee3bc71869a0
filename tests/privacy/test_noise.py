"""Noise: its distribution, which a wrong scale is told from, independence, exactness."""

from __future__ import annotations

import math
import os

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise

DRAWS = 8_000
FALSE_ALARM = 1e-7
DISTRIBUTIONS = {"gaussian": stats.norm(), "laplace": stats.laplace()}


def chi_square_p(draws: list[int] | np.ndarray, distribution: object, scale: float) -> float:
    """p-value of the hypothesis that draws / scale follow `distribution`, on 50 equally likely bins."""
    edges = distribution.ppf(np.linspace(0, 1, 51))  # type: ignore[attr-defined]
    counts = np.histogram(np.asarray(draws, dtype=float) / scale, edges)[0]
    assert counts.sum() == len(draws) > 0
    return float(stats.chisquare(counts).pvalue)


@pytest.mark.false_alarm(4e-7)  # four secure cases
@pytest.mark.parametrize("source", [SecureNoise(), InsecureSeededNoise(5)], ids=lambda s: s.name)
@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
@pytest.mark.parametrize("scale", [1000.5, 2.0**50])
def test_draws_follow_the_stated_scale_and_no_other(source, distribution, scale):
    draws = getattr(source, distribution)(scale, DRAWS, 0)
    assert all(isinstance(z, int) for z in draws)
    assert chi_square_p(draws, DISTRIBUTIONS[distribution], scale) > FALSE_ALARM
    for wrong in (2 / 3, 3 / 2):
        assert chi_square_p(draws, DISTRIBUTIONS[distribution], scale * wrong) < 1e-50


@pytest.mark.false_alarm(2e-7)  # two cases
@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
def test_small_scales_follow_the_discrete_distribution_exactly(distribution):
    """At scale 1.5 the discrete distribution differs visibly from a rounded continuous one."""
    scale, support = 1.5, np.arange(-8, 9)
    weight = {
        "gaussian": np.exp(-(support**2) / (2 * scale**2)),
        "laplace": np.exp(-np.abs(support) / scale),
    }[distribution]
    draws = np.clip(getattr(SecureNoise(), distribution)(scale, DRAWS, 0), -8, 8)
    total = weight.sum() if distribution == "gaussian" else 1 / math.tanh(1 / (2 * scale))
    expected = DRAWS * weight / total
    expected[[0, -1]] += (DRAWS - expected.sum()) / 2
    observed = np.bincount(draws + 8, minlength=17)
    keep = expected > 5
    pooled = [*observed[keep], observed[~keep].sum() + 5]
    wanted = [*expected[keep], expected[~keep].sum() + 5]
    assert keep.sum() >= 7
    assert (
        stats.chisquare(pooled, np.array(wanted) * sum(pooled) / sum(wanted)).pvalue > FALSE_ALARM
    )


@pytest.mark.false_alarm(5e-8)  # 28 pairs, 6 deviations
def test_draws_within_a_call_and_across_calls_are_uncorrelated():
    draws = np.array([SecureNoise().gaussian(2.0**30, 4, 0) for _ in range(2000)]) / 2.0**30
    correlation = np.corrcoef(np.hstack([draws[:-1], draws[1:]]).T) - np.eye(8)
    assert np.abs(correlation).max() < 6 / math.sqrt(len(draws))


def test_secure_noise_ignores_steps_and_global_seeds():
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        draws.append(SecureNoise().gaussian(2.0**30, 4, step=0))
    assert not set(draws[0]) & set(draws[1])


@pytest.mark.parametrize("method", ["gaussian", "laplace", "normals", "laplaces"])
def test_a_forked_process_draws_different_noise(method):
    draw = getattr(SecureNoise(), method)
    if method in ("normals", "laplaces"):
        draw = _of_a_size(draw)
    draw(2.0**30, 2, 0)  # the generator is in use before the fork
    children = [_drawn_in_a_fork(draw) for _ in range(2)]
    here = " ".join(map(str, draw(2.0**30, 2, 0)))
    assert len({*children, here}) == 3


def _of_a_size(draw):
    return lambda scale, size, step: draw(size, step, 0)


def _drawn_in_a_fork(draw) -> str:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, " ".join(map(str, draw(2.0**30, 2, 0))).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert text
    return text


def test_insecure_noise_is_a_function_of_seed_and_step():
    a, b = InsecureSeededNoise(1), InsecureSeededNoise(2)
    for method in ("gaussian", "laplace"):
        draw = getattr(a, method)
        assert draw(1e9, 3, 4) == draw(1e9, 3, 4)
        assert not set(draw(1e9, 3, 4)) & set(draw(1e9, 3, 5))
        assert not set(draw(1e9, 3, 4)) & set(getattr(b, method)(1e9, 3, 4))
    assert a.gaussian(1e9, 2, 0)[0] != a.gaussian(1e9, 2, 0)[1]


@pytest.mark.false_alarm(2e-7)  # chi-square 1e-7, a correlation of 6 deviations
@pytest.mark.parametrize("source", [SecureNoise(), InsecureSeededNoise(5)], ids=lambda s: s.name)
def test_normals(source):
    parts = [source.normals(DRAWS, 7, part) for part in (0, 1)]
    assert all(part.dtype == np.float64 and part.shape == (DRAWS,) for part in parts)
    assert chi_square_p(np.concatenate(parts), DISTRIBUTIONS["gaussian"], 1.0) > FALSE_ALARM
    for wrong in (2 / 3, 3 / 2):
        assert chi_square_p(np.concatenate(parts), DISTRIBUTIONS["gaussian"], wrong) < 1e-50
    assert abs(np.corrcoef(*parts)[0, 1]) < 6 / math.sqrt(DRAWS)
    assert len(source.normals(3, 0, 0)) == 3
    assert not np.array_equal(*parts)
    assert np.array_equal(source.normals(DRAWS, 7, 0), parts[0]) == (not source.secure)


def test_normals_are_quantiles_of_their_bits_to_a_relative_2_to_the_minus_50(monkeypatch):
    """Held against 200-bit arithmetic; tails, which take more bits, and the centre included."""
    words = [0, 1, 2, 3, 2**51, 2**52 + 1, 2**53 + 7, 2**63 - 1, 2**64 - 1, 2**64 - 2]
    words += [int(w) for w in SecureNoise().gaussian(2.0**55, 200, 0)]
    bits = np.array([w % 2**64 for w in words], dtype=np.uint64)
    extra = np.array([3 * 2**62 + 1] * len(bits), dtype=np.uint64)  # three quarters
    given = iter([bits, np.repeat(extra[: int((bits >> np.uint64(1) < 2**52).sum())], 2)])
    monkeypatch.setattr("hf_dpzero.privacy.noise._random_words", lambda size: next(given)[:size])
    drawn = SecureNoise().normals(len(bits), 0, 0)
    with mpmath.workprec(200):
        for word, z in zip(bits.tolist(), drawn.tolist(), strict=True):
            rare = word >> 1 < 2**52
            uniform = ((word >> 1) + (mpmath.mpf("0.75") if rare else mpmath.mpf("0.5"))) / 2**64
            z = mpmath.mpf(-abs(z))
            error = abs((mpmath.ncdf(z) - uniform) / mpmath.npdf(z))
            assert error <= mpmath.mpf(2) ** -50 * abs(z) + mpmath.mpf(2) ** -52
    signs = np.where(bits & np.uint64(1), 1, -1)
    assert (np.sign(drawn) == signs)[drawn != 0].all() and (drawn != 0).sum() > 200


def test_laplaces_are_logarithms_of_their_bits_to_a_relative_2_to_the_minus_50(monkeypatch):
    """Held against 200-bit arithmetic, whatever the bits that were left out; both signs, both tails."""
    words = [0, 1, 2, 3, -1, -2, -9, 2**51, -(2**51), 2**52 + 1, -(2**52) - 1, 2**63 - 1, -(2**63)]
    words += [int(w) for w in SecureNoise().gaussian(2.0**54, 200, 0)]
    words += [64 * int(w) for w in SecureNoise().gaussian(2.0**54, 200, 0)]
    bits = np.array(words, dtype=np.int64)
    extra = np.array([3 * 2**62 + 1] * len(bits), dtype=np.uint64)  # three quarters
    rare = int((np.abs(bits / 2**63) < 2**-11).sum())
    given = iter([bits.view(np.uint64), np.repeat(extra[:rare], 2)])
    monkeypatch.setattr("hf_dpzero.privacy.noise._openssl_words", lambda size: next(given)[:size])
    drawn = SecureNoise().laplaces(len(bits), 0, 0)
    assert (np.signbit(drawn) == (bits < 0)).all()
    with mpmath.workprec(200):
        for word, x in zip(words, drawn.tolist(), strict=True):
            whole = word if word >= 0 else -(word + 1)  # |V| 2^63 lies in [whole, whole + 1)
            for rest in (
                [mpmath.mpf("0.75")] if abs(word) < 2**52 else [mpmath.mpf("1e-30"), mpmath.mpf(1)]
            ):
                exact = -mpmath.log((whole + rest) / 2**63)
                assert abs(abs(x) - exact) <= mpmath.mpf(2) ** -50 * abs(x) + mpmath.mpf(2) ** -51
    assert np.abs(drawn).max() > 40


@pytest.mark.false_alarm(2e-7)  # 1e-7, and 7 deviations of the power
@pytest.mark.parametrize("source", [SecureNoise(), InsecureSeededNoise(5)], ids=lambda s: s.name)
def test_laplaces_are_standard_laplace_draws(source):
    """A deviation that is wrong by a tenth is told: 0.0175 at one point, of a distance of 0.0092."""
    draws = source.laplaces(100_000, 3, 1)
    assert stats.kstest(draws, "laplace").pvalue > FALSE_ALARM
    for wrong in (2 / 3, 1.1, 3 / 2):
        assert stats.kstest(draws * wrong, "laplace").pvalue < FALSE_ALARM
    again = source.laplaces(100_000, 3, 1)
    assert np.array_equal(draws, again) == (not source.secure)
    assert not np.array_equal(draws, source.laplaces(100_000, 3, 2))
    assert source.dither(4, 3, 1) is None  # independent noise needs none
