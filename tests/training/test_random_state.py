"""Global generators inside `isolated_randomness`: another state, all of the entropy, and back again."""

from __future__ import annotations

import random

import numpy as np
import torch

from hf_dpzero.estimators.random_state import drawing_from, isolated_randomness


def draws() -> tuple[float, ...]:
    """One number of each global generator."""
    return float(torch.rand(1)), float(np.random.rand()), random.random()


def inside(seed: int | None = None) -> tuple[float, ...]:
    with isolated_randomness(seed):
        return draws()


def test_outside_generators_go_on_as_if_nothing_had_been_drawn():
    """Numpy's also keeps the second normal of a pair."""

    def drawn(between: bool) -> list[float]:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        first = float(np.random.normal())
        if between:
            inside()
        return [first, float(np.random.normal()), *draws()]

    assert drawn(between=True) == drawn(between=False)


def test_equal_seeds_draw_alike_and_others_do_not():
    assert inside(5) == inside(5)
    for other in (6, 5 + 2**64, 5 + 2**100):  # no part of the entropy is dropped
        assert not set(inside(5)) & set(inside(other))


def test_without_a_seed_all_are_new_each_time():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    seen = [inside() for _ in range(3)]
    assert all(len(set(of_one)) == 3 for of_one in zip(*seen, strict=True))
    with drawing_from(7):
        given = inside()
    assert given == inside(7)
