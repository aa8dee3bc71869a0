"""Dynamic privacy budgets: the paper's formulas, Algorithm 1, exact quadratics, degenerate inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from budget_bounds import (
    contraction,
    dynamic_bound,
    dynamic_steps,
    noise_constant,
    uniform_bound,
    uniform_steps,
)
from scipy.stats import norm

from hf_dpzero.privacy.schedules import (
    Exponential,
    Momentum,
    quadratic_influence,
    quadratic_responses,
)
from scripts.studies.budget import algorithm as budget
from scripts.studies.budget.algorithm import (
    PrintedMomentum,
    affordable_steps,
    momentum_influence,
    multipliers_for,
    optimal_multipliers,
    private_gradient_descent,
)

CURVATURE = np.linspace(0.1, 1, 20)
START = np.full(20, 2.0)
GAMMA = contraction(10)
R = 0.05


def excess_bound(multipliers, budget, alpha, gamma):
    """ERUB = gamma^T + R sum_t gamma^(T-t) alpha sigma_t^2 (Theorem 4.2), for rates 1/M."""
    left = np.arange(len(multipliers) - 1, -1, -1)
    return gamma ** len(multipliers) + budget * alpha * (gamma**left @ np.square(multipliers))


def alpha():
    gap = float(CURVATURE @ START**2 / 2)
    return noise_constant(20, 1.0, R, 1.0, 1000, gap)


# ------------------------------------------------------------------ privacy


@pytest.mark.parametrize(
    ("epsilon", "delta", "rho", "exact"),
    [
        (4, 1e-8, 0.196352, 0.51344), (0.5, 1e-5, 0.005314, None), (1, 1e-5, 0.020820, 0.07185),
        (2, 1e-5, 0.080045, 0.25155), (4, 1e-5, 0.297652, 0.8555), (8, 1e-5, 1.049136, 2.7757),
    ],
)  # fmt: skip
def test_budgets_of_epsilon(epsilon, delta, rho, exact):
    assert budget.zcdp_rho(epsilon, delta) == pytest.approx(rho, abs=6e-7)
    assert budget.zcdp_epsilon(budget.zcdp_rho(epsilon, delta), delta) == pytest.approx(epsilon)
    assert budget.zcdp_budget(epsilon, delta) == 2 * budget.zcdp_rho(epsilon, delta)
    total = budget.tight_budget(epsilon, delta)
    if exact is not None:
        assert total == pytest.approx(exact, abs=10.0 ** -(5 if exact < 0.6 else 4))
    assert total > budget.zcdp_budget(epsilon, delta)
    mu = math.sqrt(total)  # Balle and Wang 2018
    tails = norm.cdf([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
    assert tails[0] - math.exp(epsilon) * tails[1] == pytest.approx(delta, rel=1e-4)


def test_the_papers_budget_and_its_misprint():
    assert budget.zcdp_budget(4, 1e-8) == pytest.approx(0.392704, abs=6e-7)
    log = math.log(1e8)
    plus = 4 + 2 * log + 2 * math.sqrt(log * (4 + log))
    assert plus > 80  # as printed, for a rho of .196
    assert 4 + 2 * log - 2 * math.sqrt(log * (4 + log)) == pytest.approx(budget.zcdp_rho(4, 1e-8))
    # (sqrt(e + L) - sqrt L)^2 loses all digits of a small e; e^2 / (4 L) is its limit
    assert budget.zcdp_rho(1e-9, 1e-5) == pytest.approx(1e-18 / (4 * math.log(1e5)), rel=1e-9)


# ------------------------------------------------------------------ schedules


def test_the_gd_schedule():
    found = multipliers_for(Exponential(gamma=0.81), 5, 1.0)
    expected = [6.24157903, 5.61742112, 5.05567901, 4.55011111, 4.0951]
    assert found**2 == pytest.approx(expected, rel=1e-8)
    root = math.sqrt(0.81)
    closed = (0.81**-2.5 - 1) / (1 - root) * root ** np.arange(1, 6)  # Theorem 4.5
    assert found**2 == pytest.approx(closed)
    assert found[1:] / found[:-1] == pytest.approx(0.81**0.25)


def test_lemma_4_4_for_any_influence():
    generator = np.random.default_rng(3)
    q = generator.uniform(0.1, 9, size=40)
    best = optimal_multipliers(np.log(q), 0.7)
    assert (best**-2).sum() == pytest.approx(0.7)
    assert best**2 == pytest.approx([np.sqrt(q / own).sum() / 0.7 for own in q])
    least = 0.7 * q @ best**2
    assert least == pytest.approx(np.sqrt(q).sum() ** 2)
    uniform = 0.7 * q @ multipliers_for(None, 40, 0.7) ** 2
    assert uniform - least == pytest.approx(40**2 * np.sqrt(q).var())  # Eq. 26
    for _ in range(200):
        other = best * np.exp(0.1 * generator.standard_normal(40))
        other *= math.sqrt((other**-2).sum() / 0.7)
        assert 0.7 * q @ other**2 >= least * (1 - 1e-12)


def test_momentum_influence_is_u_3():
    steps, gamma, beta = 30, 0.93, 0.6
    t = np.arange(1, steps + 1)
    weights = gamma ** (steps - t) * ((1 - beta) / (1 - beta**t)) ** 2
    u3 = [(weights[i:] * beta ** (2.0 * np.arange(steps - i))).sum() for i in range(steps)]
    assert np.exp(momentum_influence(steps, gamma, beta)) == pytest.approx(u3)
    plain = momentum_influence(steps, gamma, 0.0)
    assert plain == pytest.approx(Exponential(gamma=gamma).log_influence(steps))


def test_the_printed_momentum_influence_is_no_upper_bound():
    """Right after the turn it lies below U_3's by gamma^That; its noise is worse than uniform."""
    gamma, beta, steps = 0.95, 0.9, 100
    schedule = PrintedMomentum(gamma=gamma, beta=beta)
    printed, exact = schedule.log_influence(steps), momentum_influence(steps, gamma, beta)
    turn = schedule.turn
    assert (printed[:turn] >= exact[:turn]).all()
    assert np.exp(printed - exact)[turn:].min() == pytest.approx(0.108, abs=1e-3)
    corrected = printed - np.where(np.arange(steps) >= turn, turn * math.log(gamma), 0.0)
    assert (corrected >= exact).all()
    q = np.exp(exact)
    terms = [q @ optimal_multipliers(log, 1.0) ** 2 for log in (exact, np.zeros(steps), printed)]
    assert terms[1] / terms[0] == pytest.approx(1.315, abs=1e-3)
    assert terms[2] / terms[0] == pytest.approx(2.597, abs=1e-3)


# ------------------------------------------------------------------ bounds


def test_bounds_of_the_quadratic():
    a = alpha()
    assert a == pytest.approx(9.0909e-6, rel=1e-4)
    best, papers = dynamic_steps(a, GAMMA), uniform_steps(a, GAMMA)
    assert (best, papers) == (pytest.approx(107.67, abs=5e-3), pytest.approx(88.82, abs=5e-3))
    assert dynamic_bound(best, a, GAMMA) == pytest.approx(0.00344028, abs=5e-9)
    ratio = a / (1 - math.sqrt(GAMMA)) ** 2
    assert dynamic_bound(best, a, GAMMA) == pytest.approx(ratio / (ratio + 1))  # end of its proof
    assert uniform_bound(papers, a, GAMMA) == pytest.approx(0.00815998, abs=5e-9)
    assert dynamic_bound(best, a, GAMMA) <= min(dynamic_bound(best + s, a, GAMMA) for s in (-1, 1))
    printed = 2 * 10 * math.log(1 + 1 / (10 * a))  # T of Theorem 4.5
    assert printed > 1.7 * best
    assert dynamic_bound(printed, a, GAMMA) > dynamic_bound(best, a, GAMMA)


@pytest.mark.parametrize("steps", [1, 7, 120])
def test_closed_forms_are_theorem_4_2(steps):
    for schedule, closed in ((None, uniform_bound), (Exponential(gamma=GAMMA), dynamic_bound)):
        sigma = multipliers_for(schedule, steps, R)
        found = excess_bound(sigma, R, alpha(), GAMMA)
        assert found == pytest.approx(closed(steps, alpha(), GAMMA))


def test_the_exact_excess_is_below_the_bound_and_as_derived():
    left = np.arange(119, -1, -1)[:, None]
    for schedule, expected in ((None, 7.81e-4), (Exponential(gamma=GAMMA), 1.31e-4)):
        sigma = multipliers_for(schedule, 120, R)
        responses, _ = quadratic_responses(CURVATURE, 1.0, 120, 0.0)
        found = CURVATURE @ (responses * START) ** 2 / 2
        found += quadratic_influence(CURVATURE, 1.0, 120) @ (sigma / 1000) ** 2
        own = CURVATURE @ ((1 - CURVATURE) ** 120 * START) ** 2 / 2
        own += sigma**2 @ ((1 - CURVATURE) ** (2 * left) @ CURVATURE) * 1e-6 / 2
        assert found == pytest.approx(own)
        gap = CURVATURE @ START**2 / 2
        assert found / gap == pytest.approx(expected, rel=1e-3)
        assert found / gap <= excess_bound(sigma, R, alpha(), GAMMA)


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_responses_are_those_of_algorithm_1(beta):
    h, steps, rate = np.array([0.2, 1.0]), 9, 0.4
    a, k = quadratic_responses(h, rate, steps, beta)
    errors = np.random.default_rng(2).standard_normal((steps, 2))
    theta, average = np.ones(2), np.zeros(2)
    for t in range(steps):
        average = budget.momentum_average(average, h * theta + errors[t], t + 1, beta)
        theta = theta - rate * average
    assert theta == pytest.approx(a - rate * (k * errors).sum(axis=0))


def test_under_momentum_exp_beats_the_printed_schedule_on_quadratics():
    """Share of noise that reaches E f, over the least: kappa = 20, rate 1/M, beta = .9, T = 100."""
    h, gamma = np.linspace(0.05, 1, 20), contraction(20)
    q = quadratic_influence(h, 1.0, 100, 0.9)
    least = q @ optimal_multipliers(np.log(q), 1.0) ** 2
    momenta = (PrintedMomentum(gamma=gamma, beta=0.9), Momentum(gamma=gamma, beta=0.9))
    schedules = (None, Exponential(gamma=gamma), *momenta)
    terms = [q @ multipliers_for(s, 100, 1.0) ** 2 / least for s in schedules]
    assert terms == pytest.approx([2.607, 1.280, 4.213, 1.082], abs=1e-3)


def test_best_noise_under_momentum_where_a_step_contracts_little():
    """gamma = .985, beta = .9: small at first, as bias correction repeats early noise, and large in the
    last steps, of which little has arrived when the run ends."""
    h = np.array([1 - math.sqrt(0.985)])
    sigma = optimal_multipliers(np.log(quadratic_influence(h, 1.0, 100, 0.9)), 1.0)
    assert sigma[0] < sigma[5] < sigma[20] > sigma[50] > sigma[80] < sigma[99]
    plain = np.log(quadratic_influence(h, 1.0, 100))  # without momentum it is exp
    assert plain - plain[-1] == pytest.approx(Exponential(gamma=0.985).log_influence(100))


# ------------------------------------------------------------------ Algorithm 1


def rows(theta):
    """Gradients of two quadratics; their mean is that of `CURVATURE[:2]`'s."""
    return np.stack([CURVATURE[:2] * theta + [1.0, 0.0], CURVATURE[:2] * theta - [1.0, 0.0]])


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_algorithm_1_written_out(beta):
    sigma = multipliers_for(Exponential(gamma=0.9), 6, 2.0)
    found = private_gradient_descent(
        rows, np.array([3.0, -2.0]), sigma, rates=0.5, clip=0.8, budget=2.0, beta=beta,
        generator=np.random.default_rng(7),
    )  # fmt: skip
    generator, theta, m = np.random.default_rng(7), np.array([3.0, -2.0]), np.zeros(2)
    for t in range(1, 7):
        clipped = [g * min(1, 0.8 / np.linalg.norm(g)) for g in rows(theta)]
        g = np.mean(clipped, axis=0) + 0.8 * sigma[t - 1] / 2 * generator.standard_normal(2)
        m = (beta * (1 - beta ** (t - 1)) * m + (1 - beta) * g) / (1 - beta**t)
        theta = theta - 0.5 * m
    assert found.theta == pytest.approx(theta)
    assert found.steps == 6 and found.spent == pytest.approx(2.0)
    early = private_gradient_descent(
        rows, np.ones(2), np.full(10, 2.0), rates=0.1, clip=1.0, budget=1.1, beta=beta,
        generator=np.random.default_rng(1),
    )  # fmt: skip
    assert early.steps == 4 and early.spent == pytest.approx(1.0)  # a budget that ends early


def test_the_last_step_runs():
    """With the printed strict < it would not, whatever the rounding."""
    for steps in (1, 3, 7, 100, 1000):
        for schedule in (None, Exponential(gamma=0.97)):
            sigma = multipliers_for(schedule, steps, 0.3927)
            assert affordable_steps(sigma, 0.3927) == steps
            assert affordable_steps(sigma, 0.3927 * (1 - 1e-8)) == steps - 1
            assert affordable_steps(np.append(sigma, 1e3), 0.3927) == steps
    assert affordable_steps(np.array([0.0001]), 1.0) == 0
    assert affordable_steps(np.ones(5), math.inf) == 5


# ------------------------------------------------------------------ degenerate inputs


def test_limits():
    a = alpha()
    assert contraction(1) == 0.0
    assert multipliers_for(Exponential(gamma=0.5), 1, 0.25) == pytest.approx([2.0])
    assert multipliers_for(Exponential(gamma=1.0), 9, 1.0) == pytest.approx(np.full(9, 3.0))
    nearly = multipliers_for(Exponential(gamma=1 - 1e-12), 9, 1.0)
    assert nearly == pytest.approx(np.full(9, 3.0))
    assert uniform_bound(1, a, 0.0) == dynamic_bound(1, a, 0.0) == a
    assert excess_bound(np.array([R**-0.5]), R, a, 0.0) == pytest.approx(a)
    for bound in (uniform_bound, dynamic_bound):
        assert bound(30, a, 1 - 1e-10) == pytest.approx(bound(30, a, 1.0), rel=1e-6)
    assert uniform_steps(a, 1.0) == 1 / a == pytest.approx(uniform_steps(a, 1 - 1e-12), rel=1e-6)
    assert dynamic_steps(a, 1.0) == 0.0 and dynamic_steps(a, 1 - 1e-12) < 1e-5


def test_long_schedules_do_not_overflow():
    """gamma^(-T/2) = e^810 is beyond floating point; the multipliers are not."""
    sigma = multipliers_for(Exponential(gamma=contraction(20)), 31_600, 1.0)
    assert np.isfinite(sigma).all() and (sigma**-2.0).sum() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="overflows"):
        multipliers_for(Exponential(gamma=0.5), 31_600, 1.0)
    assert np.isfinite(momentum_influence(20_000, 0.9, 0.5)).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: contraction(0.5), "kappa=0.5"),
        (lambda: multipliers_for(None, 0, 1.0), "steps=0"),
        (lambda: multipliers_for(None, 5, 0.0), "budget=0"),
        (lambda: multipliers_for(None, 5, -1.0), "budget=-1"),
        (lambda: affordable_steps(np.ones(2), 0.0), "R=0"),
        (lambda: optimal_multipliers(np.array([0.0, -np.inf]), 1.0), "in step 2"),
        (lambda: optimal_multipliers(np.array([]), 1.0), "steps=0"),
        (lambda: dynamic_steps(0.0, 0.9), "alpha=0"),
        (lambda: PrintedMomentum(gamma=0.9, beta=0.9), "beta < gamma"),
        (lambda: Exponential(gamma=0.0), "gamma=0"),
        (lambda: momentum_influence(5, 0.9, 1.0), "beta=1"),
        (lambda: budget.zcdp_rho(0.0, 1e-5), "epsilon=0"),
        (lambda: budget.tight_budget(1.0, 0.0), "delta=0"),
        (lambda: noise_constant(0, 1.0, 1.0, 1.0, 5, 1.0), "D=0"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("gamma", "beta", "turn"),
    [(0.99, 0.9, 230), (0.95, 0.9, 45), (0.9, 0.5, 7), (0.98, 0.5, 35), (0.999, 0.9, 2302)],
)
def test_the_momentum_schedule_turns_where_the_paper_says(gamma, beta, turn):
    schedule = PrintedMomentum(gamma=gamma, beta=beta)
    assert schedule.turn == turn
    assert [gamma ** (t - 1) >= (1 - beta) / (1 - beta**t) for t in (turn, turn + 1)] == [
        True,
        False,
    ]
    steps, denominator = turn + 50, gamma - beta**2
    c1, c2 = 2 / (gamma * denominator), gamma ** (2 * turn) / denominator
    before = [c1 * gamma ** (steps + t) for t in range(1, turn + 1)]
    after = [gamma ** (turn - 1) * c2 * gamma ** (steps - t) for t in range(turn + 1, steps + 1)]
    influence = schedule.log_influence(steps)
    assert np.exp(influence) == pytest.approx([*before, *after], rel=1e-9)
    noise = schedule.multipliers(1.0, influence)
    assert (np.diff(noise[:turn]) > 0).all() and (np.diff(noise[turn:]) < 0).all()
