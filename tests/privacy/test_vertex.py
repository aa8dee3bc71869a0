"""Vertex draws: their distribution, what they cost, and that the scores stay hidden."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.dp_event import ZCDpEvent
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from scipy import stats
from scipy.optimize import brentq

from hf_dpzero.privacy.mechanisms.vertex import (
    ROUNDING,
    HiddenScores,
    VertexDraw,
    draws_epsilon,
    total_rho,
    zcdp_epsilon,
    zcdp_rho,
)
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise

DRAWS = 6_000
FALSE_ALARM = 1e-7
SCORES = np.array([0.3, -1.2, 1.7, 0.0, -0.4, 1.1])


def softmax(scores):
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()


def hidden(scores):
    made = HiddenScores(len(scores), 0.1, 100.0)
    made.add_(np.asarray(scores, dtype=float))
    return made


@pytest.mark.false_alarm(1e-7)
@pytest.mark.parametrize("source", [SecureNoise(), InsecureSeededNoise(5)], ids=lambda s: s.name)
def test_draws_follow_the_softmax_and_no_other_temperature(source):
    counts = np.bincount(hidden(SCORES).draw(DRAWS, source, 0), minlength=6)
    assert stats.chisquare(counts, DRAWS * softmax(SCORES)).pvalue > FALSE_ALARM
    for wrong in (2 / 3, 3 / 2, 0.0, -1.0):
        assert stats.chisquare(counts, DRAWS * softmax(wrong * SCORES)).pvalue < 1e-12


@pytest.mark.false_alarm(2e-7)  # two shifts
def test_a_large_common_shift_and_hopeless_vertices_change_nothing():
    for shift in (0.0, 2.0**40):
        scores = np.array([0.0, 1.0, -2000.0]) + shift
        counts = np.bincount(SecureNoise().vertices(scores, 4000, 0, 0), minlength=3)
        assert counts[2] == 0
        assert stats.binomtest(int(counts[1]), 4000, math.e / (1 + math.e)).pvalue > FALSE_ALARM


@pytest.mark.false_alarm(4e-9)  # 6 deviations, twice
def test_draws_of_a_call_and_of_two_calls_are_independent():
    made = hidden(np.zeros(2))
    first, second = (made.draw(DRAWS, SecureNoise(), 0) for _ in range(2))
    for a, b in ((first, second), (first[:-1], first[1:])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / math.sqrt(DRAWS)


def test_secure_draws_ignore_seeds_and_steps_and_seeded_ones_follow_them():
    made, seeded, draws = hidden(np.zeros(50)), InsecureSeededNoise(3), []
    for _ in range(2):
        np.random.seed(0)
        draws.append(made.draw(40, SecureNoise(), 0).tolist())
    assert draws[0] != draws[1]
    assert made.draw(40, seeded, 1).tolist() == made.draw(40, seeded, 1).tolist()
    assert made.draw(40, seeded, 1).tolist() != made.draw(40, seeded, 2).tolist()
    assert made.draw(40, seeded, 1, 0).tolist() != made.draw(40, seeded, 1, 1).tolist()


def test_one_vertex_and_no_draws():
    assert HiddenScores(1, 0.1, 1.0).draw(3, SecureNoise(), 0).tolist() == [0, 0, 0]
    assert hidden(SCORES).draw(0, SecureNoise(), 0).tolist() == []


# --- accounting


def exact_epsilon(p, q, count, delta):
    """Smallest epsilon of `count` draws from Bernoulli(p) against Bernoulli(q), both ways, by sums."""
    k = np.arange(count + 1)
    log_p, log_q = (stats.binom.logpmf(k, count, value) for value in (p, q))

    def excess(epsilon):
        def divergence(a, b):
            return np.sum(np.exp(a) * np.maximum(0, -np.expm1(np.minimum(epsilon + b - a, 0))))

        return max(divergence(log_p, log_q), divergence(log_q, log_p)) - delta

    return brentq(excess, 0, count * 10.0) if excess(0) > 0 else 0.0


@pytest.mark.parametrize("sensitivity", [1e-3, 0.02, 0.3])
@pytest.mark.parametrize("count", [1, 30, 1000])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_epsilon_is_never_below_the_privacy_loss_and_not_far_above(sensitivity, count, delta):
    """Two vertices; one example moves one score up and the other down by Delta."""
    draw = VertexDraw(sensitivity=sensitivity)
    claimed = draws_epsilon([(draw, count)], delta)
    exact = max(
        exact_epsilon(*(softmax(np.array([s, 0.0]) + d)[0] for d in moves), count, delta)
        for s in (-2.0, 0.0, 1.0)
        for moves in ((np.zeros(2), np.array([sensitivity, -sensitivity])),)
    )
    assert exact <= claimed
    if exact > 0.1:
        assert claimed < 1.35 * exact
    assert draws_epsilon([(draw, count)], 0.0) == pytest.approx(2 * sensitivity * count, rel=1e-5)


def test_a_draw_states_its_range():
    """The log likelihood ratio of random neighbours stays in the stated range, and attains it."""
    rng, delta, widest = np.random.default_rng(0), 0.2, {True: 0.0, False: 0.0}
    for trial in range(2000):
        one_sided = trial % 2 == 0
        scores = rng.normal(size=4) * rng.choice([0.1, 1, 10])
        moves = delta * rng.choice([0.0, 1.0] if one_sided else [-1.0, 1.0], size=4)
        ratio = np.log(softmax(scores + moves) / softmax(scores))
        stated = VertexDraw(sensitivity=delta, one_sided=one_sided)
        assert np.ptp(ratio) <= stated.score_range and np.abs(ratio).max() <= stated.pure_epsilon
        widest[one_sided] = max(widest[one_sided], np.ptp(ratio))
    assert widest[True] == pytest.approx(delta) and widest[False] == pytest.approx(2 * delta)


def test_an_average_of_softmaxes_keeps_the_pure_epsilon_but_not_the_range():
    """Vertices 0 and 1 rise and fall; two iterates with mass on one and the other stretch the range."""
    delta = 0.2
    moves = np.array([delta, delta, -delta, -delta])
    iterates = np.array([[0.0, -30.0, -30.0, -30.0], [-30.0, -30.0, 0.0, -30.0]])
    one, other = (np.mean([softmax(s) for s in iterates + m], axis=0) for m in (0 * moves, moves))
    assert np.abs(np.log(other / one)).max() <= 2 * delta
    rng, widest = np.random.default_rng(1), 0.0
    for _ in range(3000):
        iterates = rng.normal(size=(2, 4)) * 8
        one, other = (np.mean([softmax(s) for s in iterates + m], axis=0) for m in (0, moves))
        ratio = np.log(other / one)
        assert np.abs(ratio).max() <= 2 * delta + 1e-12
        widest = max(widest, np.ptp(ratio))
    assert 2 * delta < widest + 1e-9 <= 4 * delta
    last, averaged = (VertexDraw(sensitivity=delta, averaged=a) for a in (False, True))
    assert averaged.rho == pytest.approx(4 * last.rho) and averaged.rho > (2 * delta) ** 2 / 2


def test_zcdp_is_between_the_gaussian_it_covers_and_the_simple_formula():
    for rho in (1e-6, 1e-3, 0.02, 0.5, 20.0):
        for delta in (1e-4, 1e-9):
            gaussian = get_epsilon_gaussian(1 / math.sqrt(2 * rho), delta)
            simple = rho + 2 * math.sqrt(rho * math.log(1 / delta))
            assert gaussian <= zcdp_epsilon(rho, delta) <= simple
    assert zcdp_epsilon(0.0, 1e-6) == 0.0 and zcdp_epsilon(1.0, 0.0) == math.inf


@pytest.mark.parametrize("epsilon", [1e-3, 0.5, 1.0, 8.0])
def test_the_calibrated_rho_spends_the_epsilon(epsilon):
    rho = zcdp_rho(epsilon, 1e-6)
    assert 0.999999 * epsilon < zcdp_epsilon(rho, 1e-6) <= epsilon
    root = math.sqrt(math.log(1e6))
    assert rho >= (math.sqrt(epsilon + root**2) - root) ** 2


def test_costs_add_up_with_other_releases():
    a, b = VertexDraw(sensitivity=0.01), VertexDraw(sensitivity=0.02, one_sided=True)
    # both ranges are 0.02
    assert total_rho([(a, 3), (b, 4)]) == pytest.approx(7 * 0.02**2 / 8 * (1 + ROUNDING) ** 2)
    accountant = rdp.RdpAccountant().compose(ZCDpEvent(rho=total_rho([(a, 3), (b, 4)])))
    assert accountant.get_epsilon(1e-5) >= zcdp_epsilon(total_rho([(a, 3), (b, 4)]), 1e-5) > 0
    assert draws_epsilon([], 1e-6) == draws_epsilon([(VertexDraw(sensitivity=0.0), 9)], 1e-6) == 0


# --- hidden scores


def test_rounding_stays_within_the_margin_after_many_increments():
    """Neighbours whose first increments differ by Delta, then a thousand common ones."""
    rng, delta = np.random.default_rng(2), 3.7e-4
    common = rng.normal(size=(1000, 3))
    for _ in range(20):
        one, other = (HiddenScores(3, delta, 1e4) for _ in range(2))
        start = rng.normal(size=3)
        one.add_(start)
        other.add_(start + delta * np.array([1, -1, rng.uniform(-1, 1)]))
        for increment in common:
            one.add_(increment)
            other.add_(increment)
        moved = (other._levels - one._levels) * one._grid  # the test may look
        assert np.abs(moved).max() <= delta * (1 + ROUNDING)
        assert np.ptp(moved) <= VertexDraw(sensitivity=delta).score_range
    total = start + common.sum(axis=0)
    np.testing.assert_allclose(one._levels * one._grid, total, atol=1e-6)


@pytest.mark.false_alarm(0)  # a seed
def test_scores_are_cut_off_at_the_public_bound():
    made = HiddenScores(2, 0.01, 1.0)
    made.add_(np.array([50.0, -50.0]))
    counts = np.bincount(made.draw(DRAWS, InsecureSeededNoise(0), 0), minlength=2)
    assert stats.chisquare(counts, DRAWS * softmax(np.array([1.0, -1.0]))).pvalue > FALSE_ALARM


def test_hidden_scores_have_no_public_attribute_no_numbers_in_text_and_no_copies():
    made = hidden([123.456, -7.0])
    assert {name for name in dir(made) if not name.startswith("_")} == {"add_", "draw"}
    assert repr(made) == str(made) == "HiddenScores(dimension=2)"
    assert not hasattr(made, "__dict__")
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="secret"):
            copied(made)
