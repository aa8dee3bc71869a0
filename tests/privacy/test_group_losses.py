"""Losses of groups: sensitivities by brute force, the noise that is drawn, and what may be combined."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch

from hf_dpzero.privacy.described import read
from hf_dpzero.privacy.group_losses import (
    GROUP_LOSSES,
    BalancedGroups,
    PerStepGroups,
    PrefixSumGroups,
    VertexGroups,
)
from hf_dpzero.privacy.group_losses.releases import gaussian_precision
from hf_dpzero.privacy.mechanisms import (
    AdaptiveScalarMechanism,
    ScalarMechanism,
)
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import (
    FixedBatchesSampler,
    FixedSizeSampler,
    FullBatchSampler,
    PoissonSampler,
    TruncatedPoissonSampler,
)
from hf_dpzero.privacy.schedules import noise_schedule_from_dict
from hf_dpzero.privacy.words import group_words

THREE = {"names": ("a", "b", "c"), "shares": (0.5, 0.3, 0.2)}
UNIT = 2**30
ROW = 2**38 // 257
"""What a row adds at most, in units of 2^-30: 2^30 / (1 + 2^-8)."""
KINDS = [BalancedGroups, PerStepGroups, PrefixSumGroups, VertexGroups]
SAMPLERS = {
    "poisson": PoissonSampler(num_examples=1000, expected_batch_size=100),
    "truncated": TruncatedPoissonSampler(
        num_examples=1000, expected_batch_size=100, max_batch_size=200
    ),
    "fixed size": FixedSizeSampler(num_examples=1000, expected_batch_size=100),
    "full": FullBatchSampler(num_examples=1000, expected_batch_size=1000),
    "fixed": FixedBatchesSampler(num_examples=1000, expected_batch_size=100),
}


def plan_of(groups, sampler="fixed", steps=25, mechanism=None, **settings) -> PrivacyPlan:
    chosen = SAMPLERS[sampler]
    mechanism = mechanism or ScalarMechanism(
        clip=2.0, noise_multiplier=3.0, expected_batch_size=chosen.expected_batch_size
    )
    return PrivacyPlan(sampler=chosen, mechanism=mechanism, steps=steps, groups=groups, **settings)


def test_every_kind_has_a_row_and_reads_itself_back():
    assert set(GROUP_LOSSES.values()) == set(KINDS) and len(KINDS) == 4
    for kind in KINDS:
        groups = kind(**THREE, loss_bound=3)
        assert read(GROUP_LOSSES, "group_weights", groups.to_dict()) == groups
        plan = plan_of(groups)
        again = PrivacyPlan.from_dict(plan.to_dict())
        assert again == plan and again.digest() == plan.digest()
        assert groups.name in group_words(plan)
    with pytest.raises(ValueError, match="unknown"):
        read(GROUP_LOSSES, "group_weights", {"name": "other", **THREE})
    with pytest.raises(ValueError, match="has no 'tau'"):
        read(GROUP_LOSSES, "group_weights", {"name": "vertex", **THREE, "tau": 1})


def test_a_row_of_an_unknown_group_is_refused_without_its_name():
    groups = PerStepGroups(**THREE)
    assert groups.index_of(["c", "a"]).tolist() == [2, 0]
    assert PerStepGroups(names=("0", "1"), shares=(0.5, 0.5)).index_of([1, 0]).tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"row 2 \(counted from 1\)") as error:
        groups.index_of(["a", "secret village"])
    assert "secret" not in str(error.value)


# ---------------------------------------------------------------- sensitivity


def test_losses_that_are_no_numbers_and_empty_groups_count_nothing():
    groups = PerStepGroups(**THREE, loss_bound=4.0)
    assert groups.total(np.array([math.nan, math.inf, -math.inf]), [0, 1, 2]) == [0, 0, 0]
    assert groups.total(np.zeros(0), []) == [0, 0, 0]
    assert groups.total(np.array([4.0, 1.0]), [0, 0]) == [ROW - ROW // 2, 0, 0]
    with pytest.raises(ValueError, match="one for each"):
        groups.total(np.zeros(2), [0])


def test_weights_before_the_clip_leave_the_sensitivity_alone():
    """Whatever the weights: the sum of clipped weighted rows moves by the radius at most, and by it."""
    mechanism = ScalarMechanism(
        clip=2.0, noise_multiplier=1.0, expected_batch_size=4, num_directions=3
    )
    generator = torch.Generator().manual_seed(0)
    reached = 0.0
    for _ in range(200):
        x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        weights = 10 ** (20 * torch.rand(5, 1, generator=generator, dtype=torch.float64) - 10)
        weights[0] = torch.tensor([0.0, 1e300, math.inf, math.nan, 1.0])[
            torch.randint(5, (1,), generator=generator)
        ]
        whole, rest = mechanism.clip_sum(weights * x), mechanism.clip_sum((weights * x)[1:])
        moved = math.hypot(*(a - b for a, b in zip(whole, rest, strict=True)))
        assert moved <= ROW
        reached = max(reached, moved)
    assert reached > 0.999 * ROW
    # weights after the clip would not do
    clipped = np.array(mechanism.clip_sum(torch.tensor([[9.0, 0.0, 0.0]])), dtype=float)
    assert np.linalg.norm(5 * clipped) > UNIT


@pytest.mark.parametrize("eta", [0.01, 0.5, 2.0, 6.0])
def test_a_gaussian_dominates_every_mechanism_of_bounded_range(eta):
    """Along t: the vertex of the two-valued mechanism lies above the Gaussian's trade-off function."""
    normal = NormalDist()
    mu = math.sqrt(gaussian_precision(eta))
    needed = []
    for t in np.linspace(0, eta, 801)[1:-1]:
        p = -math.expm1(t - eta) / -math.expm1(-eta)
        needed.append(normal.inv_cdf(p) - normal.inv_cdf(p * math.exp(-t)))
    assert max(needed) <= mu and max(needed) == pytest.approx(mu, rel=1e-4)
    assert mu > eta / 2  # what zero-concentrated accounting has: not enough for domination


# ---------------------------------------------------------------- accounting


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one", "replace_special"])
def test_a_joint_release_is_one_gaussian_of_the_combined_multiplier(sampler, relation):
    if sampler == "fixed size" and relation != "replace_one":
        return
    groups = PerStepGroups(**THREE, budget=0.2)
    plan = plan_of(groups, sampler, relation=relation)
    weights, losses = 3.0, groups.multiplier(3.0)
    assert plan.spec.noise_multiplier == pytest.approx((weights**-2 + losses**-2) ** -0.5)
    assert plan.spec.noise_multiplier <= (weights**-2 + losses**-2) ** -0.5
    assert losses**-2 / (losses**-2 + weights**-2) == pytest.approx(0.2)
    alone = replace(
        plan, groups=None, mechanism=replace(plan.mechanism, noise_multiplier=3.0 * groups.kept)
    )
    assert plan.epsilon(1e-5) == pytest.approx(alone.epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("kind", [PrefixSumGroups, VertexGroups])
@pytest.mark.parametrize("sampler", ["fixed", "full"])
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_unamplified_releases_cost_their_share(kind, sampler, relation):
    """Precisions add up: E / z_w^2 of the weights and s / (1 - s) of that for the groups."""
    plan = plan_of(kind(**THREE, budget=0.2), sampler, relation=relation)
    alone = replace(plan, groups=None)
    shared = replace(
        alone,
        mechanism=replace(plan.mechanism, noise_multiplier=3.0 * math.sqrt(1 - 0.2)),
    )
    assert plan.epsilon(1e-5) == pytest.approx(shared.epsilon(1e-5), rel=1e-5)
    assert plan.epsilon(1e-5) > alone.epsilon(1e-5)
    spent = [plan.epsilon(1e-5, at=count) for count in range(0, 26, 5)]
    assert spent == sorted(spent) and spent[0] == 0.0
    ahead = [alone.epsilon(1e-5, at=count) for count in range(0, 26, 5)]
    assert all(a <= b for a, b in zip(ahead, spent, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["poisson", "fixed", "full"])
def test_calibration_keeps_the_target(kind, sampler):
    if sampler == "poisson" and kind in (PrefixSumGroups, VertexGroups):
        return
    plan = plan_of(kind(**THREE), sampler).calibrate(epsilon=2.0, delta=1e-5)
    assert 2.0 * (1 - 1e-3) <= plan.epsilon(1e-5) <= 2.0
    alone = replace(plan, groups=None).calibrate(epsilon=2.0, delta=1e-5)
    more = plan.mechanism.noise_multiplier / alone.mechanism.noise_multiplier
    # the weights' part pays 1 / sqrt(1 - s) in noise without amplification, about that with it
    expected = 1.0 if kind is BalancedGroups else 1 / math.sqrt(0.9)
    assert more == pytest.approx(expected, rel=5e-3 if sampler == "poisson" else 1e-3)


def test_a_chain_of_runs_counts_the_groups_of_each():
    first = plan_of(PrefixSumGroups(**THREE))
    chain = plan_of(PerStepGroups(**THREE), "poisson", after=((first, 25),))
    assert chain.epsilon(1e-5, at=0) == pytest.approx(first.epsilon(1e-5), rel=1e-6)
    assert chain.epsilon(1e-5) > max(first.epsilon(1e-5), replace(chain, after=()).epsilon(1e-5))
    assert PrivacyPlan.from_dict(chain.to_dict()) == chain


def test_schedules_move_the_noise_of_both_parts():
    schedule = noise_schedule_from_dict({"name": "exp", "gamma": 0.9})
    plan = plan_of(PerStepGroups(**THREE), "poisson", noise_schedule=schedule)
    assert plan.mechanism_at(0).noise_multiplier > plan.mechanism_at(24).noise_multiplier
    joint = [spec.noise_multiplier for spec, _ in plan.own_parts()]
    assert min(joint) == pytest.approx(plan.multipliers.min() * plan.groups.kept)
    fitted = plan.calibrate(epsilon=1.0, delta=1e-5)
    assert 0.999 <= fitted.epsilon(1e-5) <= 1.0
    for kind in (PrefixSumGroups, VertexGroups):
        with pytest.raises(ValueError, match="noise_schedule"):
            plan_of(kind(**THREE), "full", noise_schedule=schedule)


def test_balanced_groups_go_with_laplace_noise_and_cost_nothing():
    laplace = ScalarMechanism(
        clip=1.0, noise_multiplier=9.0, expected_batch_size=100, distribution="laplace"
    )
    plan = plan_of(BalancedGroups(**THREE), "poisson", mechanism=laplace)
    assert plan.epsilon(1e-5) == replace(plan, groups=None).epsilon(1e-5)
    assert plan.values_per_release == 1


def test_adaptive_clipping_makes_three_parts_of_one_gaussian():
    adaptive = AdaptiveScalarMechanism(
        clip=1.0, noise_multiplier=3.0, expected_batch_size=100, clip_count_noise=5.0
    )
    groups = PerStepGroups(**THREE)
    plan = plan_of(groups, "poisson", mechanism=adaptive)
    parts = (adaptive.sum_multiplier, adaptive.count_multiplier, groups.multiplier(3.0))
    assert plan.spec.noise_multiplier == pytest.approx(sum(z**-2 for z in parts) ** -0.5)
    assert plan.values_per_release == 1 + 1 + 3


# ---------------------------------------------------------------- what is drawn


def chi_square(draws: np.ndarray, sigma: float) -> float:
    return float((draws / sigma) @ (draws / sigma))


def accepted(draws: np.ndarray, sigma: float) -> bool:
    """Whether the draws may have deviation sigma (both tails 1e-6)."""
    from scipy.stats import chi2

    value, size = chi_square(draws, sigma), len(draws)
    return bool(chi2.ppf(1e-7, size) < value < chi2.isf(1e-7, size))


@pytest.mark.false_alarm(4e-7)  # two tails, two cases; power fails at 6e-10
@pytest.mark.parametrize("kind", [PerStepGroups, PrefixSumGroups])
def test_the_noise_has_its_deviation_and_no_other(kind):
    """One release of a run of one step on no data is noise alone; 2/3 and 3/2 of it are told apart."""
    groups = kind(names=tuple(map(str, range(40))), shares=(1 / 40,) * 40)
    plan = plan_of(groups, steps=25)
    drawn = []
    for _ in range(10):
        player = groups.player(plan)
        player.begin([], SecureNoise())
        drawn += player.end([0] * 40, 3.0, 0, SecureNoise())
    sigma = (
        groups.multiplier(3.0)
        if kind is PerStepGroups
        else groups.multiplier(3.0, 3) * groups.sensitivity(plan.sampler, 25)
    )
    draws = np.array(drawn)
    assert accepted(draws, sigma)
    assert not accepted(draws, sigma * 2 / 3) and not accepted(draws, sigma * 3 / 2)


def test_the_same_direction_key_and_step_draw_other_noise():
    groups = PerStepGroups(**THREE)
    player = groups.player(plan_of(groups))
    one, two = (player.end([0, 0, 0], 3.0, 0, SecureNoise()) for _ in range(2))
    assert one != two and len(one) == 3


def test_prefix_sums_without_noise_are_the_sums():
    groups = PrefixSumGroups(**THREE, rate=0.5)
    plan = plan_of(groups, mechanism=ScalarMechanism(
        clip=2.0, noise_multiplier=0.0, expected_batch_size=100
    ), steps=12)  # fmt: skip
    player, exact = groups.player(plan), PerStepGroups(**THREE, rate=0.5).player(plan)
    generator, source = np.random.Generator(np.random.PCG64(1)), InsecureSeededNoise(0)
    released, plain = [], []
    for step in range(12):
        a, b = player.begin(released[-1:], source), exact.begin(plain[-1:], source)
        assert np.allclose(a, b, rtol=1e-5)
        total = [int(n) for n in generator.integers(-40 * UNIT, 40 * UNIT, size=3)]
        released.append(player.end(total, 0.0, step, source))
        plain.append(exact.end(total, 0.0, step, source))
    assert abs(a - 1 / 3).max() > 0.05  # they have moved


@pytest.mark.parametrize(("batches", "noise"), [(200, 2.75), (12, 5.71), (1, 18.74)])
def test_correlated_noise_is_smaller_in_the_sums_of_few_passes(batches, noise):
    """Deviation of the last prefix sum over the weights' multiplier; independent noise: sqrt(200)."""
    steps, groups = 200, PrefixSumGroups(**THREE, budget=0.5)
    sampler = (
        FixedBatchesSampler(num_examples=100 * batches, expected_batch_size=100)
        if batches > 1
        else FullBatchSampler(num_examples=100, expected_batch_size=100)
    )
    column = np.cumprod([1.0, *(1 - 0.5 / k for k in range(1, steps))])
    scale = groups.multiplier(1.0, math.ceil(steps / batches)) * groups.sensitivity(sampler, steps)
    assert scale * float(np.linalg.norm(column)) == pytest.approx(noise, rel=2e-3)
    assert PerStepGroups(**THREE, budget=0.5).multiplier(1.0) * math.sqrt(200) == pytest.approx(
        14.142, rel=1e-3
    )


@pytest.mark.false_alarm(2e-8)  # two binomial laws of 400
def test_draws_follow_the_weights_and_the_rate_follows_the_budget():
    groups = VertexGroups(names=("a", "b"), shares=(0.5, 0.5), draws=400)
    plan = plan_of(groups, steps=10)
    rate = groups.paid_rate(plan.spec, 3.0, plan.sampler, 10)
    spent = groups.precision(rate, plan.sampler, 10, "add_or_remove_one")
    assert spent == pytest.approx(groups.odds * 1 / 3.0**2, rel=1e-4)
    assert groups.precision(1.01 * rate, plan.sampler, 10, "add_or_remove_one") > spent
    player = groups.player(plan)
    first = player.begin([], SecureNoise())
    assert abs(first[0] - 0.5) < 0.15 and first.sum() == pytest.approx(1)  # 6 deviations
    factor = rate * groups.scales(100)[0]
    units = int(math.log(4) / factor * UNIT)  # odds of 4 to 1
    assert player.end([units, 0], 3.0, 0, SecureNoise()) == tuple(np.float32(first).tolist())
    second = player.begin([], SecureNoise())
    assert abs(second[0] - 0.8) < 0.12
    with pytest.raises(TypeError, match="secret"):
        import copy

        copy.deepcopy(player)


def test_later_passes_widen_the_range():
    """Three passes cost 1 + 4 + 9 times the draws of one, less the first draw, which saw nothing."""
    groups = VertexGroups(**THREE)
    sampler = SAMPLERS["fixed"]
    one = gaussian_precision(0.001 * float(groups.scales(100).max()))
    total = groups.precision(0.001, sampler, 30, "add_or_remove_one")
    assert total == pytest.approx(one * (10 * 1 + 10 * 4 + 9 * 9), rel=1e-3)
    full = groups.precision(0.001, SAMPLERS["full"], 3, "add_or_remove_one")
    whole = gaussian_precision(0.001 * float(groups.scales(1000).max()))
    assert full == pytest.approx(whole * (1 + 4), rel=1e-3)


def test_one_group_has_the_weight_one():
    for kind in KINDS:
        groups = kind(names=("all",), shares=(1.0,))
        player = groups.player(plan_of(groups))
        y = player.begin([], SecureNoise())
        assert groups.example_weights(y).tolist() == [1.0]
        player.end([5 * UNIT], 3.0, 0, SecureNoise())


def test_the_default_rate_is_that_of_multiplicative_weights():
    groups = PerStepGroups(**THREE, loss_bound=2.0)
    assert groups.default_rate(200) == pytest.approx(math.sqrt(2 * math.log(3) / 200) / 2)
    sums = np.array([10.0, 0.0, 0.0]) / (1 + 2.0**-8)
    odds = math.exp(groups.default_rate(200) * 2 / (2 * 50 * 0.5) * 10)
    assert groups.softmax(sums, 50, 200)[0] == pytest.approx(odds / (odds + 2))
