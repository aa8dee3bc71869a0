"""Schedules of noise: the paper's formulas, their optimality, their cost, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import time

import numpy as np
import pytest
import torch
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from transformers import get_scheduler

from hf_dpzero.privacy.mechanisms import mechanism_from_dict
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import sampler_from_dict
from hf_dpzero.privacy.schedules import (
    Exponential,
    ExponentialFactors,
    Given,
    GivenFactors,
    LearningRateAware,
    LinearFactors,
    Momentum,
    Subsampled,
    rate_factors,
    shape,
)
from hf_dpzero.privacy.selection import TrialCount, composed_epsilon, selection_epsilon
from hf_dpzero.privacy.words import gain_against_uniform, schedule_words

DELTA = 1e-5
KAPPA20 = 1 - 1 / 20


def make_plan(schedule=None, *, n=1000, batch=100.0, steps=100, clips=None, mechanism=None, **more):
    full = {"name": "full_batch", "num_examples": n, "expected_batch_size": n}
    poisson = {"name": "poisson", "num_examples": n, "expected_batch_size": batch}
    about = {"name": "dpzero", "clip": 2.0, "noise_multiplier": 2.0, **(mechanism or {})}
    return PrivacyPlan(
        sampler=sampler_from_dict(full if batch == n else poisson),
        mechanism=mechanism_from_dict({**about, "expected_batch_size": batch}),
        steps=steps,
        noise_schedule=schedule,
        clip_schedule=clips,
        **more,
    )


# ------------------------------------------------------------------ formulas


@pytest.mark.parametrize(
    ("gamma", "beta", "steps"), [(0.95, 0.9, 100), (0.8, 0.5, 30), (0.9, 0.0, 20)]
)
def test_momentum_influence_is_what_a_unit_of_noise_does_to_a_quadratic(gamma, beta, steps):
    """Noise of one step, descent with bias-corrected momentum from 0, and the loss that it leaves."""
    h = np.geomspace(1 - math.sqrt(gamma), 1.0, 8)
    left = []
    for noisy in range(1, steps + 1):
        theta = average = np.zeros(8)
        for t in range(1, steps + 1):
            average = beta * average + (1 - beta) * (h * theta + float(t == noisy))
            theta = theta - average / (1 - beta**t)
        left.append(float(h @ theta**2 / 2))
    found = np.exp(Momentum(gamma=gamma, beta=beta).log_influence(steps))
    assert found == pytest.approx(left, rel=1e-9, abs=1e-300)


def test_a_momentum_schedule_over_too_many_steps_is_refused():
    """Influence that no float holds is no division by zero, but noise without bound: refused."""
    schedule = Momentum(gamma=0.5, beta=0.5)
    assert np.isfinite(schedule.log_influence(5000)).all()


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_rates_are_those_of_transformers(kind, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=40)
    rates = []
    for _ in range(40):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rate_factors(kind, warmup, 40) == pytest.approx(rates, abs=1e-12)


def test_influence_of_a_decaying_rate_is_the_product():
    gamma, steps = 0.9, 12
    rates = rate_factors("linear", 3, steps)
    rates = np.where(rates == 0, rates[rates > 0].min(), rates)
    expected = [
        rates[t] ** 2 * math.prod(1 - (1 - gamma) * r for r in rates[t + 1 :]) for t in range(steps)
    ]
    schedule = LearningRateAware(gamma=gamma, learning_rate="linear", warmup_steps=3)
    assert np.exp(schedule.log_influence(steps)) == pytest.approx(expected, rel=1e-9)
    constant = LearningRateAware(gamma=gamma).log_influence(steps)
    assert constant == pytest.approx(Exponential(gamma=gamma).log_influence(steps), abs=1e-9)


def test_the_subsampled_optimum_solves_its_equation():
    schedule = Subsampled(gamma=0.9, order=3.0)
    influence = schedule.log_influence(30)
    for scale in (0.05, 0.5, 3.0, 1e4):
        sigma = schedule.multipliers(scale, influence)
        constant = influence + 4 * np.log(sigma) - 3.0 / sigma**2
        assert np.ptp(constant) < 1e-6 * max(1.0, 3 / sigma.min() ** 2)
    wide = schedule.multipliers(1e4, influence)  # without sampling's exponential: the plain shape
    assert wide / wide[0] == pytest.approx(shape(influence) / shape(influence)[0], rel=1e-6)


# ------------------------------------------------------------------ cost and gain


def test_full_batch_cost_is_the_sum_of_precisions():
    plan = make_plan(Exponential(gamma=KAPPA20), batch=1000).calibrate(epsilon=2.0, delta=DELTA)
    mu = math.sqrt((plan.multipliers**-2.0).sum())
    assert plan.epsilon(DELTA) == pytest.approx(get_epsilon_gaussian(1 / mu, DELTA), rel=1e-6)
    assert 2.0 * 0.999 <= plan.epsilon(DELTA) <= 2.0
    half = math.sqrt((plan.multipliers[:50] ** -2.0).sum())
    assert plan.epsilon(DELTA, at=50) == pytest.approx(
        get_epsilon_gaussian(1 / half, DELTA), rel=1e-6
    )


def test_constant_levels_cost_what_no_schedule_costs():
    plain = make_plan().calibrate(epsilon=1.0, delta=DELTA)
    ones = make_plan(Given(levels=(1.0,) * 100)).calibrate(epsilon=1.0, delta=DELTA)
    assert ones.multipliers == pytest.approx(np.full(100, plain.multipliers[0]), rel=1e-3)
    for at in (1, 40, 100):
        assert ones.epsilon(DELTA, at) == pytest.approx(plain.epsilon(DELTA, at), rel=2e-3)


@pytest.mark.parametrize("steps", [10, 100, 1000])
def test_full_batch_gain_is_the_closed_form(steps):
    """T sum q / (sum sqrt q)^2, which at kappa = 20 is 1.005, 1.496 and 12.8."""
    plan = make_plan(Exponential(gamma=KAPPA20), batch=1000, steps=steps)
    plan = plan.calibrate(epsilon=2.0, delta=DELTA)
    q = np.exp(plan.log_influence)
    expected = steps * q.sum() / np.sqrt(q).sum() ** 2
    assert gain_against_uniform(plan, DELTA) == pytest.approx(expected, rel=3e-3)
    assert expected == pytest.approx({10: 1.005, 100: 1.496, 1000: 12.8}[steps], rel=3e-3)


def test_the_noise_that_is_drawn_counts_as_said_by_simulation():
    """kappa = 20, T = 100, full batch: a linear recursion's noise is 1.49 times smaller, within 3 %."""
    generator = np.random.default_rng(5)
    noise = InsecureSeededNoise(9)
    terms = {}
    for name, schedule in (("dynamic", Exponential(gamma=KAPPA20)), ("uniform", None)):
        plan = make_plan(schedule, batch=1000).calibrate(epsilon=2.0, delta=DELTA)
        draws = generator.standard_normal((20_000, 100)) * plan.multipliers
        state = np.zeros(20_000)
        for t in range(100):  # variance contracts by gamma a step, as the squared distance does
            state = math.sqrt(KAPPA20) * state + draws[:, t]
        terms[name] = float((state**2).mean())
        steps = [plan.mechanism_at(t) for t in (0, 99)]
        drawn = [float(np.std([m.release([0], i, noise)[0] for i in range(800)])) for m in steps]
        expected = [m.noise_multiplier * 2.0 / 1000 for m in steps]
        assert drawn == pytest.approx(expected, rel=0.12), name
    assert terms["uniform"] / terms["dynamic"] == pytest.approx(1.496, rel=0.03)


def test_at_one_percent_the_optimum_never_loses_and_the_plain_shape_does():
    def gain(schedule):
        plan = make_plan(schedule, n=10_000).calibrate(epsilon=2.0, delta=DELTA)
        return gain_against_uniform(plan, DELTA)

    assert gain(Subsampled(gamma=KAPPA20)) > 1.0
    assert gain(Exponential(gamma=KAPPA20)) < 0.9


def test_ten_thousand_levels_are_calibrated_in_seconds():
    levels = tuple(np.exp(np.linspace(0.7, -0.7, 10_000)))
    plan = make_plan(Given(levels=levels), n=65_536, batch=1024.0, steps=10_000)
    start = time.process_time()
    plan = plan.calibrate(epsilon=2.0, delta=DELTA)
    assert time.process_time() - start < 30  # 2 to 6 s measured; a hundred times as long one by one
    assert 1.998 <= plan.epsilon(DELTA) <= 2.0


@pytest.mark.parametrize(
    "more",
    [
        {"accountant": "rdp"},
        {"relation": "replace_one"},
        {"relation": "replace_special"},
        {"mechanism": {"distribution": "laplace"}},
        {"mechanism": {"name": "dp-sgd"}},
        {"mechanism": {"name": "dpgd-0th"}},
    ],
)
def test_every_accounted_combination_is_between_its_noisiest_and_least_noisy_steps(more):
    delta = DELTA
    plan = make_plan(Exponential(gamma=0.9), steps=30, **more)
    least = dataclasses.replace(plan.mechanism, noise_multiplier=float(plan.multipliers.min()))
    most = dataclasses.replace(plan.mechanism, noise_multiplier=float(plan.multipliers.max()))
    plain = dataclasses.replace(plan, noise_schedule=None)
    costs = [dataclasses.replace(plain, mechanism=m).epsilon(delta) for m in (most, least)]
    assert costs[0] < plan.epsilon(delta) < costs[1]


def test_truncated_and_fixed_size_samplers_are_accounted_too():
    truncated = {
        "name": "truncated_poisson", "num_examples": 1000, "expected_batch_size": 100.0,
        "max_batch_size": 200,
    }  # fmt: skip
    fixed = {
        "name": "fixed_size_without_replacement", "num_examples": 1000, "expected_batch_size": 100,
    }  # fmt: skip
    base = make_plan(Exponential(gamma=0.7), steps=2)
    for sampler, relation in ((truncated, "add_or_remove_one"), (fixed, "replace_one")):
        plan = dataclasses.replace(base, sampler=sampler_from_dict(sampler), relation=relation)
        found = plan.calibrate(epsilon=3.0, delta=DELTA)
        assert 2.99 < found.epsilon(DELTA) <= 3.0


def test_adaptive_clipping_shares_each_steps_noise_alike():
    adaptive = {"name": "dpzero-adaptive", "clip_count_noise": 5.0}
    plan = make_plan(Exponential(gamma=0.9), steps=20, mechanism=adaptive)
    for step in (0, 10, 19):
        mechanism = plan.mechanism_at(step)
        assert mechanism.effective_noise_multiplier == pytest.approx(plan.multipliers[step])
        ratio = mechanism.sum_multiplier / mechanism.count_multiplier
        assert ratio == pytest.approx(
            plan.mechanism.sum_multiplier / plan.mechanism.count_multiplier
        )


def test_clips_are_scheduled_and_weigh_in_the_influence():
    plan = make_plan(Exponential(gamma=0.9), steps=20, clips=LinearFactors(end=0.5))
    assert [plan.mechanism_at(t).clip for t in (0, 19)] == [2.0, 1.0]
    assert plan.log_influence[-1] == pytest.approx(2 * math.log(0.5))
    free = make_plan(steps=20, clips=ExponentialFactors(end=0.25))
    assert free.epsilon(DELTA) == make_plan(steps=20).epsilon(DELTA)
    assert free.mechanism_at(19).clip == pytest.approx(0.5)
    assert free.mechanism_at(19).noise_scale == pytest.approx(0.5 * 2.0)


def test_extensions_compose_the_scheduled_steps_that_were_taken():
    first = make_plan(Exponential(gamma=0.9), steps=30)
    second = make_plan(steps=20, after=((first, 10),))
    from hf_dpzero.privacy.heterogeneous import composed_epsilon as reference

    taken = [(float(sigma), 0.1, 1) for sigma in first.multipliers[:10]]
    expected = reference([*taken, (2.0, 0.1, 20)], DELTA, 1e-3)
    assert second.epsilon(DELTA) == pytest.approx(expected, rel=2e-3)
    again = make_plan(Exponential(gamma=0.9), steps=20, after=((first, 10),))
    assert again.calibrate(epsilon=9.0, delta=DELTA).epsilon(DELTA) == pytest.approx(9.0, rel=2e-3)


def test_sweeps_compose_scheduled_runs():
    """Against the RDP of each level, added up; far from what the scale alone would cost."""
    from dp_accounting import PoissonSampledDpEvent, rdp
    from dp_accounting.dp_event import GaussianDpEvent, SelfComposedDpEvent

    plan = make_plan(Exponential(gamma=0.5), steps=20, accountant="rdp")
    constant = make_plan(steps=20, accountant="rdp")

    def reference(*plans):
        accountant = rdp.RdpAccountant()
        for one in plans:
            for sigma in one.multipliers:
                gaussian = GaussianDpEvent(float(sigma))
                accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(0.1, gaussian), 1))
        return accountant.get_epsilon(DELTA)

    assert composed_epsilon([plan, constant], DELTA) == pytest.approx(
        reference(plan, constant), rel=1e-3
    )
    assert composed_epsilon([plan, plan], DELTA) == pytest.approx(reference(plan, plan), rel=1e-3)
    tight = [dataclasses.replace(p, accountant="pld") for p in (plan, constant)]
    assert composed_epsilon(tight, DELTA) < 0.9 * reference(plan, constant)
    rdp_of_one = plan.epsilon(DELTA)
    assert rdp_of_one == pytest.approx(reference(plan), rel=1e-3)
    assert selection_epsilon(plan, TrialCount(mean=4.0), DELTA) > rdp_of_one
    flat = selection_epsilon(constant, TrialCount(mean=4.0), DELTA)
    assert selection_epsilon(plan, TrialCount(mean=4.0), DELTA) > 1.2 * flat


# ------------------------------------------------------------------ records


@pytest.mark.parametrize(
    "schedule",
    [
        Exponential(gamma=0.9),
        Momentum(gamma=0.9, beta=0.5),
        LearningRateAware(gamma=0.9, learning_rate="cosine", warmup_steps=4),
        Subsampled(gamma=0.9),
        Given(levels=(3.0, 2.0, 1.0)),
    ],
    ids=lambda s: s.name,
)
def test_plans_with_schedules_survive_json(schedule):
    plan = make_plan(schedule, steps=3, clips=GivenFactors(levels=(1.0, 0.5, 0.25)))
    again = PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.digest() == plan.digest()
    assert again.epsilon(DELTA) == plan.epsilon(DELTA)
    assert set(schedule_words(plan)) == {"noise", "clip"}
    assert "noise_schedule" not in make_plan().to_dict()


# ------------------------------------------------------------------ bad input


def test_limits_are_the_constant_schedule():
    constant = Exponential(gamma=1.0)
    assert (constant.multipliers(2.0, constant.log_influence(7)) == 2.0).all()
    one = Exponential(gamma=0.5)
    assert one.multipliers(2.0, one.log_influence(1)) == pytest.approx([2.0])
    near = Exponential(gamma=1 - 1e-12)
    assert near.multipliers(2.0, near.log_influence(1000)) == pytest.approx(np.full(1000, 2.0))
