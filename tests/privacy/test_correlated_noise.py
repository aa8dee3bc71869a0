"""Noise that is correlated over steps: its law, what it is made of, and what a plan says it costs."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from scipy import stats

from hf_dpzero.privacy.correlated.correlation import (
    KINDS,
    Correlation,
    gain_against_independent,
    run_deviation,
    step_deviation,
)
from hf_dpzero.privacy.correlated.factorization import epoch_sensitivity, independent, toeplitz
from hf_dpzero.privacy.correlated.matrices import roundings
from hf_dpzero.privacy.correlated.stream import CorrelatedNoise, KeyedNoise, new_noise_key
from hf_dpzero.privacy.discretization import (
    DENSE_DELTA,
    DENSE_LOG_RATIO,
    DITHER,
    correlated_draws,
    dense_grid,
    dense_slack,
)
from hf_dpzero.privacy.mechanisms import (
    DPSGD,
    DPAdamW,
    ScalarMechanism,
)
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FixedBatchesSampler, PoissonSampler
from hf_dpzero.privacy.selection import composed_epsilon

KEY = bytes(range(32))
SETTINGS = {kind: {"bands": 4} if kind == "banded" else {} for kind in KINDS}


def correlation(kind: str, **settings) -> Correlation:
    return Correlation(kind=kind, **{**SETTINGS[kind], **settings})


def plan_of(kind="toeplitz", n=60, batch=10, steps=18, mechanism=None, **settings) -> PrivacyPlan:
    return PrivacyPlan(
        sampler=FixedBatchesSampler(num_examples=n, expected_batch_size=batch),
        mechanism=mechanism
        or DPSGD(clip=0.5, noise_multiplier=1.25, expected_batch_size=batch, dimension=7),
        steps=steps,
        correlation=correlation(kind),
        **settings,
    )


def stream(kind: str, steps: int, size: int, keys=((0, KEY),), **settings) -> np.ndarray:
    """float64 [steps, size]."""
    factorization = correlation(kind).factorization(steps)
    noise = CorrelatedNoise(KeyedNoise(keys), factorization, 1.0, size, **settings)
    return np.stack([noise.normals(size, step, 0) for step in range(steps)])


def inverse_of(factorization) -> np.ndarray:
    inverse = np.zeros((factorization.rounds,) * 2)
    for step in range(factorization.rounds):
        row = factorization.noise_row(step)
        inverse[step, row.draws] = row.weights
    return inverse


def follows(noise: np.ndarray, covariance: np.ndarray) -> bool:
    """Whether the columns of noise [R, n] have that covariance: the whitened sum of squares, at 1e-4."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), noise)
    level = stats.chi2.cdf((white**2).sum(), white.size)
    lagged = (white[1:] * white[:-1]).sum() / math.sqrt(white[1:].size) if len(white) > 1 else 0.0
    return 1e-4 < level < 1 - 1e-4 and abs(lagged) < 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_mechanism_releases_has_the_covariance_of_the_factorization(kind):
    """sigma^2 C^2 S^2 C^{-1} C^{-T}, on the grid; not with another sigma or fresh draws half way."""
    plan = plan_of(kind)
    factorization, size = plan.correlation.factorization(plan.steps), 4000
    sensitivity = plan.correlation.sensitivity(plan.steps, 6)
    noise = CorrelatedNoise(KeyedNoise(((0, KEY),)), factorization, sensitivity, size)
    released = np.stack(
        [plan.mechanism.release_part(np.zeros(size), noise, t, 0) for t in range(plan.steps)]
    )
    inverse, scale = inverse_of(factorization), 1.25 * 0.5 * sensitivity / 10
    covariance = scale**2 * inverse @ inverse.T
    assert follows(released, covariance)
    assert not follows(released, covariance * 1.1**2) and not follows(released, covariance / 1.1**2)
    grid = dense_grid(1.25 * 0.5 * sensitivity)
    assert (released * 10 / grid == np.rint(released * 10 / grid)).all()
    if kind != "independent":
        other = CorrelatedNoise(KeyedNoise(((0, bytes(32)),)), factorization, sensitivity, size)
        late = [plan.mechanism.release_part(np.zeros(size), other, t, 0) for t in range(9, 18)]
        assert not follows(np.concatenate([released[:9], late]), covariance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_bytes", [0, 6 * 8 * 50, 1 << 30])
def test_a_source_that_starts_again_has_the_same_draws(kind, cache_bytes):
    """Whatever fits into memory: all of it, some, or nothing; and step by step, or from the middle."""
    whole = stream(kind, 13, 50)
    assert np.allclose(stream(kind, 13, 50, cache_bytes=cache_bytes), whole, rtol=0, atol=1e-13)
    factorization = correlation(kind).factorization(13)
    again = CorrelatedNoise(KeyedNoise(((0, KEY),)), factorization, 1.0, 50, cache_bytes)
    for step in (7, 8, 12, 2):
        assert np.allclose(again.normals(50, step, 0), whole[step], rtol=0, atol=1e-13)


def test_a_resumed_run_keeps_its_draws_and_adds_its_own():
    first, second = new_noise_key(), new_noise_key()
    one, two = (
        stream("toeplitz", 12, 2000, keys) for keys in ([(0, first)], [(0, first), (5, second)])
    )
    assert np.array_equal(one[:5], two[:5]) and not np.array_equal(one[5], two[5])
    inverse = inverse_of(toeplitz(12))
    assert follows(two, inverse @ inverse.T)
    fork = stream("toeplitz", 12, 2000, [(0, first), (5, new_noise_key())])
    apart = (fork - two)[5:]  # of two copies that both go on: as noisy as fresh noise, never 0
    assert np.allclose((apart**2).mean(axis=1), 2 * (inverse[5:, 5:] ** 2).sum(axis=1), rtol=0.2)


@pytest.mark.false_alarm(2e-7)  # 1e-7, and a correlation of 6 deviations
def test_keyed_draws_are_normal():
    draws = KeyedNoise(((0, new_noise_key()),)).normals(200_000, 3, 1)
    assert stats.kstest(draws, "norm").pvalue > 1e-7
    for wrong in (2 / 3, 1.1, 3 / 2):
        assert stats.kstest(draws * wrong, "norm").pvalue < 1e-20
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 6 / math.sqrt(200_000)


def test_the_key_is_not_shown():
    assert KEY.hex() not in repr(KeyedNoise(((0, KEY),))) and str(KEY) not in repr(
        KeyedNoise(((0, KEY),))
    )


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one", "replace_special"])
def test_a_plan_costs_one_gaussian(kind, relation):
    plan = plan_of(kind, relation=relation)
    sigma = 1.25 / (2 if relation == "replace_one" else 1)
    exact = float(get_epsilon_gaussian(sigma, 1e-5 * DENSE_DELTA))
    assert exact <= plan.epsilon(1e-5) <= exact + 2e-3
    assert plan.accountant_used == "gaussian_exact"
    assert plan.epsilon(1e-5, at=0) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_of_a_plan_covers_every_participation(kind):
    """Deviation of Z is sigma C S, S the sensitivity of three participations, six steps apart."""
    plan = plan_of(kind)
    c = np.linalg.inv(inverse_of(plan.correlation.factorization(18)))
    worst = max(
        np.abs(c[:, p::6].T @ c[:, p::6]).sum() for p in range(6)
    )  # at least the squared norm of any signed sum
    assert plan.correlation.sensitivity(18, 6) == pytest.approx(math.sqrt(worst), rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_deviations_of_a_step_and_of_the_run(kind):
    plan, inverse = plan_of(kind), inverse_of(correlation(kind).factorization(18))
    s = plan.correlation.sensitivity(18, 6)
    assert step_deviation(plan) == pytest.approx(s * np.sqrt((inverse**2).sum(axis=1).max()))
    assert run_deviation(plan) == pytest.approx(s * np.linalg.norm(inverse.sum(axis=0)))
    assert gain_against_independent(plan) == pytest.approx(
        3 * 9.5 / (s**2 * (np.cumsum(inverse, axis=0) ** 2).sum(axis=1).mean())
    )


def test_stopping_early_costs_what_the_first_rows_do():
    plan = plan_of("toeplitz")
    factorization = toeplitz(18)
    for count in (1, 5, 7, 17):
        sigma = (
            1.25 * epoch_sensitivity(factorization, 6) / epoch_sensitivity(factorization, 6, count)
        )
        exact = float(get_epsilon_gaussian(sigma, 1e-5 * DENSE_DELTA))
        assert plan.epsilon(1e-5, at=count) == pytest.approx(exact, abs=1e-3)
    spent = [plan.epsilon(1e-5, at=count) for count in range(19)]
    assert spent == sorted(spent)


def test_calibration_and_json():
    plan = plan_of("banded", steps=18).calibrate(epsilon=2.0, delta=1e-5)
    assert 1.99 < plan.epsilon(1e-5) <= 2.0
    assert PrivacyPlan.from_dict(plan.to_dict()) == plan
    assert plan.to_dict()["correlation"] == {"kind": "banded", "bands": 4, "restart": 0}


def test_a_run_that_extends_another_is_a_new_block():
    first, second = plan_of("toeplitz"), plan_of("toeplitz", steps=6)
    both = plan_of("toeplitz", steps=6, after=((first, 18),))
    exact = float(get_epsilon_gaussian(1.25 / math.sqrt(2), 1e-5 * DENSE_DELTA))
    assert both.epsilon(1e-5) == pytest.approx(exact, abs=2e-3)
    assert both.epsilon(1e-5) > second.epsilon(1e-5)
    poisson = PrivacyPlan(
        sampler=PoissonSampler(num_examples=60, expected_batch_size=10),
        mechanism=DPSGD(clip=1.0, noise_multiplier=2.0, expected_batch_size=10, dimension=7),
        steps=10,
        after=((first, 18),),
    )
    assert poisson.epsilon(1e-5) > first.epsilon(1e-5)


MECHANISM = {"clip": 0.5, "noise_multiplier": 1.25, "expected_batch_size": 10}


@pytest.mark.parametrize("steps", [1, 6, 7, 18])
def test_fixed_batches_with_independent_noise_cost_one_gaussian_an_epoch(steps):
    for mechanism in (
        DPSGD(**MECHANISM, dimension=9),
        ScalarMechanism(**MECHANISM, num_directions=4),
    ):
        plan = PrivacyPlan(
            sampler=FixedBatchesSampler(num_examples=60, expected_batch_size=10),
            mechanism=mechanism,
            steps=steps,
        )
        epochs = math.ceil(steps / 6)
        exact = float(get_epsilon_gaussian(1.25 / math.sqrt(epochs), 1e-5 * DENSE_DELTA))
        assert plan.epsilon(1e-5) == pytest.approx(exact, abs=2e-3)
        spent = [plan.epsilon(1e-5, at=count) for count in range(steps + 1)]
        assert spent == sorted(spent)


def test_runs_on_fixed_batches_are_not_taken_for_one_longer_run():
    """Two of one step each: two Gaussians, though two steps of one run touch an example once."""
    sampler = FixedBatchesSampler(num_examples=60, expected_batch_size=10)
    for settings in ({}, {"correlation": correlation("toeplitz")}):
        plan = PrivacyPlan(
            sampler=sampler, mechanism=DPSGD(**MECHANISM, dimension=9), steps=1, **settings
        )
        exact = float(get_epsilon_gaussian(1.25 / math.sqrt(2), 1e-5 * DENSE_DELTA))
        assert composed_epsilon([plan, plan], 1e-5) >= exact


# ---------------------------------------------------------------- rounding


class _Large(SecureNoise):
    """Draws scaled up to 16 deviations."""

    def __init__(self, base) -> None:
        object.__setattr__(self, "base", base)

    def normals(self, size: int, step: int, part: int) -> np.ndarray:
        draws = self.base.normals(size, step, part)
        return draws * (16 / np.abs(draws).max())


@pytest.mark.parametrize("kind", ["toeplitz", "banded", "tree"])
def test_the_error_of_a_sum_is_below_what_the_proof_takes(kind):
    """Against sums in rational numbers, for draws of up to 16 deviations."""
    steps, size = 400, 40
    factorization = correlation(kind).factorization(steps)
    noise = CorrelatedNoise(_Large(KeyedNoise(((0, KEY),))), factorization, 1.0, size)
    for step in (steps - 1, 255, 3):
        row = factorization.noise_row(step)
        draws = np.stack([noise.base.normals(size, int(j), 0) for j in row.draws])
        met = roundings(len(row.draws)) * np.abs(row.weights)
        found = noise.normals(size, step, 0)
        for i in range(0, size, 7):
            terms = (
                Fraction(float(w)) * Fraction(float(z))
                for w, z in zip(row.weights, draws[:, i], strict=True)
            )
            error = abs(Fraction(float(found[i])) - sum(terms))
            assert error <= float(met @ np.abs(draws[:, i])) * 2.0**-53


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restart", [0, 5])
def test_rounding_bounds_every_row_and_column(kind, restart):
    """V^2 of the proof: sum_t (sum_j v_tj y_j)^2 <= V^2 |y|^2 whatever y; tight within 4."""
    factorization = correlation(kind, restart=restart).factorization(23)
    sizes = np.zeros((23, 23))
    for step in range(23):
        row = factorization.noise_row(step)
        sizes[step, row.draws] = np.abs(row.weights) * (10 + roundings(len(row.draws)))
    norm = np.linalg.norm(sizes, 2)
    assert norm <= factorization.rounding * (1 + 1e-12) and factorization.rounding <= 4 * norm


def test_the_slack_of_correlated_vectors():
    """A run of N numbers whose log-ratios have H as their root mean square."""
    draws = correlated_draws(10**6, 1000, 200.0)
    ratio = 4 * 2.0**-44 * 200 * math.sqrt(2 + 1920e-9) + 6.01 * 2.0**-44
    assert ratio > DENSE_LOG_RATIO
    assert draws == pytest.approx(1e9 * (ratio / DENSE_LOG_RATIO) ** 2, rel=2e-3)
    # the deviation that N numbers of that ratio add up to, as `dense_slack` has it for the draws
    epsilon, delta = 4.0, 1e-6
    failure = math.log(1 / delta) + 10 * math.log(2) + epsilon + 1
    alone = ratio * math.sqrt(2 * 1e9 * failure) + 1e9 * ratio * math.expm1(ratio)
    assert alone <= dense_slack(draws, epsilon, delta) <= alone * 1.01
    assert correlated_draws(1000, 50, 0.0) == pytest.approx(50_000, rel=1e-3)
    assert correlated_draws(1, 1, 300.0) > 200 * correlated_draws(1, 1, 12.0)  # few draws: no mean


@pytest.mark.parametrize("bands", [32, 10_000])
@pytest.mark.parametrize("dimension", [10**5, 2**31])
def test_models_of_billions_of_coordinates_over_ten_thousand_steps_are_accepted(bands, dimension):
    plan = PrivacyPlan(
        sampler=FixedBatchesSampler(num_examples=10**6, expected_batch_size=100),
        mechanism=DPSGD(
            clip=1.0, noise_multiplier=0.8, expected_batch_size=100, dimension=dimension
        ),
        steps=10_000,
        correlation=Correlation(kind="banded", bands=bands),
    )
    exact = float(get_epsilon_gaussian(0.8, 1e-6 * DENSE_DELTA))
    assert exact <= plan.epsilon(1e-6) <= exact + 0.004


def test_a_run_that_the_proof_does_not_cover_is_refused_in_words():
    plan = plan_of("banded", n=10**8, steps=10**6, mechanism=DPSGD(**MECHANISM, dimension=2**33))
    with pytest.raises(ValueError, match=r"train fewer parameters \(PEFT\), or take fewer steps"):
        plan.epsilon(1e-6)


class _Shifted(InsecureSeededNoise):
    """Base draws wrong by so much, the same errors in every step's sum."""

    def __init__(self, shift: float) -> None:
        super().__init__(5)
        object.__setattr__(self, "shift", shift)

    def normals(self, size: int, step: int, part: int) -> np.ndarray:
        return np.full(size, self.shift)

    def laplaces(self, size: int, step: int, part: int) -> np.ndarray:
        return SecureNoise().laplaces(size, step, part)


@pytest.mark.false_alarm(1e-8)
def test_an_error_of_a_draw_changes_cells_by_no_more_than_the_dither_allows():
    """Step 3 of the proof with an error of 0.1 cells: ratios within e^0.4, and not all within e^0.2.

    Four shares within 6 deviations (at most 0.5 / sqrt(size)): 8e-9. The rarest cell has 12,000 draws
    beside 18,000, so that a log ratio of 0.4 deviates by 0.012: 0.48 is 6.8 deviations beyond, 2e-11.
    """
    size, scale = 2_000_000, 1.25 * 0.5
    mechanism = DPSGD(clip=0.5, noise_multiplier=1.25, expected_batch_size=1, dimension=size)
    grid = dense_grid(scale)
    counts = []
    for shift in (0.4, 0.5):  # in cells: 0.4 rounds to 0 and 0.5 is an edge
        source = CorrelatedNoise(_Shifted(shift * grid / scale), independent(1), 1.0, size)
        cells = mechanism.release_part(np.zeros(size), source, 0, 0) / grid
        assert (cells == np.rint(cells)).all()
        counts.append(np.array([(cells == k).sum() for k in (-1, 0, 1, 2)]) / size)
    near, far = counts
    b = DITHER

    def beyond(distance: float) -> float:
        return math.exp(-distance / b) / 2

    expected = [  # P[x + b L in the cell] for x = 0.4 and 0.5
        [beyond(0.9) - beyond(1.9), 1 - beyond(0.9) - beyond(0.1)],
        [beyond(1.0) - beyond(2.0), 1 / 2 - beyond(1.0)],
    ]
    assert near[:2] == pytest.approx(expected[0], abs=6 * 0.5 / math.sqrt(size))
    assert far[:2] == pytest.approx(expected[1], abs=6 * 0.5 / math.sqrt(size))
    ratios = np.abs(np.log(near / far))
    assert (ratios <= 0.1 / b + 0.08).all() and (ratios > 0.2).any()


@pytest.mark.false_alarm(1e-12)  # 12 and 24 deviations
def test_the_dither_is_fresh_and_its_variance_is_small():
    """Two sources of one key: the same noise, another dither; g^2 / 8 and g^2 / 12 a step.

    A mean of 200,000 squares of a Laplace number beside a uniform one deviates by 0.4 % of itself.
    """
    size, factorization = 200_000, correlation("banded").factorization(6)
    plan, released = plan_of("banded"), []
    for _ in range(2):
        noise = CorrelatedNoise(KeyedNoise(((0, KEY),)), factorization, 1.0, size)
        assert not np.array_equal(noise.dither(9, 3, 0), noise.dither(9, 3, 0))
        released.append(10 * plan.mechanism.release_part(np.zeros(size), noise, 3, 0))
    grid = dense_grid(1.25 * 0.5)
    exact = 1.25 * 0.5 * noise.normals(size, 3, 0)
    assert float(((released[0] - exact) ** 2).mean()) == pytest.approx(
        grid**2 * (1 / 8 + 1 / 12), rel=0.05
    )
    apart = float(((released[0] - released[1]) ** 2).mean()) / grid**2
    assert apart == pytest.approx(2 * (1 / 8 + 1 / 12), rel=0.1)


def test_planning_a_large_model_needs_nothing_of_its_size():
    """2^27 coordinates are 1 GiB of float64; a plan, its epsilons and those of a sweep take a few MB."""

    def planned(multiplier: float) -> PrivacyPlan:
        return PrivacyPlan(
            sampler=FixedBatchesSampler(num_examples=250_000, expected_batch_size=100),
            mechanism=DPAdamW(
                clip=1.0, noise_multiplier=multiplier, expected_batch_size=100, dimension=2**27
            ),
            steps=10_000,
            correlation=Correlation(kind="banded", bands=32),
        )

    planned(3.0).epsilon(1e-6)  # what is imported and kept from then on
    tracemalloc.start()
    plan = planned(2.0).calibrate(epsilon=4.0, delta=1e-6)
    assert plan.epsilon(1e-6, at=5_000) < plan.epsilon(1e-6) <= 4.0
    assert run_deviation(plan) > step_deviation(plan) > 1
    assert composed_epsilon([planned(8.0)] * 12, 1e-6) < 4.0
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()
