"""Runs on the same data add up: plans that come after others, held against one run and closed forms."""

from __future__ import annotations

import dataclasses
import math
from statistics import NormalDist
from typing import Any

import pytest
from scipy.optimize import brentq

from hf_dpzero.privacy.mechanisms import DPSGD, ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FixedSizeSampler, FullBatchSampler, PoissonSampler
from hf_dpzero.privacy.sampling import TruncatedPoissonSampler as Truncated

DELTA = 1e-5
SAMPLERS: dict[str, Any] = {
    "poisson": PoissonSampler(num_examples=1024, expected_batch_size=64.0),
    "full": FullBatchSampler(num_examples=1024, expected_batch_size=1024.0),
    "fixed": FixedSizeSampler(num_examples=1024, expected_batch_size=64),
    "truncated": Truncated(num_examples=1024, expected_batch_size=64.0, max_batch_size=128),
}


def plan(
    sampler: str = "poisson", steps: int = 50, sigma: float = 2.0, **settings: Any
) -> PrivacyPlan:
    size = float(SAMPLERS[sampler].expected_batch_size)
    mechanism = ScalarMechanism(
        clip=1.0,
        noise_multiplier=sigma,
        expected_batch_size=size,
        distribution=settings.pop("distribution", "gaussian"),
    )
    if sampler == "fixed":
        settings.setdefault("relation", "replace_one")
    return PrivacyPlan(sampler=SAMPLERS[sampler], mechanism=mechanism, steps=steps, **settings)


def after(new: PrivacyPlan, *earlier: tuple[PrivacyPlan, int]) -> PrivacyPlan:
    return dataclasses.replace(new, after=earlier)


@pytest.mark.parametrize("sampler", ["poisson", "full"])
def test_two_halves_cost_what_one_run_costs(sampler):
    half, whole = plan(sampler, 25), plan(sampler, 50)
    for done in (25, 10):
        together = after(half, (half, done))
        assert together.epsilon(DELTA) == plan(sampler, 25 + done).epsilon(DELTA)
        assert together.epsilon(DELTA, at=0) == half.epsilon(DELTA, at=done)
    assert after(half, (half, 25)).epsilon(DELTA, at=25) == whole.epsilon(DELTA)


def test_nearly_equal_steps_cost_nearly_what_one_run_costs():
    """The same multiplier but for 1e-9: two different events, composed on one grid."""
    for sampler, tolerance in (("poisson", 1e-3), ("full", 1e-6), ("fixed", 1e-6)):
        first, second = plan(sampler, 30), plan(sampler, 20, sigma=2.0 * (1 + 1e-9))
        one = plan(sampler, 50).epsilon(DELTA)
        assert after(second, (first, 30)).epsilon(DELTA) == pytest.approx(one, rel=tolerance)


@pytest.mark.parametrize(
    ("n", "sigma", "steps"),
    [(67_349, 0.6, 10_000), (393_000, 0.5, 10_000), (1_000_000, 0.5, 100_000)],
)
def test_two_runs_on_a_large_data_set_stay_tight(n, sigma, steps):
    """Rare and wide losses: a first, coarse look at their sum is a hundred times too large."""

    def run(steps: int, sigma: float) -> PrivacyPlan:
        mechanism = ScalarMechanism(clip=1.0, noise_multiplier=sigma, expected_batch_size=64.0)
        sampler = PoissonSampler(num_examples=n, expected_batch_size=64.0)
        return PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=steps)

    one, both = run(2 * steps, sigma), after(run(steps, sigma * 1.001), (run(steps, sigma), steps))
    assert 0.99 * one.epsilon(1e-7) < both.epsilon(1e-7) < 1.05 * one.epsilon(1e-7)


def test_full_batches_of_any_noise_are_one_gaussian():
    first, second = plan("full", 9, sigma=6.0), plan("full", 16, sigma=10.0)
    epsilon = after(second, (first, 9)).epsilon(DELTA)
    mu = math.sqrt(9 / 36 + 16 / 100)
    phi = NormalDist().cdf
    delta = phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(DELTA, rel=1e-6)


def test_a_sampled_run_after_a_full_batch_is_composed_by_pld():
    """Within what an accountant of Renyi divergences says, and above either alone."""
    first, second = plan("full", 4, sigma=8.0), plan("poisson", 100, sigma=1.5)
    both = after(second, (first, 4))
    epsilon = both.epsilon(DELTA)
    assert both.accountant_used == "pld"
    renyi = after(dataclasses.replace(second, accountant="rdp"),
                  (dataclasses.replace(first, accountant="rdp"), 4))  # fmt: skip
    assert renyi.accountant_used == "rdp"
    alone = max(first.epsilon(DELTA), second.epsilon(DELTA))
    assert alone < epsilon < renyi.epsilon(DELTA) < 1.3 * epsilon
    assert epsilon < first.epsilon(DELTA / 2) + second.epsilon(DELTA / 2)


def test_a_tiny_sampling_rate_beside_wide_losses_stays_tight():
    """One grid for both: what a full batch of little noise needs may not swamp small losses."""
    first, second = plan("full", 1, sigma=1.0), plan("poisson", 200, sigma=4.0)
    both = after(second, (first, 1)).epsilon(DELTA)
    mu = math.sqrt(1 + (64 / 1024) ** 2 * 200 * math.expm1(1 / 16))  # central limit
    phi = NormalDist().cdf

    def excess(e: float) -> float:
        return phi(mu / 2 - e / mu) - math.exp(e) * phi(-mu / 2 - e / mu) - DELTA

    expected = brentq(excess, 0, 50)
    assert expected * 0.99 < both < expected * 1.03


def test_laplace_runs_add_their_pure_epsilons():
    first, second = (plan("full", 3, sigma=b, distribution="laplace") for b in (10.0, 20.0))
    assert after(second, (first, 3)).epsilon(0.0) == pytest.approx(3 / 10 + 3 / 20)
    assert after(second, (first, 3)).epsilon(1e-3) < 0.45


def test_epsilon_grows_with_every_step_from_what_was_spent_before():
    first, second = plan(steps=40), plan(steps=30, sigma=1.5)
    both = after(second, (first, 40))
    spent = [both.epsilon(DELTA, at=step) for step in (0, 1, 10, 30)]
    assert spent == sorted(spent) and spent[0] == first.epsilon(DELTA)
    assert spent[-1] > second.epsilon(DELTA)


@pytest.mark.parametrize("sampler", ["poisson", "full"])
def test_noise_is_calibrated_for_the_total(sampler):
    first = plan(sampler, 40, sigma=6.0)
    spent = first.epsilon(DELTA)
    second = after(plan(sampler, 30, sigma=0.0), (first, 40))
    target = 1.5 * spent
    calibrated = second.calibrate(epsilon=target, delta=DELTA)
    assert 0.99 * target < calibrated.epsilon(DELTA) <= target
    sigma = calibrated.mechanism.noise_multiplier * 0.998
    louder = dataclasses.replace(
        calibrated, mechanism=dataclasses.replace(calibrated.mechanism, noise_multiplier=sigma)
    )
    assert louder.epsilon(DELTA) > target
    with pytest.raises(ValueError, match=r"have spent .* nothing is left.*larger target_epsilon"):
        second.calibrate(epsilon=0.9 * spent, delta=DELTA)


def test_a_chain_is_read_back_as_it_was():
    chain = after(plan(steps=5, sigma=3.0), (plan(steps=9), 7), (plan(steps=4, sigma=4.0), 4))
    assert PrivacyPlan.from_dict(chain.to_dict()) == chain
    assert "after" not in plan().to_dict()
    assert chain.digest() != plan(steps=5, sigma=3.0).digest()
    import dp_accounting as dp

    assert isinstance(chain.event(), dp.ComposedDpEvent) and len(chain.event().events) == 3


def test_dense_releases_share_one_slack():
    mechanism = DPSGD(clip=1.0, noise_multiplier=2.0, expected_batch_size=64.0, dimension=10**8)
    first = PrivacyPlan(sampler=SAMPLERS["poisson"], mechanism=mechanism, steps=50)
    second = plan(steps=50, sigma=3.0)
    plain = after(second, (plan(steps=50), 50)).epsilon(DELTA)
    assert plain < after(second, (first, 50)).epsilon(DELTA) < plain * 1.01


def test_truncation_that_never_happens_costs_what_poisson_sampling_does():
    first, new = plan("full", 2, sigma=9.0), plan("poisson", 60, sigma=1.7)
    capped = Truncated(num_examples=1024, expected_batch_size=64.0, max_batch_size=200)
    plain = after(new, (first, 2)).epsilon(DELTA)
    assert after(dataclasses.replace(new, sampler=capped), (first, 2)).epsilon(
        DELTA
    ) == pytest.approx(plain, rel=1e-3)
