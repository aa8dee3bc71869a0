"""Averaged clipping: attained sensitivities, calibration, the algorithms written out."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from scripts.studies.averaged_clipping import algorithm as averaged_clipping
from scripts.studies.averaged_clipping.algorithm import (
    LINEAR,
    LOGISTIC,
    Cells,
    Data,
    Descent,
    averaged_clip,
    clip_vectors,
)
from scripts.studies.averaged_clipping.heavy_tails import Yardstick, draw


def rng(seed=1):
    return np.random.default_rng(seed)


def columns(*cells):
    return Cells(*np.array(cells, dtype=np.float64).T)


def clipped_sum(gradients, group_of, k, clip, batch_size):
    """The sum of the clipped group means of gradients [b, d], through slopes of 1."""
    groups = (np.asarray(group_of) == np.arange(k)[:, None]).astype(np.int64)
    slopes = np.ones((len(gradients), 1))
    return averaged_clip(slopes, np.asarray(gradients), np.array([clip]), batch_size, groups)[0]


# --- sensitivity


@pytest.mark.parametrize("k", [1, 4])
def test_one_example_moves_the_release_by_2_lambda_over_k(k):
    """clip(-5 e1) becomes clip(+5 e1) in the group of the added (or exchanged) example."""
    clip, m = 0.7, 8
    of = np.arange(8) % k
    low = np.zeros((8, 3))
    low[of == 0, 0] = -5 * m / (of == 0).sum() / k
    added = np.vstack([low, [10.0 * m / k, 0, 0]])
    before = clipped_sum(low, of, k, clip, m) / k
    after = clipped_sum(added, np.append(of, 0), k, clip, m) / k
    assert math.isclose(np.linalg.norm(after - before), 2 * clip / k)
    exchanged = low.copy()
    exchanged[0, 0] = 1e6
    after = clipped_sum(exchanged, of, k, clip, m) / k
    assert math.isclose(np.linalg.norm(after - before), 2 * clip / k)


@pytest.mark.parametrize("k", [1, 3])
def test_no_example_moves_it_further(k):
    generator = rng()
    for _ in range(200):
        gradients = generator.standard_cauchy((7, 4)) * 10 ** generator.uniform(-3, 3)
        of, other = generator.integers(k, size=7), generator.standard_cauchy((1, 4)) * 100
        full = clipped_sum(gradients, of, k, 0.5, 7)
        swapped = clipped_sum(np.vstack([gradients[:-1], other]), of, k, 0.5, 7)
        removed = clipped_sum(gradients[:-1], of[:-1], k, 0.5, 7)
        for moved in (swapped, removed):
            assert np.linalg.norm(moved - full) <= 2 * 0.5 * (1 + 1e-12)


def test_the_plan_states_2_lambda_and_divides_by_the_groups():
    for k in (1, 4):
        descent = Descent(steps=10, batch_size=50, groups=k)
        mechanism = descent.plan(1000).mechanism
        for relation in ("add_or_remove_one", "replace_one"):
            assert mechanism.sensitivity(relation) in (2.0, 4.0)  # 4: replaced within one batch
        assert mechanism.sensitivity("add_or_remove_one") == 2.0
        assert mechanism.divisor == descent.divisor == k
    per_example = Descent(clipping="per_example", steps=10, batch_size=50)
    assert per_example.plan(1000).mechanism.sensitivity("add_or_remove_one") == 1.0
    assert per_example.plan(1000).mechanism.divisor == per_example.divisor == 50


# --- accounting


def test_calibration_is_the_plans_and_one_accountant_covers_the_restarts():
    n, delta = 5000, 1e-4
    descent = Descent(steps=500, stages=4, batch_size=50)
    sigma = averaged_clipping.calibrated(descent, n, 1.0, delta)
    assert 0.99 < averaged_clipping.true_epsilon(descent, n, sigma, delta) <= 1.0
    assert averaged_clipping.true_epsilon(descent, n, 0.0, delta) == math.inf
    assert descent.plan(n).steps == 2000
    once = Descent(steps=2000, batch_size=50)
    assert sigma == averaged_clipping.calibrated(once, n, 1.0, delta)
    per_example = dataclasses.replace(once, clipping="per_example")
    assert sigma == 2 * averaged_clipping.calibrated(per_example, n, 1.0, delta)
    epsilon, share = 1 / (2 * math.sqrt(8 * math.log(2 / delta))), delta / 8  # the paper's, a stage
    stage = Descent(steps=500, batch_size=50)
    split = averaged_clipping.calibrated(stage, n, epsilon, share)
    assert split > 2 * sigma  # what the paper's split of the budget costs


# --- algorithms


@pytest.mark.parametrize("objective", [LINEAR, LOGISTIC])
def test_slopes_are_derivatives(objective):
    data = draw(objective, "laplace", 5, rng())
    x, step = rng(2).normal(size=(1, 10)), 1e-6
    gradients = objective.slopes(x, data) * data.features
    for j in range(10):
        up, down = x + step * np.eye(10)[j], x - step * np.eye(10)[j]
        predictions = [(data.features @ point.T)[:, 0] for point in (up, down)]
        losses = [objective.loss(p, data.targets) for p in predictions]
        np.testing.assert_allclose((losses[0] - losses[1]) / (2 * step), gradients[:, j], atol=1e-5)


@pytest.mark.parametrize("clipping", ["averaged", "per_example"])
def test_the_algorithms_written_out(clipping):
    """Algorithm 2, and DP-SGD with its restarts."""
    data = draw(LINEAR, "laplace", 60, rng())
    descent = Descent(clipping=clipping, steps=5, batch_size=12, stages=2, radius=0.8)
    cells = columns((0.3, 0.5, 0.0), (0.2, 1.5, 0.7))
    found = averaged_clipping.run(LINEAR, data, descent, cells, rng(4))[1]
    generator, x, clip = rng(4), np.zeros(10), 1.5
    generator.integers(1, size=60)
    for _ in range(2):
        iterates = []
        for _ in range(5):
            iterates.append(x)
            batch = averaged_clipping.poisson_batch(generator, 60, 12)
            residuals = data.features[batch] @ x - data.targets[batch]
            gradients, divisor = 2 * residuals[:, None] * data.features[batch], 12
            if clipping == "averaged":
                gradients, divisor = gradients.sum(axis=0, keepdims=True) / 12, 1
            total = sum(g * min(1, clip / np.linalg.norm(g)) for g in gradients)
            x = x - 0.2 * (total + 0.7 * clip * generator.standard_normal(10)) / divisor
            x = x * min(1, 0.8 / np.linalg.norm(x))
        x, clip = np.mean(iterates, axis=0), clip / math.sqrt(2)
    np.testing.assert_allclose(found, x, atol=1e-12)


def test_cells_do_not_depend_on_each_other():
    data = draw(LINEAR, "student-t", 100, rng())
    descent = Descent(steps=20, batch_size=10, groups=3)
    both = averaged_clipping.run(
        LINEAR, data, descent, columns((0.1, 0.5, 1.0), (9e9, 9e9, 0.0)), rng(2)
    )
    alone = averaged_clipping.run(LINEAR, data, descent, columns((0.1, 0.5, 1.0)), rng(2))
    np.testing.assert_allclose(both[0], alone[0], rtol=1e-9)
    assert Yardstick(LINEAR, data, np.zeros(10)).excess(both * np.inf)[1] == np.inf


def test_a_poisson_batch_has_its_distribution():
    generator = rng()
    batches = [averaged_clipping.poisson_batch(generator, 50, 5) for _ in range(4000)]
    sizes = np.array([len(b) for b in batches])
    assert abs(sizes.mean() - 5) < 0.15 and abs(sizes.var() - 4.5) < 0.5
    assert all(len(set(b.tolist())) == len(b) for b in batches[:100])
    counts = np.bincount(np.concatenate(batches), minlength=50)
    assert np.all(np.abs(counts - 400) < 100)


# --- degenerate cases


def test_a_zero_gradient_stays_zero_and_an_empty_batch_still_releases_noise():
    assert clip_vectors(np.zeros((1, 3)), np.array([0.5])).tolist() == [[0.0, 0.0, 0.0]]
    empty = averaged_clip(np.zeros((0, 2)), np.zeros((0, 3)), np.ones(2), 5, np.ones((1, 0), int))
    assert empty.tolist() == [[0.0] * 3] * 2
    data = Data(np.ones((1000, 10)), np.ones(1000))
    for clipping in ("averaged", "per_example"):
        descent = Descent(clipping=clipping, steps=2, batch_size=1)
        generator = FewExamples(np.random.PCG64(1))
        x = averaged_clipping.run(LINEAR, data, descent, columns((1.0, 1.0, 1.0)), generator)
        noise = np.random.Generator(np.random.PCG64(1))
        noise.integers(1, size=1000)
        noise.choice(1000, 0, replace=False, shuffle=False)
        np.testing.assert_allclose(x[0], -noise.standard_normal(10) / 2)  # the mean of 0 and x^1


class FewExamples(np.random.Generator):
    """Draws no example."""

    def binomial(self, *_):
        return 0


def test_impossible_settings_are_refused():
    data = draw(LINEAR, "laplace", 10, rng())
    cells = columns((0.1, 1.0, 1.0))
    for make, message in (
        (
            lambda: averaged_clipping.run(
                LINEAR, data, Descent(steps=1, batch_size=11), cells, rng()
            ),
            "n",
        ),
        (lambda: Descent(steps=1, batch_size=11).plan(10), "larger than num_examples=10"),
        (lambda: Descent(steps=0, batch_size=1), "steps=0"),
        (lambda: Descent(steps=1, batch_size=1, radius=0.0), "radius"),
        (lambda: Descent(clipping="per_example", steps=1, batch_size=1, groups=2), "groups=2"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(ValueError, match="clips"):
        averaged_clipping.run(
            LINEAR, data, Descent(steps=1, batch_size=1), columns((0.1, 0.0, 1.0)), rng()
        )
