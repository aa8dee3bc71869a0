"""Noise: its distribution, which a wrong scale is told from, independence, exactness."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

from hf_dpzero.privacy.noise import MAX_SCALE, InsecureSeededNoise, SecureNoise

DRAWS = 8_000
FALSE_ALARM = 1e-7
DISTRIBUTIONS = {"gaussian": stats.norm(), "laplace": stats.laplace()}


def chi_square_p(draws: list[int] | np.ndarray, distribution: object, scale: float) -> float:
    """p-value of the hypothesis that draws / scale follow `distribution`, on 50 equally likely bins."""
    edges = distribution.ppf(np.linspace(0, 1, 51))  # type: ignore[attr-defined]
    counts = np.histogram(np.asarray(draws, dtype=float) / scale, edges)[0]
    assert counts.sum() == len(draws) > 0
    return float(stats.chisquare(counts).pvalue)


@pytest.mark.parametrize("source", [SecureNoise(), InsecureSeededNoise(5)], ids=lambda s: s.name)
@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
@pytest.mark.parametrize("scale", [1000.5, 2.0**50])
def test_draws_follow_the_stated_scale_and_no_other(source, distribution, scale):
    draws = getattr(source, distribution)(scale, DRAWS, 0)
    assert all(isinstance(z, int) for z in draws)
    assert chi_square_p(draws, DISTRIBUTIONS[distribution], scale) > FALSE_ALARM
    for wrong in (2 / 3, 3 / 2):
        assert chi_square_p(draws, DISTRIBUTIONS[distribution], scale * wrong) < 1e-50


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


@pytest.mark.parametrize("method", ["gaussian", "laplace"])
def test_a_forked_process_draws_different_noise(method):
    draw = getattr(SecureNoise(), method)
    draw(2.0**30, 2, 0)  # the generator is in use before the fork
    children = [_drawn_in_a_fork(draw) for _ in range(2)]
    here = " ".join(map(str, draw(2.0**30, 2, 0)))
    assert len({*children, here}) == 3


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


def test_names_say_what_is_secure():
    assert SecureNoise().secure
    assert not InsecureSeededNoise().secure
    assert "NOT_PRIVATE" in InsecureSeededNoise().name


@pytest.mark.parametrize("source", [SecureNoise(), InsecureSeededNoise(5)], ids=lambda s: s.name)
def test_dense_noise(source):
    parts = [source.dense_gaussian(2.5, DRAWS, 7, part) for part in (0, 1)]
    assert all(part.dtype == np.float32 and part.shape == (DRAWS,) for part in parts)
    assert chi_square_p(np.concatenate(parts), DISTRIBUTIONS["gaussian"], 2.5) > FALSE_ALARM
    for wrong in (2 / 3, 3 / 2):
        assert chi_square_p(np.concatenate(parts), DISTRIBUTIONS["gaussian"], 2.5 * wrong) < 1e-50
    cosines, sines = np.split(parts[0], 2)  # of the same radii, in Box-Muller
    assert abs(np.corrcoef(cosines, sines)[0, 1]) < 6 / math.sqrt(DRAWS / 2)
    assert len(source.dense_gaussian(1.0, 3, 0, 0)) == 3
    assert not np.array_equal(*parts)
    again = source.dense_gaussian(2.5, DRAWS, 7, 0)
    assert np.array_equal(again, parts[0]) == (not source.secure)
    assert not source.dense_gaussian(0.0, 4, 0, 0).any()


@pytest.mark.parametrize("source", [SecureNoise(), InsecureSeededNoise(5)], ids=lambda s: s.name)
@pytest.mark.parametrize("method", ["gaussian", "laplace"])
def test_edges_and_refusals(source, method):
    draw = getattr(source, method)
    assert draw(1.0, 0, 0) == []
    for scale in (0.0, -1.0, math.nan, math.inf, MAX_SCALE * 2):
        with pytest.raises(ValueError, match=r"outside \(0, 2\^55\]"):
            draw(scale, 1, 0)
    with pytest.raises(ValueError, match="size=-1 is negative"):
        draw(1.0, -1, 0)
    with pytest.raises(ValueError, match="noise scale nan"):
        source.dense_gaussian(math.nan, 1, 0, 0)
