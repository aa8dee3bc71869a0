"""A small convolutional network on 8x8 digits, the offline stand-in for MNIST in the online federated
paper.

The paper's network has two convolutions of 32 filters 3x3, a 2x2 max-pooling and dense layers of 64, 32
and 10 units. Here the same layers with `filters`, `hidden` and `second` units, on scikit-learn's digits.
There are 1,797 digits, not 60,000: a client draws one of the training images of its learner and moves,
turns and scales it at random, so that every client is another image. The epsilon of the study is about
such draws; it protects no single image of the 1,797.

Every learner of every run has its own weights and one image at a time. All are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scripts.studies.online_federated.algorithm import clipped

Array = NDArray[Any]

SIDE, CLASSES = 8, 10
TEST_DIGITS = 360


class Images(NamedTuple):
    """Images, float32 [..., 8, 8] with pixels from 0 to 1, and labels 0..9, int64 [...]."""

    pixels: Array
    labels: Array


@dataclass(frozen=True)
class Network:
    """conv 3x3 -> relu -> conv 3x3 -> relu -> max-pool 2x2 -> two dense relu layers -> softmax.

    Convolutions have no padding: 8x8 -> 6x6 -> 4x4 -> 2x2. The D parameters are one axis.

    Attributes:
      filters: of both convolutions.
      hidden, second: units of the dense layers.
    """

    filters: int = 8
    hidden: int = 32
    second: int = 16

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the five layers; a bias row follows each."""
        f, hidden, second = self.filters, self.hidden, self.second
        return ((9, f), (9 * f, f), (4 * f, hidden), (hidden, second), (second, CLASSES))

    @property
    def size(self) -> int:
        """D."""
        return sum((a + 1) * b for a, b in self.shapes)

    def initial(self, generator: np.random.Generator) -> Array:
        """Uniform with variance 2 / inputs (He et al. 2015), biases 0: float32 [D]."""
        parts = []
        for a, b in self.shapes:
            parts += [generator.uniform(-1, 1, a * b) * math.sqrt(6 / a), np.zeros(b)]
        return np.concatenate(parts).astype(np.float32)

    def layers(self, z: Array) -> list[tuple[Array, Array]]:
        """Weights [..., a, b] and biases [..., 1, b], views of z [..., D]."""
        found, at = [], 0
        for a, b in self.shapes:
            w = z[..., at : at + a * b].reshape(*z.shape[:-1], a, b)
            at += a * b
            found.append((w, z[..., None, at : at + b]))
            at += b
        return found

    def _forward(self, z: Array, pixels: Array) -> tuple[Array, list[Array]]:
        """Logits [..., m, 10] and the inputs of each layer; pixels [..., m, 8, 8], z [..., D].

        The positions of an image are rows of the convolutions, m images are rows of the dense layers.
        """
        (w1, b1), (w2, b2), *dense = self.layers(z)
        m, f = pixels.shape[-3], self.filters
        p1 = _patches(pixels[..., None]).reshape(*pixels.shape[:-3], m * 36, 9)
        h1 = np.maximum(p1 @ w1 + b1, 0)
        p2 = _patches(h1.reshape(*h1.shape[:-2], m, 6, 6, f))
        p2 = p2.reshape(*h1.shape[:-2], m * 16, 9 * f)
        h2 = np.maximum(p2 @ w2 + b2, 0)
        pooled = h2.reshape(*h2.shape[:-2], m, 2, 2, 2, 2, f).max(axis=(-4, -2))
        a = pooled.reshape(*h2.shape[:-2], m, 4 * f)
        inputs = [p1, h1, p2, h2, a]
        for w, b in dense[:-1]:
            a = np.maximum(a @ w + b, 0)
            inputs.append(a)
        w, b = dense[-1]
        return a @ w + b, inputs

    def logits(self, z: Array, pixels: Array) -> Array:
        """Of m images: z [..., D], pixels [..., m, 8, 8] -> [..., m, 10]."""
        return self._forward(z, pixels)[0]

    def gradients(self, z: Array, images: Images) -> Array:
        """Gradient of the cross-entropy of one image for each network.

        Args:
          z: parameters, [..., D].
          images: pixels [..., 8, 8] and labels [...], broadcast against z.

        Returns:
          [..., D].
        """
        logits, (p1, h1, p2, h2, pooled, *hidden) = self._forward(z, images.pixels[..., None, :, :])
        odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
        back = odds / odds.sum(axis=-1, keepdims=True)
        back = back - (images.labels[..., None, None] == np.arange(CLASSES))
        layers, parts = self.layers(z), []
        for (w, _), a in zip(reversed(layers[2:]), [*reversed(hidden), pooled], strict=True):
            parts += [back, a.swapaxes(-1, -2) @ back]
            back = (back @ w.swapaxes(-1, -2)) * (a > 0)
        f, lead = self.filters, h2.shape[:-2]
        blocks = h2.reshape(*lead, 2, 2, 2, 2, f)
        back = _unpooled(blocks, pooled.reshape(*lead, 2, 2, f), back.reshape(*lead, 2, 2, f))
        back = back.reshape(*lead, 16, f)
        parts += [back.sum(axis=-2), p2.swapaxes(-1, -2) @ back]
        back = _unpatched((back @ layers[1][0].swapaxes(-1, -2)).reshape(*lead, 4, 4, 3, 3, f))
        back = back.reshape(h1.shape) * (h1 > 0)
        parts += [back.sum(axis=-2), p1.swapaxes(-1, -2) @ back]
        return np.concatenate([p.reshape(*lead, -1) for p in reversed(parts)], axis=-1)

    def mean_message(self, x: Array, records: Images, rates: Array, clip: float) -> Array:
        """`online_federated.Oracle.mean_message`.

        Args:
          x: [C, S, D].
          records: pixels [S, n, tau, 8, 8], labels [S, n, tau].
          rates: eta, [C].
          clip: B_g.

        Returns:
          [C, S, D].
        """
        pixels, labels = records
        _, learners, tau = labels.shape
        z = np.repeat(x[:, :, None], learners, axis=2)
        for t in range(tau):
            g = self.gradients(z, Images(pixels[None, :, :, t], labels[None, :, :, t]))
            z -= rates[:, None, None, None] * clipped(g, clip)
        return np.asarray((x - z.mean(axis=2)) / (rates[:, None, None] * tau))

    def accuracy(self, x: Array, test: Images) -> Array:
        """Share of test images with the right largest logit: x [C, S, D] -> [C, S]."""
        best = self.logits(x, test.pixels).argmax(axis=-1)
        return np.asarray((best == test.labels).mean(axis=-1))


def _patches(maps: Array) -> Array:
    """3x3 neighbourhoods: [..., h, w, f] -> [..., h-2, w-2, 3, 3, f]."""
    windows = np.lib.stride_tricks.sliding_window_view(maps, (3, 3), axis=(-3, -2))
    return np.moveaxis(windows, -3, -1)


def _unpatched(patches: Array) -> Array:
    """Sums the patches [..., h-2, w-2, 3, 3, f] back to [..., h, w, f]: the transpose of `_patches`."""
    *lead, h, w, _, _, f = patches.shape
    maps = np.zeros((*lead, h + 2, w + 2, f), patches.dtype)
    for i in range(3):
        for j in range(3):
            maps[..., i : i + h, j : j + w, :] += patches[..., i, j, :]
    return maps


def _unpooled(blocks: Array, top: Array, back: Array) -> Array:
    """Gives each block's derivative to the first of its pixels that is the largest.

    blocks [..., h, 2, w, 2, f], top and back [..., h, w, f]; blank corners have equal pixels.
    """
    found, left = np.zeros_like(blocks), np.ones(top.shape, bool)
    for i in range(2):
        for j in range(2):
            here = left & (blocks[..., i, :, j, :] == top)
            found[..., i, :, j, :] = back * here
            left &= ~here
    return found


def digits(generator: np.random.Generator) -> tuple[Images, Images]:
    """scikit-learn's 1,797 digits, shuffled: 1,437 for training, 360 for the test."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = generator.permutation(len(labels))
    pixels, labels = pixels[order].reshape(-1, SIDE, SIDE) / 16, labels[order]
    images, test = Images(pixels.astype(np.float32), labels), slice(TEST_DIGITS)
    train = slice(TEST_DIGITS, None)
    return Images(*(part[train] for part in images)), Images(*(part[test] for part in images))


def moved(pixels: Array, generator: np.random.Generator) -> Array:
    """Each image turned by up to 12 degrees, scaled by up to 10 % and shifted by up to 0.7 pixels.

    Bilinear, with 0 outside the image: float32 [m, 8, 8] -> [m, 8, 8].
    """
    m = len(pixels)
    turn = generator.uniform(-math.pi / 15, math.pi / 15, (m, 1, 1))
    scale = generator.uniform(0.9, 1.1, (m, 1, 1))
    down, right = generator.uniform(-0.7, 0.7, (2, m, 1, 1))
    i, j = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    padded = np.pad(pixels, ((0, 0), (2, 2), (2, 2)))
    centre = (SIDE + 3) / 2
    y = np.clip(scale * (np.cos(turn) * i - np.sin(turn) * j) + down + centre, 0, SIDE + 2.99)
    x = np.clip(scale * (np.sin(turn) * i + np.cos(turn) * j) + right + centre, 0, SIDE + 2.99)
    low_y, low_x, which = y.astype(int), x.astype(int), np.arange(m)[:, None, None]
    part_y, part_x = y - low_y, x - low_x
    total = np.zeros((m, SIDE, SIDE))
    for dy, weight_y in ((0, 1 - part_y), (1, part_y)):
        for dx, weight_x in ((0, 1 - part_x), (1, part_x)):
            total += weight_y * weight_x * padded[which, low_y + dy, low_x + dx]
    return total.astype(np.float32)


def stream(
    training: list[Images],
    generators: list[np.random.Generator],
    rounds: int,
    local_steps: int,
    learners: int = CLASSES,
) -> Iterator[Images]:
    """Clients of all seeds, round by round; half of those of learner l have digit l, the rest any digit.

    Args:
      training: of each seed; learner i has every n-th image for the half with any digit.
      generators: of each seed.
      rounds: R.
      local_steps: tau.
      learners: n, at most 10.

    Yields:
      pixels [S, n, tau, 8, 8], labels [S, n, tau].

    Raises:
      ValueError: more learners than digits.
    """
    if learners > CLASSES:
        raise ValueError(
            f"learners={learners}: half of a learner's images have its digit; at most 10."
        )
    for _ in range(rounds):
        pairs = zip(training, generators, strict=True)
        found = [_clients(images, g, local_steps, learners) for images, g in pairs]
        yield Images(np.stack([f.pixels for f in found]), np.stack([f.labels for f in found]))


def _clients(images: Images, generator: np.random.Generator, tau: int, learners: int) -> Images:
    chosen = np.empty((learners, tau), np.int64)
    for k in range(learners):
        own = np.flatnonzero(images.labels == k)
        any_digit = np.arange(k, len(images.labels), learners)
        special = generator.random(tau) < 0.5
        chosen[k] = np.where(special, generator.choice(own, tau), generator.choice(any_digit, tau))
    pixels = moved(images.pixels[chosen.ravel()], generator)
    return Images(pixels.reshape(learners, tau, SIDE, SIDE), images.labels[chosen])
