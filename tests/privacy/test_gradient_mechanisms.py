"""First-order mechanisms: weights, groups, sensitivity, noise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from hf_dpzero.privacy.mechanisms.gradient import (
    DPSGD,
    GradientMechanism,
    row_norms,
)
from hf_dpzero.privacy.noise import InsecureSeededNoise

KEY = bytes(range(32))
CLIPS = [0.1, 7.3, 1e9]


def mechanism(**changes) -> GradientMechanism:
    base = {"clip": 2.0, "noise_multiplier": 1.5, "expected_batch_size": 8}
    return DPSGD(**{**base, **changes})


def norms_of_every_size(clip: float) -> torch.Tensor:
    """float32: zero, subnormal, within rounding of the bound, the largest there is."""
    steps = torch.arange(-40, 41, dtype=torch.float64) * 2.0**-24
    sizes = torch.tensor([0.0, 1e-45, 1e-38, 1e-6, 0.5, 1.0, 2.0, 1e6, 3.4e38], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    random = torch.exp(8 * torch.randn(400, generator=generator, dtype=torch.float64))
    return torch.cat([clip * (1 + steps), sizes, clip * random]).float()


# --- Weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", ["fixed", "automatic", "averaged"])
@pytest.mark.parametrize("clip", CLIPS)
def test_no_contribution_exceeds_the_clip_and_some_attain_it(clip, clipping):
    norms = norms_of_every_size(clip)
    weights = mechanism(clip=clip, clipping=clipping).weights(norms)
    assert weights.dtype == torch.float32
    sizes = weights.double() * norms.double()
    assert (sizes <= clip / (1 + 2.0**-8) * (1 - 2.0**-17)).all()
    assert sizes.max() >= clip / (1 + 2.0**-8) * (1 - 2.0**-15)


@pytest.mark.parametrize("clipping", ["fixed", "automatic", "averaged"])
def test_factors_that_float32_rounds_coarsely_are_zero(clipping):
    """1e-6 / 3e38 is 2^-148: as float32 it is 1.31 times too large."""
    bound = 2.0**-100
    m = mechanism(clip=1e-6, clipping=clipping)
    norms = torch.tensor([3e38, 1e-6 / bound * 1.01, 1e-6 / bound * 0.99], dtype=torch.float64)
    weights = m.weights(norms)
    assert weights[:2].tolist() == [0.0, 0.0]
    assert weights[2] >= bound
    gradient = torch.full((1, 1), 3e38)
    assert float(m.weights(row_norms(gradient)).double() * 3e38) <= m.clip


def test_fixed_weights_are_abadis():
    """min(1, r / norm): nothing is touched below the bound, everything is on it above."""
    m = mechanism(clip=2.0 * 257 / 256)
    assert m.radius == 2.0
    assert m.weights(torch.tensor([0.0, 1e-30, 1.0, 1.9999])).tolist() == [1.0] * 4
    weights = m.weights(torch.tensor([3.0, 8.0, 1e30]))
    assert weights.tolist() == pytest.approx([2 / 3, 1 / 4, 2e-30], rel=2e-5)


def test_automatic_weights_are_auto_s_times_c():
    """r / (norm + gamma): the size of a contribution grows with the norm and stays below r = 2."""
    m = mechanism(clip=2.0 * 257 / 256, clipping="automatic", clip_stability=0.5)
    norms = torch.tensor([0.0, 0.5, 1.5, 99.5])
    assert m.weights(norms).tolist() == pytest.approx([4.0, 2.0, 1.0, 0.02], rel=2e-5)
    sizes = m.weights(norms) * norms
    assert (sizes.diff() > 0).all()
    smallest = mechanism(clip=2.0**64, clipping="automatic", clip_stability=2.0**-40)
    assert smallest.weights(torch.zeros(1)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_long_rows_are_exact_to_float64(dtype):
    """One float32 sum over such a row may miss more than the margin of the weights leaves."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 4_000_000, generator=generator).abs().add(0.5).to(dtype)
    truth = rows.double().norm(dim=1)
    assert row_norms(rows).tolist() == pytest.approx(truth.tolist(), rel=1e-6)
    short = torch.randn(5, 7, generator=generator).to(dtype)
    assert row_norms(short).tolist() == pytest.approx(short.double().norm(dim=1).tolist(), rel=1e-6)
    assert row_norms(torch.zeros(3, 0)).tolist() == [0.0] * 3
    assert row_norms(torch.zeros(0, 5)).shape == (0,)
    odd = row_norms(torch.tensor([[math.nan, 1.0], [math.inf, 1.0]]))
    assert not mechanism().weights(odd).any()
    assert not mechanism().weights(row_norms(torch.tensor([[3e38, 3e38]]))).any()


@pytest.mark.parametrize("size", [10, 300_000])
def test_float32_norms_leave_the_true_contribution_below_the_clip(size):
    """Norm and product in float32, as a step computes them; the contribution measured in float64."""
    generator = torch.Generator().manual_seed(size)
    gradients = torch.randn(8, size, generator=generator) * torch.logspace(-2, 3, 8)[:, None]
    m = mechanism(clip=0.37)
    contributions = m.weights(row_norms(gradients))[:, None] * gradients
    assert (contributions.double().norm(dim=1) <= 0.37).all()


# --- Averaged clipping ----------------------------------------------------------------------------


def test_a_group_belongs_to_the_example_not_to_its_place():
    m = mechanism(clipping="averaged", clip_groups=5)
    indices = np.arange(1000)
    groups = m.group_of(indices, KEY)
    assert groups.dtype == np.int64
    assert set(groups.tolist()) == set(range(5))
    shuffled = np.random.default_rng(0).permutation(indices)
    assert (m.group_of(shuffled, KEY) == groups[shuffled]).all()
    assert (m.group_of(indices[::7], KEY) == groups[::7]).all()
    assert (m.group_of(indices, bytes(32)) != groups).mean() > 0.6
    assert m.group_of(np.empty(0, dtype=np.int64), KEY).shape == (0,)


@pytest.mark.false_alarm(0)  # fixed keys
@pytest.mark.statistical
def test_groups_are_independent_and_alike_over_keys():
    """What add-or-remove rests on: pairs of groups are uniform whatever the two indices."""
    m = mechanism(clipping="averaged", clip_groups=3)
    for indices in ([0, 1], [7, 10**9], [5, 2**40]):
        drawn = [m.group_of(indices, n.to_bytes(32, "little")).tolist() for n in range(4500)]
        counts = [drawn.count(list(pair)) for pair in itertools.product(range(3), repeat=2)]
        assert stats.chisquare(counts).pvalue > 1e-6


# --- Noise ----------------------------------------------------------------------------------------


def test_chunks_and_steps_have_noise_of_their_own():
    m, source = mechanism(), InsecureSeededNoise(3)
    zeros = np.zeros(4)
    chunks = [m.release_part(zeros, source, step, part) for step in (0, 1) for part in (0, 1)]
    assert len({float(v) for chunk in chunks for v in chunk}) == 16
    assert (m.release_part(zeros, source, 1, 1) == chunks[-1]).all()
