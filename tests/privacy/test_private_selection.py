"""Private selection: the number of trials, the theorem by hand, and calibration."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from typing import Any

import pytest
from scipy import stats

from hf_dpzero.privacy.mechanisms import NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import (
    FullBatchSampler,
    PoissonSampler,
)
from hf_dpzero.privacy.schedules import Given
from hf_dpzero.privacy.selection import (
    TrialCount,
    calibrate_composed,
    calibrate_selection,
    composed_epsilon,
    composition_entry,
    selection_epsilon,
    selection_event,
    total_epsilon,
    with_noise,
)

DELTA = 1e-5


def make_plan(steps: int = 200, sigma: float = 4.0, **settings: Any) -> PrivacyPlan:
    mechanism = ScalarMechanism(
        clip=1.0,
        noise_multiplier=sigma,
        expected_batch_size=64.0,
        num_directions=settings.pop("num_directions", 1),
        distribution=settings.pop("distribution", "gaussian"),
    )
    sampler = settings.pop("sampler", PoissonSampler(num_examples=1024, expected_batch_size=64.0))
    return PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=steps, **settings)


def full_batch_plan(steps: int = 25, sigma: float = 50.0, **settings: Any) -> PrivacyPlan:
    return make_plan(
        steps,
        sigma,
        sampler=FullBatchSampler(num_examples=64, expected_batch_size=64.0),
        **settings,
    )


# ------------------------------------------------------------------ the number of trials


@pytest.mark.false_alarm(1e-7)
@pytest.mark.statistical
def test_draws_are_geometric():
    """Chi-squared over k = 1..6 and the rest, at 1e-7; another mean is told by a p of 1e-20."""
    n, mean = 4000, 3.0
    counts = Counter(min(TrialCount(mean=mean).draw(), 7) for _ in range(n))
    assert TrialCount(mean=1.0).draw() == 1

    def chance(mean: float) -> float:
        expected = [n / mean * (1 - 1 / mean) ** k for k in range(6)]
        expected.append(n - sum(expected))
        assert min(expected) > 30  # the law of chi-square holds
        return float(stats.chisquare([counts[k] for k in range(1, 8)], expected).pvalue)

    assert chance(mean) > 1e-7
    assert max(chance(mean * 2 / 3), chance(mean * 3 / 2)) < 1e-20


# ------------------------------------------------------------------ the theorem, by hand


def gaussian_rdp(order: float, steps: int, sigma: float) -> float:
    """T full-batch Gaussian releases: order T / (2 sigma^2)."""
    return order * steps / (2 * sigma**2)


def orders_of_accountant() -> list[float]:
    from dp_accounting.rdp import RdpAccountant

    return [float(order) for order in RdpAccountant()._orders]


def event_of(plan: PrivacyPlan, trials: TrialCount) -> Any:
    part = dataclasses.replace(plan.spec, accountant="rdp"), plan.steps
    return selection_event([part], trials)


def rdp_of(plan: PrivacyPlan, trials: TrialCount) -> dict[float, float]:
    """order -> RDP of the selection as dp_accounting sees it."""
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(event_of(plan, trials))
    return dict(zip(orders_of_accountant(), accountant._rdp, strict=True))


@pytest.mark.parametrize("mean", [4.0, 30.0])
def test_event_is_theorem_2(mean):
    """eps(l) + 2 (1 - 1/l') eps(l') + 2 log(EK)/l' + log(EK)/(l-1), best l'."""
    steps, sigma = 25, 50.0
    found = rdp_of(full_batch_plan(steps, sigma), TrialCount(mean=mean))
    constant = 2 * min(
        (1 - 1 / other) * gaussian_rdp(other, steps, sigma) + math.log(mean) / other
        for other in orders_of_accountant()
    )

    def theorem(order: float) -> float:
        return gaussian_rdp(order, steps, sigma) + constant + math.log(mean) / (order - 1)

    for order in (1.5, 4.0, 10.0, 32.0, 128.0):
        by_hand = min(theorem(other) for other in orders_of_accountant() if other >= order)
        assert found[order] == pytest.approx(by_hand, rel=1e-7)
        assert found[order] > gaussian_rdp(order, steps, sigma)


def test_discrete_noise_adds_twelve_slacks_of_rdp():
    """(2a - 1)/(a - 1) = 12 at a = 1.1; seen at the coarsest noise that a plan accepts."""
    from dp_accounting.dp_event import ZCDpEvent

    plan = full_batch_plan(steps=1, sigma=2.0**-9, num_directions=8)
    noise, grid = event_of(plan, TrialCount(mean=2.0)).event.events
    assert isinstance(grid, ZCDpEvent)
    assert grid.rho == 0
    h = 8 * (40.0**2 + 2) / (12 * (2.0**-9 * 2**30) ** 2)
    assert grid.xi == pytest.approx(12 * h, rel=1e-9)
    assert noise.count == 1


def test_selection_costs_more_than_a_run_and_less_than_composing():
    plan, trials = make_plan(accountant="rdp"), TrialCount(mean=10.0)
    total = selection_epsilon(plan, trials, DELTA)
    assert plan.epsilon(DELTA) < total < composed_epsilon([plan] * 100, DELTA)
    more = selection_epsilon(plan, TrialCount(mean=100.0), DELTA)
    assert total < more


@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
def test_full_batch_replace_one_is_twice_the_sensitivity(distribution):
    """Sigma under add-or-remove is 2 sigma under replace-one."""
    trials = TrialCount(mean=3.0)
    one = full_batch_plan(distribution=distribution, relation="replace_one", sigma=100.0)
    other = full_batch_plan(distribution=distribution, sigma=50.0)
    epsilons = [selection_epsilon(plan, trials, DELTA) for plan in (one, other)]
    assert epsilons[0] == pytest.approx(epsilons[1], rel=1e-6)


# ------------------------------------------------------------------ calibration


@pytest.mark.parametrize(
    "plan", [make_plan(), full_batch_plan(relation="replace_special")], ids=["poisson", "full"]
)
def test_calibration_meets_the_total(plan):
    trials = TrialCount(mean=8.0)
    found = calibrate_selection(plan, trials, epsilon=4.0, delta=DELTA)
    assert found.accountant == "rdp"
    assert 3.99 < selection_epsilon(found, trials, DELTA) <= 4.0
    assert found.epsilon(DELTA) < 3.5
    less = with_noise(found, 0.998 * found.spec.noise_multiplier)
    assert selection_epsilon(less, trials, DELTA) > 4.0


def test_composed_calibration_is_one_long_run():
    """Eight runs of T steps are one of 8 T: the same noise, by the plan's own calibration."""
    plan = make_plan(steps=50)
    found = calibrate_composed([plan] * 8, epsilon=2.0, delta=DELTA)
    long = dataclasses.replace(plan, steps=400).calibrate(epsilon=2.0, delta=DELTA)
    assert {p.spec.noise_multiplier for p in found} == {found[0].spec.noise_multiplier}
    assert found[0].spec.noise_multiplier == pytest.approx(long.spec.noise_multiplier, rel=1e-3)
    assert composed_epsilon(found, DELTA) <= 2.0


def test_different_gaussian_runs_compose():
    """Full batches of sigma 20 (4 steps) and 40 (9): one Gaussian, mu^2 = 4/400 + 9/1600."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    plans = [full_batch_plan(4, 20.0), full_batch_plan(9, 40.0)]
    exact = get_epsilon_gaussian(1 / math.sqrt(4 / 400 + 9 / 1600), DELTA)
    found = composed_epsilon(plans, DELTA)
    assert exact <= found < exact * (1 + 1e-6)


def test_num_directions_may_differ_within_one_event():
    plans = [make_plan(num_directions=1), make_plan(num_directions=16)]
    assert composed_epsilon(plans, DELTA) == pytest.approx(
        make_plan(steps=400).epsilon(DELTA), rel=1e-6
    )


def test_without_noise_nothing_is_bounded():
    mezo = dataclasses.replace(make_plan(), mechanism=NonPrivateMean(expected_batch_size=64.0))
    assert math.isinf(selection_epsilon(mezo, TrialCount(mean=2.0), DELTA))
    assert math.isinf(composed_epsilon([mezo], DELTA))


def test_a_composition_with_given_levels_is_read_back_from_a_file():
    """JSON has lists where the schedule has tuples: the run's own plan is found among those listed."""
    plan = make_plan(steps=3, noise_schedule=Given(levels=(2.0, 1.0, 1.0)))
    entry = json.loads(json.dumps(composition_entry([plan, plan], ["clip"])))
    assert total_epsilon(plan, entry, DELTA) == composed_epsilon([plan, plan], DELTA)
