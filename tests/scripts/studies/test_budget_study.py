"""Figure 1 of the dynamic-budget paper: the network against plain loops, the study, its script."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_dpzero.privacy.schedules import Exponential
from scripts.studies.budget.algorithm import multipliers_for, private_gradient_descent
from scripts.studies.budget.network import SOURCES, Network, train
from scripts.studies.budget.report import write
from scripts.studies.budget.study import (
    ARMS,
    Study,
    ratio_gamma,
    sigma_of,
    summary,
    total_budget,
)
from scripts.studies.harness import run

TINY = Study(
    sizes={"digits": (40,), "gaussians": (30, 60)}, steps=(6, 9), seeds=3, tuning_seeds=2,
    ratios=(1.5, 3.0), hidden=4, influence_points=3, influence_seeds=3, influence_size=30,
)  # fmt: skip


def small():
    data = SOURCES["gaussians"](12, 3).train
    network = Network(data.x.shape[1], 5)
    generator = np.random.default_rng(0)
    return data, network, np.stack([network.initial(generator) for _ in range(3)]) * 3


def per_example_gradients(network, theta, data):
    """[n, D] by autograd, example by example, in float64."""
    d, h = network.inputs, network.hidden
    gradients = []
    for x, y in zip(torch.tensor(data.x).double(), torch.tensor(data.y).double()):
        p = torch.tensor(theta).double().requires_grad_()
        w, b, v, c = p.split([d * h, h, h, 1])
        logit = torch.relu(x @ w.reshape(d, h) + b) @ v + c[0]
        (gradient,) = torch.autograd.grad(torch.nn.functional.softplus(-y * logit), p)
        gradients.append(gradient.numpy())
    return np.stack(gradients)


@pytest.mark.parametrize("clip", [0.3, 4.0, 1e6])
def test_the_clipped_mean_is_that_of_autograd(clip):
    data, network, thetas = small()
    found = network.clipped_mean(thetas, data, clip)
    for theta, mean in zip(thetas, found):
        rows = per_example_gradients(network, theta, data)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        expected = (rows * np.minimum(1, clip / norms)).mean(axis=0)
        assert mean == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_losses_and_accuracies():
    data, network, thetas = small()
    logits = network.logits(thetas, data.x)
    assert network.loss(thetas, data) == pytest.approx(np.log1p(np.exp(-data.y * logits)).mean(1))
    assert network.accuracy(thetas, data) == pytest.approx((np.sign(logits) == data.y).mean(axis=1))
    assert network.size == thetas.shape[1] == 5 * 12 + 5 + 5 + 1  # 12 rows have 12 components


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_runs_side_by_side_are_algorithm_1(beta):
    data, network, thetas = small()
    sigma = np.stack([multipliers_for(Exponential(gamma=g), 7, 4.0) for g in (1.0, 0.8, 0.8)])
    sigma[2] *= 0.9  # asks for more than the budget, and ends before
    draws = [np.random.default_rng(i) for i in range(3)]
    found = train(
        network, data, thetas, sigma,
        lambda _: np.stack([g.standard_normal(network.size) for g in draws]).astype(np.float32),
        rate=0.1, clip=0.7, budget=4.0, beta=beta,
    )  # fmt: skip
    for i in range(3):
        one = private_gradient_descent(
            lambda theta: per_example_gradients(network, theta, data), thetas[i], sigma[i],
            rates=0.1, clip=0.7, budget=4.0, beta=beta, generator=np.random.default_rng(i),
        )  # fmt: skip
        assert one.steps == (6 if i == 2 else 7)
        assert found[i] == pytest.approx(one.theta, abs=1e-4)


@pytest.mark.parametrize("source", list(SOURCES))
def test_data_are_as_the_paper_prepares_them(source):
    split = SOURCES[source](100, 0)
    x = split.train.x
    assert x.shape == (100, 30) and set(split.train.y) == {1.0, -1.0}
    assert x.mean(axis=0) == pytest.approx(np.zeros(30), abs=1e-4)
    assert x.std(axis=0) == pytest.approx(np.full(30, x.std(axis=0)[0]), rel=1e-3)
    assert np.linalg.norm(x, axis=1).max() == pytest.approx(10.0, rel=1e-5)
    again = SOURCES[source](100, 0)
    assert (again.train.x == x).all() and (SOURCES[source](100, 1).train.x != x).any()


def test_all_arms_spend_the_same():
    assert total_budget("zcdp") == pytest.approx(0.3927, abs=5e-5)
    assert total_budget("tight") == pytest.approx(0.51344, abs=5e-6)
    for arm in ARMS:
        sigma = sigma_of(arm, 50, 0.4, 0.9, 0.95)
        assert (sigma**-2).sum() == pytest.approx(0.4)
    sigma = sigma_of("exp", 50, 0.4, ratio_gamma(3.0, 50), 0.95)
    assert sigma[0] / sigma[-1] == pytest.approx(3.0)


def test_summaries_are_means_and_paired_differences(tmp_path):
    results = run(TINY, tmp_path)
    text = write(TINY, results, tmp_path)
    assert text.count("\n| gaussians | 60 |") == 4 * len(ARMS)
    assert (tmp_path / "figure1.png").read_bytes()[:4] == b"\x89PNG"
    for row in summary(results, "tight", "private"):
        points = [
            r["arms"] for r in results
            if "arms" in r and (r["source"], r["examples"]) == (row["source"], row["examples"])
        ]  # fmt: skip
        best = min(np.mean(arms[row["arm"]]["tight"]["loss"]) for arms in points)
        assert row["loss"] == pytest.approx(best)
        if row["arm"] in ("uniform", "momentum_uniform"):
            assert row["loss_gain"] == row["accuracy_gain"] == 0.0
    own = summary(results, "zcdp")[1]
    at = [r for r in results if r.get("arms") and r["source"] == own["source"]]
    one = next(r for r in at if r["steps"] == own["steps"])["arms"]["exp"]["zcdp"]["loss"]
    assert own["loss_se"] == pytest.approx(np.std(one, ddof=1) / np.sqrt(3))
