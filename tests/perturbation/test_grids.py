"""The grid: ranges, rounding and exactness, against rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from hf_dpzero.perturbation import grids


@pytest.mark.parametrize(
    "largest", [0.0, 1e-9, 0.06, 0.125, 0.3, 0.5, 0.500001, 1.0, 7.9, 8.0, 1e6]
)
def test_exponent_leaves_a_factor_two(largest):
    capacity = 2.0 ** grids.exponent_for(largest)
    assert capacity >= 2 * max(largest, 0.125)
    assert capacity < 4 * max(largest, 0.125) * (1 + 1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="finite weights"):
        grids.exponent_for(bad)


def test_every_sum_of_grid_multiples_within_capacity_is_exact():
    """100 000 random pairs of integers up to 2^23: float32 sums equal the rational ones."""
    generator = torch.Generator().manual_seed(0)
    spacing = grids.quantum(1)
    a = torch.randint(-(2**23), 2**23, (100_000,), generator=generator)
    b = torch.randint(-(2**23), 2**23, (100_000,), generator=generator)
    total = (a.float() * spacing) + (b.float() * spacing)
    assert torch.equal(total.double() / spacing, (a + b).double())
    beyond = torch.tensor([2.0**24 + 1], dtype=torch.float64)  # the range does matter
    assert float(beyond.float()) != float(beyond)


def test_snap_is_nearest_with_ties_to_even():
    values = torch.tensor([0.3, -0.3, 0.125, 0.375, -0.125, 5.0])
    assert grids.snap_(values, 0.25).tolist() == [0.25, -0.25, 0.0, 0.5, 0.0, 5.0]
    assert [float(grids.snapped(v, 0.25)) for v in (0.3, 0.125, 0.375)] == [0.25, 0.0, 0.5]
    assert grids.snapped(0.3, np.array([0.25, 0.5, 8.0])).tolist() == [0.25, 0.5, 0.0]


def test_snap_leaves_no_negative_zero():
    """Sums come back to +0, so a grid that kept -0 would not be restored to the bit."""
    values = grids.snap_(torch.tensor([-0.0, -0.1, 0.0, 0.1, -0.2]), 0.25)
    assert torch.signbit(values).tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("value", [0.3, -0.3, 17.0, -2.5, 1e-4])
def test_scalar_stochastic_rounding_goes_up_with_the_fraction(value):
    """Its mean over 4096 equidistant uniforms is the value, to one uniform's step, on every grid."""
    spacing, n = np.array([0.5, 0.125]), 4096
    uniforms = (np.arange(n)[:, None] + 0.5) / n
    rounded = grids.snapped_stochastically(value, spacing, uniforms)
    assert all(Fraction(r) % Fraction(1, 8) == 0 for r in rounded.reshape(-1).tolist())
    assert (np.abs(rounded - value) < spacing).all()
    assert (np.abs(rounded.mean(axis=0) - value) <= spacing / n).all()


def test_no_uniform_moves_a_grid_point():
    """A uniform lies in [0, 1): what is on the grid stays."""
    points = np.arange(-8, 9) * 0.25
    for uniform in (0.0, 0.5, 1 - 2.0**-40):
        found = [float(grids.snapped_stochastically(p, 0.25, uniform)) for p in points.tolist()]
        assert found == points.tolist()
