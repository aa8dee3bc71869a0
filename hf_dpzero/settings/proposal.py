"""K, B and T for the time at hand: what `hf-dpzero plan --propose` says.

A step of DPZero at its best rate gains (see `defaults`, with the clip at a typical norm of an example's
K differences, so C^2 = K (g^2 + s^2))

    alpha K g^2 / 2 = K g^2 / (2 h) / (1 + lost),
    lost = (K - 1) R / h + (s / g)^2 / B + sigma^2 K (1 + (s / g)^2) / B^2,

and T steps T times that, while the loss is far from its end. More directions help until K R / h is
about 1, a larger batch until what examples scatter and the noise are below 1. `ALONG`
is what eight problems had in the middle (heads, LoRA, last layers, all weights of a sentence encoder
and of a decoder: R / h = 0.03 to 0.5); (s / g)^2 was 9 to 70 at the start, and `SCATTER` is ten times
that, for slopes fall as rows are learned. sigma is that of the central limit theorem
(Bu et al. 2020, "Deep learning with Gaussian differential privacy", Corollary 5.4), to rank by:
the plan that is made of the choice is accounted as any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

SCATTER, ALONG = 400.0, 0.1
"""(s / g)^2 and R / h."""

NEAR = 0.9
"""Of what gains nearly as much as the best the largest batch is taken: a clip that adapts, and a rate
that is not the best one, need it."""

OVERHEAD = 0.01
"""Seconds of a step beside its passes."""

LEAST_STEPS, MOST_STEPS = 20, 4000


class Proposal(NamedTuple):
    """What is proposed: K, B and T, and how long they take."""

    num_directions: int
    expected_batch_size: int
    max_steps: int
    minutes: float


def propose(
    num_examples: int,
    epsilon: float,
    delta: float,
    minutes: float,
    rows_per_second: float,
    passes: Callable[[int], int],
    directions: int | None = None,
    batch: int | None = None,
) -> Proposal:
    """Chooses what gains most in that time.

    Args:
      num_examples: n.
      epsilon, delta: the budget; epsilon may be infinite.
      minutes: of training, without evaluations.
      rows_per_second: of one forward pass.
      passes: K -> forward passes of a step over its rows.
      directions, batch: K and B where they are given; else powers of two up to 256 and n / 2.

    Raises:
      ValueError: not even `LEAST_STEPS` of the smallest steps fit.

    >>> propose(65_349, 2.0, 1e-5, 30, 50, lambda k: 2 * k if k < 4 else k + 1)[:3]
    (4, 32, 560)
    """
    mu = _gaussian_parameter(epsilon, delta)
    few = [2**j for j in range(4, max(5, int(math.log2(max(num_examples / 2, 2))) + 1))]
    found: list[tuple[float, Proposal]] = []
    for k, b in itertools.product(
        [directions] if directions else [2**j for j in range(9)], [batch] if batch else few
    ):
        seconds = OVERHEAD + passes(k) * b / rows_per_second
        steps = min(int(60 * minutes / seconds), MOST_STEPS)
        if steps < LEAST_STEPS:
            continue
        sigma = _noise_multiplier(mu, b / num_examples, steps)
        lost = (k - 1) * ALONG + SCATTER / b + sigma**2 * k * (1 + SCATTER) / b**2
        found.append((steps * k / (1 + lost), Proposal(k, b, steps, steps * seconds / 60)))
    if not found:
        raise ValueError(
            f"{minutes:g} minutes at {rows_per_second:g} rows a second are fewer than {LEAST_STEPS} "
            f"steps of {passes(directions or 1)} passes over {batch or few[0]} rows: allow more time, "
            "or train fewer parameters (stored features, a frozen prefix)."
        )
    best = max(gain for gain, _ in found)
    near = [proposal for gain, proposal in found if gain >= NEAR * best]
    return max(near, key=lambda proposal: (proposal.expected_batch_size, proposal.max_steps))


def _gaussian_parameter(epsilon: float, delta: float) -> float:
    """The mu of Gaussian differential privacy that is (epsilon, delta)-private (Dong et al. 2022)."""
    from scipy.optimize import brentq
    from scipy.special import log_ndtr, ndtr

    if epsilon == math.inf:
        return math.inf

    def excess(mu: float) -> float:
        beyond = math.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2))
        return float(ndtr(-epsilon / mu + mu / 2)) - beyond - delta

    return float(brentq(excess, 1e-6, 2 * math.sqrt(epsilon + 1) + epsilon + 10))


def _noise_multiplier(mu: float, sampled: float, steps: int) -> float:
    """sigma at which `steps` Poisson samples of a share of the rows are about mu-private together."""
    if mu == math.inf:
        return 0.0
    return math.log1p((mu / sampled) ** 2 / steps) ** -0.5
