"""What a loss looks like along random directions: its slope, its curvature, how much rows differ.

Along u a row's loss is f_i(theta + a u) = f_i + a u'g_i + a^2 u'H_i u / 2 + O(a^3). From f_i at theta
and at theta +- lambda u, for a few directions u and some rows,

    x_i  = (f_i(+) - f_i(-)) / (2 lambda)               u'g_i, up to lambda^2
    h_i  = (f_i(+) - 2 f_i + f_i(-)) / lambda^2         u'H_i u, up to lambda^2

and along the step s = sum_k g_k u_k that M such directions would take, g_k the rows' mean x_i, in the
same way s'Hs = sum_k g_k^2 u_k'Hu_k + sum_{k != l} g_k g_l u_k'Hu_l. Over random directions the last sum
is (M - 1) sum_k g_k^2 times R = grad'H grad / |grad|^2, the curvature along the gradient.

All of it is a function of the data: measure on public rows only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_dpzero.estimators.finite_differences import FiniteDifferences, Microbatch
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import Position

DIRECTIONS, CHEAP_DIRECTIONS = 4, 16
"""With theta and both ends of the step along them all, eleven passes over the rows; more directions
where a pass costs next to nothing (a head on stored features)."""

ROWS = 64
"""Rows that are looked at, at most."""

_SEED = 0


class Landscape(NamedTuple):
    """What public rows' losses do along a direction.

    Attributes:
      slope: g^2 >= 0, the square of the mean row's slope; the rows' scatter is taken out of it.
      scatter: s^2, the variance of a row's slope around that mean.
      curvature: h = u'Hu of the mean loss; perhaps negative.
      along: R, the mean loss' curvature along its gradient; perhaps negative.
      rows: that were looked at and have finite losses.
    """

    slope: float
    scatter: float
    curvature: float
    along: float
    rows: int

    def norm(self, directions: int) -> float:
        """Returns the root mean square over rows of the norm of K slopes."""
        return math.sqrt(directions * (self.slope + self.scatter))


@torch.no_grad()
def measure(
    differences: FiniteDifferences, public: Sequence[Microbatch], draws: int = DIRECTIONS
) -> Landscape | None:
    """The landscape at theta, of public rows, in 2 `draws` + 3 passes over them.

    Args:
      differences: of central kind; theta settled, before and after.
      public: microbatches.
      draws: directions, none of which is one of a step.

    Returns:
      None where fewer than two rows have finite losses.
    """
    smoothing, directions = differences.smoothing, [Direction(_SEED, 0, k) for k in range(draws)]
    positions: list[Position] = [
        ((u, scale),) for u in directions for scale in (smoothing, -smoothing)
    ]
    try:
        ends = differences.at(public, [(), *positions]).double()
        finite = ends.isfinite().all(dim=1)
        if (rows := int(finite.sum())) < 2:
            return None
        here, plus, minus = ends[finite, :1], ends[finite, 1::2], ends[finite, 2::2]
        x = (plus - minus) / (2 * smoothing)
        mean, scatter = x.mean(dim=0), float(x.var(dim=0).mean())
        curved = (plus - 2 * here + minus).mean(dim=0) / smoothing**2
        # as far as both ends of the step lie within the smoothing
        length = smoothing / float(mean.abs().sum().clamp(min=1e-30))
        ahead = tuple((u, length * g) for u, g in zip(directions, mean.tolist(), strict=True))
        back = tuple((u, -c) for u, c in ahead)
        step = differences.at(public, [ahead, back]).double()[finite]
    finally:
        differences.space.settle_()
    bent = float((step.sum(dim=1) - 2 * here[:, 0]).nan_to_num(0.0, 0.0, 0.0).mean()) / length**2
    squares = mean.square()
    cross = bent - float((squares * curved).sum())
    along = cross / float((draws - 1) * squares.sum().clamp(min=1e-30))
    slope = float(squares.mean()) - scatter / rows
    return Landscape(max(0.0, slope), scatter, float(curved.mean()), along, rows)
