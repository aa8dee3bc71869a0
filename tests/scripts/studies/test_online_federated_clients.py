"""Clients and models of the online federated study: their laws, gradients and local steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scripts.studies.online_federated import logistic as logistic
from scripts.studies.online_federated import network as network
from scripts.studies.online_federated.algorithm import (
    local_message,
)


def rng(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def test_synthetic_clients_have_the_law_of_fedprox():
    population = logistic.Population.of(rng(7), 3, 10, 0.1, 0.1)
    a, b = population.draw(rng(8), 20_000)
    expected = np.arange(1, 11) ** -1.2
    np.testing.assert_allclose(a.var(axis=1), np.tile(expected, (3, 1)), rtol=0.06)
    np.testing.assert_allclose(a.mean(axis=1), population.means, atol=0.04)
    margins = np.einsum("kmd,kd->km", a, population.normals) + population.offsets[:, None]
    assert set(np.unique(b)) <= {-1.0, 1.0} and np.array_equal(b > 0, margins > 0)
    # v_k ~ N(B_k, I): entries of one learner share B_k; W_+ - W_- has variance 2
    many = logistic.Population.of(rng(9), 400, 100, 0.0, 3.0)
    assert many.means.mean(axis=1).std() == pytest.approx(3.0, rel=0.1)
    assert many.normals.std() == pytest.approx(math.sqrt(2), rel=0.02)


def torch_loss(net, theta, pixels, label):
    layers, at = [], 0
    for a, b in net.shapes:
        layers.append((theta[at : at + a * b].reshape(a, b), theta[at + a * b : at + (a + 1) * b]))
        at += (a + 1) * b
    x = torch.tensor(pixels).double()[None, None]
    for (w, b), channels in zip(layers[:2], (1, net.filters), strict=True):
        kernel = w.reshape(3, 3, channels, net.filters).permute(3, 2, 0, 1)
        x = torch.relu(torch.nn.functional.conv2d(x, kernel, b))
    x = torch.nn.functional.max_pool2d(x, 2).permute(0, 2, 3, 1).reshape(-1)
    for w, b in layers[2:4]:
        x = torch.relu(x @ w + b)
    logits = x @ layers[4][0] + layers[4][1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(int(label)))


def test_the_network_s_gradient_is_that_of_autograd():
    net = network.Network(3, 7, 5)
    train, _ = network.digits(rng(10))
    z = np.stack([net.initial(rng(s)) for s in range(6)]).reshape(3, 2, -1) + 0.02
    images = network.Images(train.pixels[:2], train.labels[:2])
    found = net.gradients(z, images)
    for run in range(3):
        for i in range(2):
            theta = torch.tensor(z[run, i]).double().requires_grad_()
            loss = torch_loss(net, theta, images.pixels[i], images.labels[i])
            (expected,) = torch.autograd.grad(loss, theta)
            np.testing.assert_allclose(found[run, i], expected.numpy(), atol=3e-6)
            assert np.abs(found[run, i]).max() > 0.05


def test_the_network_s_local_steps_are_the_algorithm():
    net = network.Network(2, 4, 4)
    train, _ = network.digits(rng(11))
    generators = [rng(12), rng(13)]
    (records,) = network.stream([train, train], generators, 1, 3, learners=4)
    assert records.pixels.shape == (2, 4, 3, 8, 8) and records.labels.shape == (2, 4, 3)
    x = np.stack([net.initial(rng(s)) for s in range(4)]).reshape(2, 2, -1)
    rates = np.array([0.1, 0.5], np.float32)
    found = net.mean_message(x, records, rates, 0.7)

    def gradient(z, record):
        return net.gradients(z, network.Images(*record))

    for c in range(2):
        for s in range(2):
            messages = [
                local_message(
                    gradient,
                    x[c, s],
                    list(zip(records.pixels[s, i], records.labels[s, i], strict=True)),
                    rates[c],
                    0.7,
                )
                for i in range(4)
            ]
            np.testing.assert_allclose(found[c, s], np.mean(messages, axis=0), atol=2e-4)


def test_half_of_a_learner_s_clients_have_its_digit_and_no_two_are_one_image():
    train, test = network.digits(rng(14))
    assert len(train.labels) == 1437 and len(test.labels) == 360
    ((pixels, labels),) = network.stream([train], [rng(15)], 1, 2000)
    own = (labels[0] == np.arange(10)[:, None]).mean(axis=1)
    np.testing.assert_allclose(own, 0.5 + 0.5 * 0.1, atol=0.05)
    flat = pixels.reshape(-1, 64)
    assert len(np.unique(flat[:2000], axis=0)) == 2000 and flat.min() >= 0 and flat.max() <= 1
    assert flat.mean() == pytest.approx(train.pixels.mean(), rel=0.1)
