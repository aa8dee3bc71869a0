"""The algorithms of the DPZero paper on quadratics, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_dpzero.papers import quadratic
from hf_dpzero.papers.quadratic import Cell, Quadratic
from scripts.studies.quadratic import SPECTRA


def problem(d=6, n=40, spectrum="sqrt(d)"):
    return Quadratic.draw(SPECTRA[spectrum](d), n, seed=3)


def test_the_noise_is_lemma_2_2s():
    expected = 4 * 3.0 * math.sqrt(2 * 640 * math.log(math.e + 2.0 / 1e-6)) / (10_000 * 2.0)
    assert math.isclose(quadratic.noise_std(3.0, 640, 10_000), expected)


def test_the_clipped_mean_is_the_mean_of_clipped_terms():
    generator = np.random.Generator(np.random.PCG64(1))
    projected = np.sort(generator.normal(size=101) * 3)
    at, bounds = generator.normal(size=20) * 4, generator.uniform(0.01, 9, size=20)
    expected = [np.clip(a - projected, -b, b).mean() for a, b in zip(at, bounds)]
    np.testing.assert_allclose(quadratic.clipped_mean(at, projected, bounds), expected, atol=1e-12)


@pytest.mark.parametrize("vector_noise", [False, True])
def test_zeroth_order_is_the_algorithm_written_out(vector_noise):
    p, cell = problem(), Cell(20, 0.1, 2.0)
    others = [Cell(10, 1.0, 0.3), cell]
    found = quadratic.zeroth_order(p, others, vector_noise=vector_noise, seed=5)[1]
    directions = quadratic._generator(5, 1).standard_normal((20, 6), dtype=np.float32)
    noise = quadratic._generator(5, 2)
    x, sigma = np.zeros(6), quadratic.noise_std(2.0, 20, 40)
    for v in directions:  # drawn 16 at a time from one stream, hence the same numbers
        u = v * math.sqrt(6) / np.linalg.norm(v)
        s = np.array([u @ (p.spectrum * (x - xi)) for xi in p.train])
        if vector_noise:  # each vector s_i u clipped to norm C
            s = s * np.minimum(1, 2.0 / (np.abs(s) * math.sqrt(6)))
            step = s.mean() * u + sigma * noise.standard_normal(6, dtype=np.float32)
        else:
            step = (np.clip(s, -2, 2).mean() + sigma * noise.standard_normal(1, np.float32)[0]) * u
        x = x - 0.1 * step
    np.testing.assert_allclose(found, x, atol=2e-5)


def test_dp_gd_is_the_algorithm_written_out():
    p = problem()
    found = quadratic.gradient_descent(p, [Cell(5, 0.3, 0.5), Cell(10, 0.1, 2.0)], seed=5)[1]
    noise, x, sigma = quadratic._generator(5, 3), np.zeros(6), quadratic.noise_std(2.0, 10, 40)
    for _ in range(10):
        gradients = p.spectrum * (x - p.train)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        mean = (gradients * np.minimum(1, 2.0 / norms)).mean(axis=0)
        x = x - 0.1 * (mean + sigma * noise.standard_normal(6, dtype=np.float32))
    np.testing.assert_allclose(found, x, atol=2e-5)


def test_measures_are_the_functions():
    p = problem()
    x = np.full((1, 6), 0.5, np.float32)
    losses = [0.5 * (x[0] - xi) @ (p.spectrum * (x[0] - xi)) for xi in p.test]
    gradient = np.mean([p.spectrum * (x[0] - xi) for xi in p.test], axis=0)
    found = p.measure(x)[0]
    np.testing.assert_allclose(
        found[[1, 3]], [np.linalg.norm(gradient), np.mean(losses)], rtol=1e-5
    )
