"""Saddle points by mirror descent on vertices: the algorithms, what they cost, their parameters."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

from hf_dpzero.papers import saddle_point
from hf_dpzero.papers.saddle_point import bias_reduced, clip_coordinates, mean_vertex, solve
from hf_dpzero.papers.saddle_point_parameters import (
    Problem,
    anytime,
    bias_reduced_descent,
    mirror_descent,
)
from hf_dpzero.papers.saddle_point_plans import (
    AnytimePlan,
    BiasReducedPlan,
    MirrorDescentPlan,
    draw_levels,
    level_factor,
    level_probabilities,
)
from hf_dpzero.privacy.mechanisms.vertex import ROUNDING, HiddenAverage, HiddenScores, zcdp_rho
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise

DELTA = 1e-6
BASE = MirrorDescentPlan(
    num_examples=30, dimensions=(3, 4), lipschitz=1.0, step_size=0.3, steps=7, vertices=2
)


VALUES = {"num_examples": 99, "lipschitz": 1.0, "step_size": 0.1}


def by_levels(levels=(0, 2, 1), max_level=2, batch_factor=0.5, **changes):
    """A plan of Algorithm 3."""
    law = {"levels": levels, "max_level": max_level, "batch_factor": batch_factor}
    return BiasReducedPlan(**{**VALUES, "dimensions": (2, 2), **law, **changes})


def averaging(**changes):
    """A plan of Algorithm 4."""
    counts = {"steps": 9, "vertices": 5, "refresh": 2}
    return AnytimePlan(**{**VALUES, "dimensions": (2, 1), **counts, **changes})


class Fixed:
    """An oracle with random gradients times (1 + x_0) / 2, or with a function's."""

    def __init__(self, num_examples, dimensions, gradients=None):
        self.num_examples, self.dimensions, self.seen = num_examples, dimensions, []
        draw = np.random.default_rng(7)
        self.parts = [draw.uniform(-1, 1, (num_examples, d)) for d in dimensions]
        self.function = gradients

    def gradients(self, x, y, examples):
        self.seen.append((x.copy(), y.copy(), examples.tolist()))
        if self.function is not None:
            return self.function(x, y, examples)
        return tuple(part[examples] * (1 + x[0]) / 2 for part in self.parts)


def softmax(scores):
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()


def problem(**changes):
    values = {"num_examples": 10_000, "dimensions": (50, 50), "epsilon": 0.9, "delta": DELTA}
    return Problem(**{**values, **changes})


# --- Maurey's sparsification and Algorithm 2


def expectation(weights, count, value):
    """E of value(vertices) over `count` independent vertices, by enumeration."""
    return sum(
        np.prod(weights[list(v)]) * np.asarray(value(np.array(v)))
        for v in itertools.product(range(len(weights)), repeat=count)
    )


@pytest.mark.parametrize("max_level", [0, 1])
def test_algorithm_2_has_the_mean_of_the_largest_level(max_level):
    """By enumeration of N and of all vertices, for a gradient that is cubic in x and y."""
    draw = np.random.default_rng(1)
    a, b = draw.normal(size=(2, 2)), draw.normal(size=(2, 2))
    x, y = draw.dirichlet(np.ones(2)), draw.dirichlet(np.ones(2))

    def gradient(u, v):
        return (a @ v) ** 2 * (b @ u), (b.T @ u) ** 3 - a.T @ v

    joint = np.outer(x, y).ravel()  # a pair of vertices each time

    def pairs(v):
        return v // 2, v % 2

    def estimate(v):
        return np.concatenate(bias_reduced(gradient, pairs(v), (2, 2), max_level))

    def plain(v):
        return np.concatenate(gradient(*(mean_vertex(w, 2) for w in pairs(v))))

    found = sum(
        p * expectation(joint, 2 ** (level + 1), estimate)
        for level, p in enumerate(level_probabilities(max_level))
    )
    np.testing.assert_allclose(found, expectation(joint, 2 ** (max_level + 1), plain), atol=1e-12)


@pytest.mark.false_alarm(0)  # a seed
def test_levels_have_their_law_and_stop_as_algorithm_3_says():
    for max_level in (0, 1, 5, 11):
        probabilities = level_probabilities(max_level)
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-14)
        assert 1.0 <= level_factor(max_level) < 2.0  # not in [1/2, 1]
        mean = probabilities @ 2.0 ** np.arange(max_level + 1)
        assert mean == pytest.approx((max_level + 1) / level_factor(max_level))
    draw = np.random.default_rng(5)
    for _ in range(200):
        levels = draw_levels(40.0, 2, draw)
        spent = [2**level for level in levels]
        assert sum(spent[:-1]) <= 40 - 4 < sum(spent) <= 40
    counts = np.bincount(draw_levels(20_000.0, 3, draw), minlength=4)
    assert stats.chisquare(counts, counts.sum() * level_probabilities(3)).pvalue > 1e-7


# --- the algorithms, written out


def test_algorithm_1_is_the_algorithm_written_out():
    oracle, noise = Fixed(30, (3, 4)), InsecureSeededNoise(2)
    found = solve(oracle, BASE, noise)
    scores, sums = [np.zeros(3), np.zeros(4)], [np.zeros(3), np.zeros(4)]
    for t in range(7):
        drawn = [noise.vertices(s, 3, t, part) for part, s in enumerate(scores)]
        for total, vertices in zip(sums, drawn):
            total[vertices[2]] += 1 / 7
        x, y = (np.bincount(v[:2], minlength=d) / 2 for v, d in zip(drawn, (3, 4)))
        batch = list(range(4 * t, 4 * t + 4))  # B = floor(30 / 7), two examples are left over
        assert oracle.seen[t][2] == batch
        np.testing.assert_array_equal(oracle.seen[t][0], x)
        np.testing.assert_array_equal(oracle.seen[t][1], y)
        gx, gy = (part[batch].mean(axis=0) * (1 + x[0]) / 2 for part in oracle.parts)
        scores = [scores[0] - 0.3 * gx, scores[1] + 0.3 * gy]
    np.testing.assert_allclose(found.x, sums[0])
    np.testing.assert_allclose(found.y, sums[1])
    assert found.x.sum() == pytest.approx(1) and set(np.unique(found.x * 7)) <= set(range(8))


def test_algorithm_3_is_the_algorithm_written_out():
    plan = by_levels(num_examples=40, dimensions=(3, 4), step_size=0.2, batch_factor=0.3)
    assert plan.batch_sizes == (4, 14, 7)
    oracle, noise = Fixed(40, (3, 4)), InsecureSeededNoise(4)
    found = solve(oracle, plan, noise)
    scores, sums = [np.zeros(3), np.zeros(4)], [np.zeros(3), np.zeros(4)]
    start, factor = 0, 1.75
    for t, (level, size) in enumerate(zip(plan.levels, plan.batch_sizes)):
        count = 2 ** (level + 1)
        drawn = [noise.vertices(s, count + 1, t, part) for part, s in enumerate(scores)]
        for total, vertices in zip(sums, drawn):
            total[vertices[-1]] += 1 / 3
        batch = np.arange(start, start + size)
        start += size

        def mean(player, k, drawn=drawn, batch=batch):
            x0 = np.mean(drawn[0][:k] == 0)
            return oracle.parts[player][batch].mean(axis=0) * (1 + x0) / 2

        steps = []
        for player in (0, 1):
            difference = mean(player, count) - mean(player, count // 2)
            steps.append(factor * 2**level * difference + mean(player, 1))
        scores = [scores[0] - 0.2 * steps[0], scores[1] + 0.2 * steps[1]]
    np.testing.assert_allclose(found.x, sums[0])
    np.testing.assert_allclose(found.y, sums[1])


def test_algorithm_4_refreshes_and_averages_as_written():
    plan = averaging(num_examples=90, dimensions=(3, 1), step_size=0.4)
    assert [plan.refreshes(t) for t in range(1, 10)] == [t in (1, 2, 4, 6, 8) for t in range(1, 10)]
    oracle, noise = Fixed(90, (3, 1)), InsecureSeededNoise(6)
    found = solve(oracle, plan, noise)
    scores, times = np.zeros(3), []

    def drawn(step):
        chosen, vertices = noise.uniform(len(times), 5, step), np.zeros(5, int)
        for part, time in enumerate(sorted(set(chosen.tolist())), start=1):
            at = chosen == time
            vertices[at] = noise.vertices(times[time], int(at.sum()), step, part)
        return np.bincount(vertices, minlength=3) / 5

    for t in range(1, 10):
        times.append(scores.copy())
        if plan.refreshes(t):
            point = drawn(t)
        np.testing.assert_array_equal(oracle.seen[t - 1][0], point)
        mean = oracle.parts[0][10 * (t - 1) : 10 * t].mean(axis=0)
        scores = scores - 0.4 * mean * (1 + point[0]) / 2
    np.testing.assert_allclose(found.x, drawn(10))
    assert found.y.tolist() == [1.0]


@pytest.mark.false_alarm(1e-7)
def test_an_average_of_softmaxes_is_drawn_from_with_secure_draws():
    iterates, average = [np.array([2.0, 0, 0]), np.array([0, 0, 3.0])], HiddenAverage()
    with pytest.raises(ValueError, match="nothing"):
        average.draw(1, SecureNoise(), 0)
    scores = HiddenScores(3, 0.1, 10.0)
    for before, now in itertools.pairwise([np.zeros(3), *iterates]):
        scores.add_(now - before)
        average.add_(scores)
    counts = np.bincount(average.draw(3000, SecureNoise(), 0), minlength=3)
    expected = 3000 * np.mean([softmax(s) for s in iterates], axis=0)
    assert stats.chisquare(counts, expected).pvalue > 1e-7
    only_last = 3000 * softmax(iterates[1])
    assert stats.chisquare(counts, only_last).pvalue < 1e-30
    assert repr(average) == "HiddenAverage(times=2)"
    with pytest.raises(TypeError, match="secret"):
        pickle.dumps(average)


# --- what an example can move, and what it costs


class Adversary(Fixed):
    """One example, `first`, whose gradients have a sign of their own at each point of a step."""

    def __init__(self, first, signs):
        super().__init__(20, (3, 2))
        self.first, self.signs, self.asked = first, signs, 0

    def gradients(self, x, y, examples):
        rows = tuple(np.zeros((len(examples), d)) for d in self.dimensions)
        if self.first in examples:
            for row in rows:
                row[examples == self.first] = self.signs[self.asked]
            self.asked += 1
        return rows


@pytest.mark.parametrize(
    "plan",
    [
        MirrorDescentPlan(
            num_examples=20, steps=4, vertices=2, dimensions=(3, 2), lipschitz=2.0, step_size=0.5
        ),
        by_levels((1, 0), 1, 0.3, num_examples=20, dimensions=(3, 2), lipschitz=2.0, step_size=0.5),
    ],
    ids=["1", "3"],
)
def test_the_sensitivity_of_each_increment_is_attained_and_never_exceeded(plan, monkeypatch):
    """All signs of an example's gradients at +, - and 0, beyond L0: they are clipped."""
    moves = []
    monkeypatch.setattr(saddle_point, "_step", lambda plan, hidden, g: moves.append(g))

    def increments(first, signs):
        moves.clear()
        solve(Adversary(first, 9.0 * np.array(signs)), plan, InsecureSeededNoise(0))
        return [plan.step_size * np.concatenate(m) for m in moves]

    for step in range(len(plan.batch_sizes)):
        first, largest = sum(plan.batch_sizes[:step]), 0.0
        for one, other in itertools.product(itertools.product((-1, 1), repeat=3), repeat=2):
            pairs = zip(increments(first, one), increments(first, other))
            change = [np.abs(a - b).max() for a, b in pairs]
            assert sum(change) == change[step] <= plan.increments[step] * (1 + 1e-12)
            largest = max(largest, change[step])
        assert largest == pytest.approx(plan.increments[step])
    # (4 C_M + 2 / 2^N) tau alpha L0: above the paper's 4.5 at every level, at most 10
    for max_level, level in ((0, 0), (1, 0), (1, 1), (10, 0), (10, 10)):
        one = by_levels((level,), max_level, num_examples=2**12, step_size=1.0)
        expected = (4 * level_factor(max_level) + 2 * 2.0**-level) * 0.5
        assert one.increments[0] == pytest.approx(expected) and 2.25 < expected <= 5


def test_vertices_after_a_batch_are_counted_for_both_players():
    assert BASE.vertices_after() == tuple(2 * 3 * later for later in range(6, -1, -1))
    one = dataclasses.replace(BASE, dimensions=(1, 4))
    assert one.vertices_after()[0] == 3 * 6
    assert by_levels().vertices_after() == (2 * (9 + 5), 2 * 5, 0)
    # refreshes at 1, 2, 4, 6, 8 and K for the output: Proposition F.1's statement leaves these out
    expected = [4 + 1, 3 + 1, 3 + 1, 2 + 1, 2 + 1, 1 + 1, 1 + 1, 0 + 1, 0]
    assert averaging().vertices_after() == tuple(5 * count for count in expected)


def exact_epsilon(p, q, count, delta):
    """Smallest epsilon of `count` draws from Bernoulli(p) against Bernoulli(q)."""
    k = np.arange(count + 1)
    logs = [stats.binom.logpmf(k, count, value) for value in (p, q)]

    def excess(epsilon):
        return (
            max(
                np.sum(np.exp(a) * np.maximum(0, -np.expm1(np.minimum(epsilon + b - a, 0))))
                for a, b in (logs, logs[::-1])
            )
            - delta
        )

    return brentq(excess, 0, 50.0 + 10 * count) if excess(0) > 0 else 0.0


@pytest.mark.parametrize("step_size", [0.01, 0.1, 0.5])
def test_epsilon_is_never_below_the_loss_of_a_whole_run(step_size):
    """An example of the first batch with gradients (L0, -L0) or (-L0, L0); the others have zeros.

    After the first step the scores of both players stay put: all later draws are Bernoulli.
    """
    plan = dataclasses.replace(BASE, dimensions=(2, 2), step_size=step_size)
    move = step_size / plan.batch_sizes[0]
    p, q = (softmax(np.array([sign * move, -sign * move]))[0] for sign in (1, -1))
    drawn = 2 * (plan.vertices + 1) * (plan.steps - 1)
    assert plan.vertices_after()[0] == drawn
    for delta in (1e-2, 1e-6):
        exact = exact_epsilon(p, q, drawn, delta)
        assert exact <= plan.epsilon(delta)
        if exact > 0.05:
            assert plan.epsilon(delta) < 1.6 * exact


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 5.0])
def test_the_calibrated_step_size_spends_epsilon_and_is_the_closed_form(epsilon):
    plan = dataclasses.replace(BASE, num_examples=3000, steps=100, vertices=4)
    tau = plan.largest_step_size(epsilon, DELTA)
    draws = 2 * 99 * 5
    closed = 30 / 4 * math.sqrt(8 * zcdp_rho(epsilon, DELTA) / draws)
    assert tau == pytest.approx(closed, rel=2 * ROUNDING)
    spent = dataclasses.replace(plan, step_size=tau).epsilon(DELTA)
    assert 0.99999 * epsilon < spent <= epsilon
    assert plan.calibrated(1e3, DELTA) is plan
    change = dataclasses.replace  # a single step costs nothing, and no step size neither
    one = change(BASE, steps=1)
    assert one.epsilon(DELTA) == 0 and one.largest_step_size(1.0, DELTA) == math.inf
    for free in ({"step_size": 0.0}, {"dimensions": (1, 1)}):
        assert change(BASE, **free).epsilon(DELTA) == 0
    assert change(BASE, step_size=1e-3).epsilon(0.0) == pytest.approx(36 * 1e-3, rel=1e-5)


def test_the_papers_step_size_is_2_8_times_smaller_and_costs_less_than_it_says():
    """With the closed form of rho; the optimal conversion of zCDP adds a sixth."""
    paper = mirror_descent(problem(), calibration="paper")
    root = math.sqrt(2 * paper.steps * 2 * math.log(1e6))
    assert paper.step_size == pytest.approx(paper.batch_sizes[0] * 0.9 / (8 * root))
    log = math.log(1e6)
    rho = (math.sqrt(0.9 + log) - math.sqrt(log)) ** 2
    closed = paper.batch_sizes[0] / 4 * math.sqrt(8 * rho / (2 * paper.steps * 2))
    assert closed / paper.step_size == pytest.approx(2.8, abs=0.03)
    better = mirror_descent(problem()).step_size / paper.step_size
    assert better == pytest.approx(3.3, abs=0.05)
    assert paper.epsilon(DELTA) == pytest.approx(0.2524, abs=0.002)


# --- parameters of the theorems


def test_parameters_are_the_theorems():
    n, log, ell = 10_000, math.log(1e6), 2 * math.log(50)
    plan = mirror_descent(problem(epsilon=50.0))
    assert plan.steps == n and plan.vertices == 1  # T = min(n, ..)
    plan = mirror_descent(problem(), "bilinear")
    assert plan.steps == math.floor(9000 / math.sqrt(ell * log)) and plan.vertices == 1
    plan = mirror_descent(problem(), "second")
    assert plan.steps == math.floor((9000 / (ell**0.25 * math.sqrt(log))) ** 0.8)
    assert plan.vertices == math.ceil(math.sqrt(plan.steps / ell))
    plan = mirror_descent(problem(), "first")
    assert plan.steps == math.floor(9000 ** (2 / 3) / log ** (1 / 3))
    assert plan.vertices == math.ceil(plan.steps / ell)
    free = mirror_descent(problem(num_examples=1000, epsilon=1e4), "first")
    assert free.step_size == pytest.approx(math.sqrt(2 * ell / (5 * 1000)))

    line = problem(dimensions=(200, 1), num_examples=100_000, lipschitz=2.0)
    ld = math.log(200)
    made = anytime(line, "second")
    assert made.steps == math.floor(90_000 / (ld * math.sqrt(log)))
    assert made.vertices == math.ceil(math.sqrt(made.steps * ld))
    assert made.refresh == math.floor(math.sqrt(made.steps / ld))
    assert made.step_size <= 1 / (8 * made.refresh * 2.0) and made.epsilon(DELTA) <= 0.9
    made = anytime(line, "first")
    assert made.steps == math.floor(90_000**0.8 / (ld * log) ** 0.4)
    assert made.vertices == math.ceil(made.steps / ld)
    assert made.refresh == math.floor(math.sqrt(made.steps) / ld)


def test_algorithm_3s_parameters_are_the_theorems():
    draw = np.random.default_rng(0)
    given = problem(num_examples=10**6, dimensions=(20, 20), second_order=2.0, smoothness=0.5)
    ell, log = 2 * math.log(20), math.log(1e6)
    size = math.sqrt(1 + 4 + ell / 4)
    budget = 9e5 * size / math.sqrt(4 * 48 * 81 * ell * log)
    paper = bias_reduced_descent(given, draw, "paper")
    assert paper.max_level == math.floor(math.log2(math.sqrt(budget)))
    assert paper.step_size == pytest.approx(math.sqrt(ell / budget) / size)
    alpha = (2 * 0.81 / (48 * 81 * log * paper.step_size**2 * 1e6)) ** (1 / 3)
    assert paper.batch_factor == pytest.approx(alpha)
    assert budget - 2**paper.max_level < sum(2**level for level in paper.levels) <= budget
    made = bias_reduced_descent(given, draw)
    assert len(made.levels) > 2 * len(paper.levels)
    assert 0.5 < made.epsilon(DELTA) <= 0.9 and sum(made.batch_sizes) <= 10**6


def test_small_problems_round_to_one_and_one_vertex_is_refused():
    tiny = problem(num_examples=3, epsilon=0.1)
    for made in (mirror_descent(tiny, s) for s in ("bilinear", "second", "first")):
        assert (made.steps, made.vertices) == (1, 1)
    made = anytime(dataclasses.replace(tiny, dimensions=(5, 1)))
    assert (made.steps, made.refresh) == (1, 1) and made.epsilon(DELTA) == 0
    with pytest.raises(ValueError, match="one point and log d = 0"):
        problem(dimensions=(1, 1))
    half = mirror_descent(problem(dimensions=(50, 1)))  # one player: twice the cost of none
    assert half.epsilon(DELTA) <= 0.9


# --- gradients out of bounds, secrets, refusals


def test_gradients_are_clipped_by_coordinates_and_what_is_not_finite_counts_as_zero():
    rows = np.array([[5.0, -5.0, 0.5], [np.nan, 1.0, 1.0], [np.inf, 0.0, 0.0]])
    expected = [[2.0, -2.0, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert clip_coordinates(rows, 2.0).tolist() == expected

    def wild(x, y, examples):
        return tuple(np.full((len(examples), d), v) for d, v in ((3, np.nan), (4, -1e300)))

    found = solve(Fixed(30, (3, 4), wild), BASE, InsecureSeededNoise(0))
    assert np.isfinite(found.x).all() and np.isfinite(found.y).all()


def test_what_neighbours_share_cancels_exactly():
    """Half a million rows, one of them replaced: the means differ by the change over b, to 2^-30."""
    size, draw = 500_000, np.random.default_rng(0)
    plan = dataclasses.replace(BASE, num_examples=size, steps=1)
    rows = draw.uniform(-1, 1, (size, 4))

    def mean(first):
        given = np.concatenate([[np.full(4, first)], rows[1:]])
        oracle = Fixed(size, (3, 4), lambda x, y, examples: (given[:, :3], given))
        return saddle_point.batch_gradient(plan, oracle, np.ones(3), np.ones(4), np.arange(size))[1]

    change = (mean(1.0) - mean(-1.0)) * size / 2
    assert np.abs(change - 1).max() < 1e-9  # plain sums are off by more, and by the order
    assert np.abs(mean(0.0) - rows[1:].sum(axis=0) / size).max() < 2.0**-30


def test_a_solution_shows_vertices_and_nothing_of_the_iterates():
    found = solve(Fixed(30, (3, 4)), BASE)
    shown = {name for name in dir(found) if not name.startswith("_")}
    assert shown == {"epsilon", "noise", "plan", "private", "x", "y"}
    assert found.private and found.epsilon(DELTA) == BASE.epsilon(DELTA)
    assert np.allclose(found.x * 7, np.round(found.x * 7))  # vertices only
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again.x, found.x)
    seeded = solve(Fixed(30, (3, 4)), BASE, InsecureSeededNoise(1))
    assert not seeded.private and seeded.epsilon(DELTA) == math.inf
    assert "NOT_PRIVATE" in seeded.noise
    results = set()
    for _ in range(3):  # secure runs differ, whatever the seeds
        np.random.seed(0)
        results.add(solve(Fixed(30, (3, 4)), BASE).x.tobytes())
    assert len(results) > 1
    one = solve(Fixed(30, (1, 4)), dataclasses.replace(BASE, dimensions=(1, 4)))
    assert one.x.tolist() == [1.0] and one.y.sum() == pytest.approx(1.0)


def test_impossible_settings_are_refused():
    change = dataclasses.replace
    levels = {"levels": (0,), "max_level": 0, "batch_factor": 0.5}
    shared = {"num_examples": 30, "dimensions": (3, 4), "lipschitz": 1.0, "step_size": 0.3}
    rows = Fixed(30, (3, 4), lambda x, y, e: (np.zeros(3), np.zeros(4)))
    line = {**shared, "dimensions": (3, 1)}
    for make, message in (
        (lambda: change(BASE, steps=31), "take fewer steps"),
        (lambda: change(BASE, steps=0), "steps=0"),
        (lambda: change(BASE, num_examples=1 << 23, steps=1), "take more steps"),
        (lambda: change(BASE, vertices=0), "vertices=0"),
        (lambda: change(BASE, vertices=0.5), "vertices=0.5"),
        (lambda: change(BASE, dimensions=(0, 4)), "dimensions"),
        (lambda: change(BASE, lipschitz=0.0), "lipschitz=0.0"),
        (lambda: change(BASE, step_size=math.nan), "step_size=nan"),
        (lambda: AnytimePlan(steps=2, vertices=1, refresh=1, **shared), r"\(d, 1\)"),
        (lambda: AnytimePlan(steps=2, vertices=1, refresh=0, **line), "refresh=0"),
        (lambda: BiasReducedPlan(**shared, **{**levels, "levels": ()}), "levels"),
        (lambda: BiasReducedPlan(**shared, **{**levels, "levels": (1,)}), "levels"),
        (lambda: BiasReducedPlan(**shared, **{**levels, "batch_factor": 0.0}), "alpha"),
        (lambda: BiasReducedPlan(**shared, **{**levels, "batch_factor": 0.01}), "fewer steps"),
        (lambda: draw_levels(3.9, 0, np.random.default_rng(0)), "at least 4"),
        (lambda: draw_levels(8.0, 4, np.random.default_rng(0)), "Algorithm 1"),
        (lambda: bias_reduced_descent(problem(), np.random.default_rng(0)), None),
        (lambda: bias_reduced_descent(problem(num_examples=99), np.random.default_rng(0)), "U="),
        (lambda: bias_reduced(None, (np.zeros(3), np.zeros(3)), (2, 2), 5), r"2\^\(N \+ 1\)"),
        (lambda: bias_reduced(None, (np.zeros(4), np.zeros(2)), (2, 2), 5), "of each player"),
        (lambda: bias_reduced(None, (np.zeros(8), np.zeros(8)), (2, 2), 1), "N <= 1"),
        (lambda: solve(Fixed(29, (3, 4)), BASE), "make the plan for this oracle"),
        (lambda: solve(rows, BASE), "not their mean"),
        (lambda: mirror_descent(problem(), "third"), "smoothness='third'"),
        (lambda: anytime(problem(dimensions=(5, 1)), "third"), "smoothness='third'"),
        (lambda: mirror_descent(problem(epsilon=1.0), calibration="paper"), "epsilon < 1"),
        (lambda: anytime(problem(epsilon=2.0, dimensions=(5, 1)), calibration="paper"), "zCDP"),
        (lambda: problem(delta=1.0), "delta=1.0"),
        (lambda: problem(epsilon=0.0), "epsilon=0.0"),
        (lambda: problem(lipschitz=0.0), "lipschitz"),
    ):
        if message is None:
            make()
            continue
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="none of the plans"):
        solve(Fixed(30, (3, 4)), SomePlan(**shared))


class SomePlan(saddle_point.Plan):
    batch_sizes = (30,)
    increments = (0.0,)

    def vertices_after(self):
        return (0,)
