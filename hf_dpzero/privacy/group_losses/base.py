r"""Losses of groups, released privately: the weights of group-robust training follow from them.

Group-robust training minimises the worst group's loss, min_theta max_{y in simplex} sum_i y_i
L_i(theta), L_i the mean loss of group i. The y-player takes entropic mirror-descent steps (Algorithm 1
of the saddle-point paper, for y alone: model weights are not on a simplex, and none of its theorems is
claimed for them)

    y_i proportional to exp(tau sum_{s<t} g_is),    g_is = (1/B) sum_{z in batch s, group i} l_z / pi_i

and an example of group i counts with the weight y_i / pi_i in the step's sum. The weight is applied
before the clip, so the sensitivity of the step's sum stays C, whatever the weights are, as long as
they follow from what was released before. What is new is g.

What is public
--------------
The names of the groups and their shares pi are public: they are given by the user, from outside of the
private rows. A row's membership is private: it is a part of the row, and a row may be replaced by one of
another group. Counting pi on the private rows would release these counts without noise.

Contributions
-------------
An example of group i contributes one number to coordinate i, and nothing to the others:

    v = (2 min(max(l, 0), b) / b - 1) / (1 + 2^-8),        0 if l is NaN or infinite,

and g_i = (1 + 2^-8) b / (2 B pi_i) sum v estimates L_i - b/2; the softmax does not see the constant
b/2. One example more also puts one other in another place, of this group or another one, which moves
that one's loss by at most 2^-9 b (A2 of `batches.placement`, for losses). Under add-or-remove the sums
therefore move by at most (1 + 2^-8) / (1 + 2^-8) = 1 in L1 norm, and so in L2; a replaced row is one
less and one more, at most 2. Each coordinate has a scale of its own,
b / (2 B pi_i): a large group gets less noise. (Without the shift of b/2, and with the smallest group's
scale for all, the sensitivity would be b / (B min pi), at least twice as large.)

v is truncated to the grid 2^-30, so that sums, also those of several processes, are exact integers that
receive discrete Gaussian noise (`discretization.py`).

Three ways to release it
------------------------
`PerStepGroups`: g_t with Gaussian noise in every step. One step then releases two things about one
batch: the weights' part with multiplier z_w, and g with z_g. Given the past they are one vector of which
an example moves the parts by at most 1/z_w and 1/z_g after division by their scales: one Gaussian
mechanism of multiplier z, z^-2 = z_w^-2 + z_g^-2, under every sampler and relation of `events.py`,
amplification by sampling included (as the count of adaptive clipping is, see there). They must not be
accounted as two sampled mechanisms: the same batch feeds both. Noise is independent over the steps.

`PrefixSumGroups`: prefix sums of g with Toeplitz-correlated noise. `VertexGroups`: groups drawn by the
exponential mechanism from log-weights that stay hidden. An example's losses enter all later releases of
these, so no step can be amplified by sampling; both need batches in which an example takes part in known
steps only (`FixedBatchesSampler`, or a full batch), and the weights' part is then not amplified either.

Is it sound to draw Poisson batches, amplify the weights' part and account for the other release without
amplification? For one step it is, under add-or-remove: with likelihood ratios P and R of the two parts
of the example's presence the joint ratio is 1 - q + q P R, which, given P, is 1 - q + q P plus
q P (R - 1), and is below (1 - q + q P) R in convex order, since q P <= 1 - q + q P. But these two ways
need the sum over steps in all of which the example may have been: the sensitivity is about T / E times
that of E passes over fixed batches. That is why they are refused there.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hf_dpzero.privacy.described import Described
from hf_dpzero.privacy.discretization import GRID_BITS, GRID_RADIUS, float32s
from hf_dpzero.privacy.mechanisms.base import (
    DISPLACEMENT,
    NotNoised,
    check_multiplier,
)

if TYPE_CHECKING:
    from hf_dpzero.privacy.events import Part, StepSpec
    from hf_dpzero.privacy.noise import NoiseSource
    from hf_dpzero.privacy.plan import PrivacyPlan
    from hf_dpzero.privacy.sampling import Sampler

GROUP_STREAM = 1 << 61
"""Added to the step for the groups' noise, so that insecure sources give it draws of its own."""

SMALLEST_SHARE = 1e-6
LARGEST_BOUND = 1e6


def places(values: Sequence[object], names: Sequence[str]) -> np.ndarray:
    """Finds which of the names each value stands for, int64 [n] in 0..m-1; -1 for none of them.

    Texts are compared as they are, other values as texts: 3 is "3", and 3.0 is "3.0" or else "3", since
    a column of integers with gaps is often read as floats. True is "True", or else "true"; None is
    "None".

    Args:
      values: of rows; numbers and truth values may be those of NumPy or torch.
      names: of groups, each one once.

    >>> places(["1", 0, 1.0, True, None], ("0", "1", "true")).tolist()
    [1, 0, 1, 2, -1]
    """
    known = {name: i for i, name in enumerate(names)}

    def place(value: object) -> int:
        plain = value.item() if getattr(value, "ndim", None) == 0 else value  # type: ignore
        spellings = [str(plain)]  # the likeliest first
        if isinstance(plain, bool):
            spellings.append(str(plain).lower())
        elif isinstance(plain, float) and plain.is_integer():
            spellings.append(str(int(plain)))
        return next((known[word] for word in spellings if word in known), -1)

    return np.fromiter(map(place, values), dtype=np.int64, count=len(values))


def metric_keys(names: Sequence[str]) -> list[str]:
    """Makes names of metrics of groups' names: letters, digits and underscores, each one once.

    Names that would be the same get their place in `names`, from 1.

    >>> metric_keys(["United Kingdom", "<18", ">18"])
    ['United_Kingdom', '_18_2', '_18_3']
    """
    keys = [re.sub(r"\W+", "_", name) for name in names]
    often = Counter(keys)
    numbered = [f"{key}_{i}" if often[key] > 1 else key for i, key in enumerate(keys, 1)]
    if len({*numbered}) == len(names):
        return numbered
    return [f"{key}_{i}" for i, key in enumerate(keys, 1)]


@dataclass(frozen=True, kw_only=True)
class GroupLosses(Described):
    """Base: the public facts about groups, an example's contribution, and weights that follow.

    Attributes:
      names: of the groups, public, in the order of the coordinates.
      shares: pi, public, each at least 1e-6; they add up to 1.
      loss_bound: b > 0: losses are clipped to [0, b] before they count.
      rate: tau > 0 of the multiplicative update, in 1 / loss; None for `default_rate`.
      joint: whether the release is a part of the step's own Gaussian mechanism.
      num_values: numbers that a step writes to the ledger.

    Raises:
      ValueError: no groups, names that are given twice, shares that are no distribution, numbers out of
        range.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    loss_bound: float = 2.0
    rate: float | None = None

    joint: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "shares", tuple(float(share) for share in self.shares))
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(
                f"group names {list(self.names)}: give at least one, and each one once."
            )
        if len(self.shares) != len(self.names):
            raise ValueError(
                f"{len(self.shares)} shares for {len(self.names)} groups: give one each."
            )
        for name, share in zip(self.names, self.shares, strict=True):
            if not SMALLEST_SHARE <= share <= 1:  # NaN fails every comparison
                raise ValueError(
                    f"group {name!r} has the share {share:g}, and shares divide: give each group at "
                    f"least {SMALLEST_SHARE:g}, or leave out a group that no row may have."
                )
        if abs(math.fsum(self.shares) - 1) > 1e-6:
            raise ValueError(
                f"the groups' shares add up to {math.fsum(self.shares):.6g}, not 1: they are the "
                "share of each group in the population that the rows come from."
            )
        self._check_number("loss_bound", self.loss_bound, LARGEST_BOUND)
        if self.rate is not None:
            self._check_number("rate", self.rate, LARGEST_BOUND)

    @staticmethod
    def _check_number(name: str, value: float, most: float) -> None:
        if not (1e-9 <= value <= most):
            raise ValueError(f"{name}={value!r} of the groups must be between 1e-9 and {most:g}.")

    @property
    def num_groups(self) -> int:
        """Returns the number of groups, m."""
        return len(self.names)

    @property
    def num_values(self) -> int:
        """Returns m: one number for each group."""
        return self.num_groups

    @property
    def kept(self) -> float:
        """Returns the multiplier of the step's one Gaussian over the weights' part's; 1 if not joint."""
        return 1.0

    def index_of(self, names: Sequence[object]) -> np.ndarray:
        """Returns rows' groups as numbers 0..m-1, int64 [n]; see `places`.

        Args:
          names: of each row's group.

        Raises:
          ValueError: a row has a group without a share. The row's own value is private and is not shown.
        """
        found = places(names, self.names)
        if (found < 0).any():
            raise ValueError(
                f"row {int(np.argmax(found < 0)) + 1} (counted from 1) has a group that "
                f"group_robust.shares does not name: it names {', '.join(self.names[:8])}"
                f"{', ...' if self.num_groups > 8 else ''}. Name every group that a row may have, with "
                "its public share; correct or drop other rows. Names are compared as text, class labels "
                "by their names, and a missing value is called None."
            )
        return found

    def contributions(self, losses: np.ndarray, groups: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns what each example adds to its group's coordinate, v in units of 2^-30: int64 [B].

        Guarantee: at most 2^30 / (1 + 2^-8), so that a displaced row fits into the sensitivity of 1.

        Args:
          losses: float [B]; one that is NaN or infinite contributes nothing.
          groups: of each example, [B]; only their number is used.

        Raises:
          ValueError: not one group for each loss.
        """
        wide = np.asarray(losses, dtype=np.float64).reshape(-1)
        if len(groups) != len(wide):
            raise ValueError(f"{len(groups)} groups for {len(wide)} losses: give one for each.")
        finite = np.isfinite(wide)
        inside = np.clip(np.where(finite, wide, 0.0), 0.0, self.loss_bound) / self.loss_bound
        scaled = (2 * inside - 1) * (GRID_RADIUS / (1 + DISPLACEMENT))
        return np.where(finite, np.trunc(scaled), 0).astype(np.int64)

    def total(self, losses: np.ndarray, groups: Sequence[int] | np.ndarray) -> list[int]:
        """Sums v over each group, in units of 2^-30: m integers. A group without an example has 0.

        Guarantee: one example more or less moves the entries by at most 2^30 in L1 norm, the move of a
        displaced row included (`batches.placement`); exact over processes.

        >>> from hf_dpzero.privacy.group_losses import PerStepGroups
        >>> two = PerStepGroups(names=("a", "b"), shares=(0.5, 0.5), loss_bound=2.0)
        >>> [round(n / 2**30 * (1 + 2**-8), 6) for n in two.total(np.array([2.0, 9.0, 0.5]), [0, 0, 1])]
        [2.0, -0.5]
        """
        values = self.contributions(losses, groups)
        of = np.asarray(groups, dtype=np.int64)
        return [int(values[of == i].sum()) for i in range(self.num_groups)]

    def scales(self, batch_size: float) -> np.ndarray:
        """Returns loss units of a contribution of 1: b / (2 B pi_i), float64 [m]; B is public."""
        return self.loss_bound / (2 * batch_size * np.asarray(self.shares))

    def default_rate(self, steps: int) -> float:
        """Returns sqrt(2 log m / T) / b, best for T multiplicative updates with gains in [0, b]."""
        return math.sqrt(2 * math.log(max(self.num_groups, 2)) / steps) / self.loss_bound

    def softmax(self, sums: np.ndarray, batch_size: float, steps: int) -> np.ndarray:
        """Returns y after the contributions `sums`, float64 [m] in units of 1: adds up to 1."""
        rate = self.default_rate(steps) if self.rate is None else self.rate
        exponents = rate * (1 + DISPLACEMENT) * self.scales(batch_size) * sums
        odds = np.exp(exponents - exponents.max())
        return odds / odds.sum()

    def example_weights(self, y: np.ndarray) -> np.ndarray:
        """Returns y_i / pi_i, float64 [m]: what an example of each group counts with."""
        return np.asarray(y) / np.asarray(self.shares)

    def check(self, plan: PrivacyPlan) -> None:
        """Refuses what has no account in `plan` together with the release, or no example to weigh.

        Raises:
          ValueError: says what to use instead.
        """
        mechanism, how = plan.mechanism, f"group_robust.weights={self.name!r}"
        if isinstance(mechanism, NotNoised):
            raise ValueError(
                f"{how} with method {mechanism.name!r}, which weighs no example: use "
                f"{mechanism.private_counterpart!r} (with noise_multiplier=0 for a run without privacy)."
            )
        if mechanism.name == "dpgd-0th":
            raise ValueError(
                f"{how} with method 'dpgd-0th', whose release is a whole vector: use 'dpzero'."
            )
        if mechanism.distribution != "gaussian" and self.num_values:
            raise ValueError(
                f"{how} with {mechanism.distribution} noise has no common account: use "
                "noise_distribution='gaussian', or group_robust.weights='balanced'."
            )
        if getattr(mechanism, "clipping", "fixed") == "averaged":
            raise ValueError(
                f"{how} with clipping='averaged', which clips means of several examples, whose weights "
                "would not stand before the clip: use clipping='fixed' or 'adaptive'."
            )
        if plan.correlation is not None and self.num_values:
            raise ValueError(
                f"{how} with correlated_noise.kind={plan.correlation.kind!r} has no common account: use "
                "group_robust.weights='balanced', or independent noise."
            )

    def parts(
        self, spec: StepSpec, multiplier: float, sampler: Sampler, steps: int, count: int
    ) -> tuple[Part, ...]:
        """Returns what the release costs beside the steps' own Gaussians, as the accounting sees it.

        Args:
          spec: of one step of the run.
          multiplier: the weights' part's, over the sensitivity; 0 without noise.
          sampler: of the run.
          steps: T.
          count: completed steps.

        Returns:
          Unamplified Gaussian events; none where it is joint, or costs nothing.
        """
        return ()

    def player(self, plan: PrivacyPlan) -> GroupPlayer:
        """Makes what keeps the state of a run of `plan` and makes its releases."""
        return GroupPlayer(self.num_groups)


class GroupPlayer:
    """The y-player of a run. This one counts groups alike, y = 1/m, and releases nothing."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups

    def begin(self, new: Sequence[Sequence[float]], noise: NoiseSource) -> np.ndarray:
        """Returns y of the next step, float64 [m]; called once a step, on rank 0.

        Args:
          new: what the ledger got since the last call: one entry, or of a run that resumes all of them.
          noise: the source of randomness.
        """
        return np.full(self.num_groups, 1 / self.num_groups)

    def end(
        self, total: Sequence[int], multiplier: float, step: int, noise: NoiseSource
    ) -> tuple[float, ...]:
        """Returns what the step writes to the ledger, float32 numbers; called once a step, on rank 0.

        Args:
          total: of `GroupLosses.total`, over all processes.
          multiplier: of the step's weights' part, over its sensitivity; 0 for no noise.
          step: t, from 0.
          noise: the source.
        """
        return ()


@dataclass(frozen=True, kw_only=True)
class BudgetedGroups(GroupLosses):
    """Base of those whose release costs a share of the run's budget.

    Attributes:
      budget: s in (0, 1), of the sum of z^-2 (z the multipliers) the groups' share.
    """

    budget: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-6 <= self.budget <= 1 - 1e-6:
            raise ValueError(
                f"budget={self.budget!r} of the groups must be in (0, 1): the share of the privacy "
                "budget that their losses cost, e.g. 0.1."
            )

    @property
    def odds(self) -> float:
        """Returns s / (1 - s): precision of the groups' part over that of the weights' part."""
        return self.budget / (1 - self.budget)

    def check(self, plan: PrivacyPlan) -> None:
        """Refuses as the base does, and batches that an example may be in at any step.

        The latter where releases build on all steps before, and unless they are joint they do.
        """
        super().check(plan)
        if self.joint:
            return
        how = f"group_robust.weights={self.name!r}"
        if plan.sampler.name not in ("fixed_batches", "full_batch"):
            raise ValueError(
                f"{how} with sampling={plan.sampler.name!r}: an example's loss stays in all later "
                "releases of the groups, so they are not amplified by sampling, and an example that may "
                "be in any batch may move all of them. Use sampling='fixed_batches', or "
                "group_robust.weights='per_step', which is amplified."
            )
        if plan.noise_schedule is not None:
            raise ValueError(
                f"noise_schedule={plan.noise_schedule} with {how}, whose noise is that of the whole "
                "run: leave it out, or use group_robust.weights='per_step'."
            )
        if plan.accountant == "advanced_composition":
            raise ValueError(
                f"{how} with accountant='advanced_composition', which knows equal steps only: use "
                "'pld'."
            )

    def multiplier(self, weights: float, participations: int = 1) -> float:
        """Returns z_g for the weights' part's multiplier and E; 0 for 0."""
        z = weights / math.sqrt(self.odds * participations)
        what = "the groups' noise multiplier, which follows from group_robust.budget,"
        return check_multiplier(what, z)


def noised(
    total: Sequence[int], multiplier: float, step: int, noise: NoiseSource
) -> tuple[float, ...]:
    """Returns the totals with discrete Gaussian noise of deviation `multiplier`, in units of 1; float32.

    Args:
      total: integers in units of 2^-30.
      multiplier: over the sensitivity of 2^30; 0 for no noise.
      step: insecure sources use it.
      noise: the source.
    """
    draws = [0] * len(total)
    if multiplier:
        scale = math.ldexp(multiplier, GRID_BITS)
        draws = noise.gaussian(scale, len(total), step + GROUP_STREAM)
    return float32s(math.ldexp(int(n) + z, -GRID_BITS) for n, z in zip(total, draws, strict=True))
