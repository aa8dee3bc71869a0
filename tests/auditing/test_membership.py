"""What losses tell of training rows: the attack's figures by hand, and what epsilon permits at most."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_dpzero.auditing.membership import attack, attacks, guesses, largest_area, largest_share


def test_area_and_share_by_hand():
    """Of six pairs the member's score is larger in three, and equal in one."""
    found = attack("", np.array([3.0, 1.0]), np.array([2.0, 0.0, 3.0]))
    assert found.area == pytest.approx(3.5 / 6)
    # at the scores inf, 3, 2, 1, 0
    assert found.curve == pytest.approx(np.array([[0, 1, 2, 2, 3], [0, 1.5, 1.5, 3, 3]]) / 3)
    assert np.trapezoid(found.curve[1], found.curve[0]) == pytest.approx(found.area)
    assert (found.found, found.false_alarms) == (0.5, 2 / 4)  # as many others above, and one more
    assert found.error == pytest.approx(math.sqrt(6 / (12 * 6)))


def test_one_other_row_in_a_hundred_is_called_a_training_row():
    found = attack("", np.arange(500) + 0.5, np.arange(1000.0))
    assert found.false_alarms == 11 / 1001 and found.found == 0
    assert attack("", np.arange(500) + 600.5, np.arange(1000.0)).found == pytest.approx(111 / 500)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.1])
def test_the_permitted_area_is_that_below_the_permitted_shares(epsilon, delta):
    fpr = np.linspace(0, 1, 400_001)
    assert np.trapezoid(largest_share(fpr, epsilon, delta), fpr) == pytest.approx(
        largest_area(epsilon, delta), abs=1e-5
    )


def test_randomized_response_reaches_what_is_permitted():
    """Of a bit that is told truly with probability e^eps / (1 + e^eps), TPR is that, FPR the rest."""
    truth = math.exp(0.7) / (1 + math.exp(0.7))
    assert float(largest_share(1 - truth, 0.7, 0.0)) == pytest.approx(truth)
    below = truth * (1 - truth) / 2 + truth * (truth + 1) / 2  # lines from (0, 0) over it to (1, 1)
    assert below == pytest.approx(largest_area(0.7, 0.0))


def test_rows_that_differ_from_the_start_are_seen_in_the_base_models_loss():
    """Losses of training rows are 1 lower before training too: their fall tells nothing."""
    members, others = np.linspace(0, 1, 50), np.linspace(1.5, 2.5, 50)
    fell, loss, base = attacks([members - 0.2, others - 0.2], [members, others])
    assert abs(fell.area - 0.5) < 0.2 and loss.area == base.area == 1


def test_guesses_of_coins():
    """Of 20 coins three are guessed as "in" and three as "out"; one is wrong on either side."""
    members = np.array([9.0, 8.0, 1.5, *range(5, -2, -1)])
    others = np.array([7.0, 0.5, -8.0, -9.0, *np.linspace(2, 3, 6)])
    names = [b"%d" % i for i in range(20)]
    assert guesses([members, others], [names[:10], names[10:]], units=False) == (4, 6, 20)


def test_ties_are_wrong():
    same, names = np.zeros(10), [b"%d" % i for i in range(20)]
    assert guesses([same, same], [names[:10], names[10:]], units=False) == (0, 6, 20)


@pytest.mark.parametrize(("units", "coins"), [(True, 16), (False, 12)])
def test_rows_of_one_coin(units, coins):
    """Two names of ten stand twice: a unit's rows have their mean, equal rows no coin of their own."""
    names = [[name.encode() for name in side] for side in ("aabbcdefgh", "AABBCDEFGH")]
    members, others = np.arange(10.0), np.arange(10.0)[::-1] - 20
    right, made, found = guesses([members, others], names, units)
    assert (right, made, found) == (2 * int(0.15 * coins), 2 * int(0.15 * coins), coins)
