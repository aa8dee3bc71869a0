"""Audits a plan: many runs on the worst pair of neighbours, and a test that tells them apart.

The pair differs in one row, the canary, whose finite differences are far above the clip, equally large
along all K directions; under `replace_one` the other data set has the opposite row in its place. Signs
change from direction to direction and step to step, so that noise which they share cancels. All other
rows add nothing: whoever knows them subtracts what they add. Sampler, clip, sum, noise and release are
the package's own. The test is the likelihood ratio of what is released, summed over the steps, by the
noise that the plan states. Nothing here asks the accountant but for the claim.

A second test asks for the same release again and subtracts it. It is worse where noise is secret, and
never wrong where noise follows from the step.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_dpzero.auditing.bounds import Bound, lower_bound, upper_limit
from hf_dpzero.privacy.accounting import epsilon_after
from hf_dpzero.privacy.mechanisms import AdaptiveScalarMechanism, ScalarMechanism
from hf_dpzero.privacy.mechanisms.adaptive import COUNT_DISPLACEMENT
from hf_dpzero.privacy.noise import Distribution, NoiseSource, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FullBatchSampler, PoissonSampler, Sampler, new_sampler_key

CONFIDENCES = (0.95, 1 - 1e-6)
"""Of the bounds: the first says how tight the claim is, the last whether it is refuted."""

CANARY = 0
"""Position of the row that the neighbours differ in."""

FAR = 2.0**10
"""Norm of the canary's finite differences, in clips."""

BLOCK = 4096
"""Draws of noise that are made together, which takes a sixth of the time."""


class _InBlocks(NoiseSource):
    """Hands out the draws of another source, made `BLOCK` at a time at the step of the first."""

    name, secure = "in_blocks", False

    def __init__(self, source: NoiseSource) -> None:
        self.source, self.left = source, dict[tuple[str, float], list[int]]()

    def _integers(
        self, distribution: Distribution, scale: float, size: int, step: int
    ) -> list[int]:
        left = self.left.setdefault((distribution, scale), [])
        if len(left) < size:
            left += getattr(self.source, distribution)(scale, BLOCK + size, step)
        drawn = left[-size:]
        del left[-size:]
        return drawn

    def normals(self, size: int, step: int, part: int) -> np.ndarray:
        return self.source.normals(size, step, part)


@dataclass(frozen=True)
class Neighbours:
    """A step's sum and its release without noise, in three cases: no canary, and either data set's.

    Attributes:
      mechanism: the plan's.
      sums: three lists of integers, as `clip_sum` returns them.
      means: [3, V].
      scale: of the stated noise on each released number, [V].
      laplace: whether that noise is Laplace's.
    """

    mechanism: ScalarMechanism | AdaptiveScalarMechanism
    sums: tuple[Sequence[int], ...]
    means: np.ndarray
    scale: np.ndarray
    laplace: bool

    def log_ratio(self, released: np.ndarray, q: float) -> np.ndarray:
        """Returns log P(released | with the row) / P(released | without it), [...] of [..., V].

        Each is a mixture: the step has its row with probability q.
        """
        moved = np.abs(released[..., None, :] - self.means) / self.scale
        logs = -(moved if self.laplace else moved**2 / 2).sum(axis=-1)
        out, drawn = (math.log1p(-q) if q < 1 else -math.inf), math.log(q)
        with_row, without = (np.logaddexp(out + logs[..., 0], drawn + logs[..., i]) for i in (2, 1))
        return with_row - without


def neighbours_of(plan: PrivacyPlan) -> Neighbours:
    """Makes the canary and puts it through the plan's own clip."""
    mechanism = plan.mechanism
    assert isinstance(mechanism, ScalarMechanism | AdaptiveScalarMechanism)
    k, laplace = mechanism.num_directions, mechanism.distribution == "laplace"
    norm = k if laplace else math.sqrt(k)  # Laplace's clip bounds the sum of absolute values
    row = torch.full((1, k), FAR * mechanism.clip / norm, dtype=torch.float64)
    row[:, 1::2] *= -1
    nothing = row[:0]
    without = -row if plan.relation == "replace_one" else nothing
    sums = tuple(mechanism.clip_sum(x) for x in (nothing, without, row))
    exact = replace(mechanism, noise_multiplier=0.0)
    means = np.array([exact.release(total, 0, SecureNoise()) for total in sums])
    scale = np.full(means.shape[1], mechanism.noise_scale / mechanism.divisor)
    if isinstance(mechanism, AdaptiveScalarMechanism):
        count = mechanism.clip_count_noise * (1 + mechanism.rows_per_unit * COUNT_DISPLACEMENT)
        scale[-1] = count / mechanism.divisor
    return Neighbours(mechanism, sums, means, scale, laplace)


def audited_plan(plan: PrivacyPlan, steps: int, every_row: bool) -> PrivacyPlan:
    """Returns a plan of a few steps of the run, at the noise of its least noisy one.

    Args:
      plan: of the whole run.
      steps: at most the run's.
      every_row: whether all steps take every row, which then is the canary alone.

    Raises:
      ValueError: the plan is not private, or releases what is not audited.
    """
    if not plan.private:
        raise ValueError(
            f"method {plan.mechanism.name!r} with noise_multiplier={plan.mechanism.noise_multiplier} is "
            "not private: there is no claim to audit. Give target_epsilon or a noise_multiplier above 0."
        )
    scalar = type(plan.mechanism) in (ScalarMechanism, AdaptiveScalarMechanism)
    if not scalar or plan.correlation is not None or plan.groups is not None:
        raise ValueError(
            f"the audit knows dpzero with clipping fixed or adaptive and independent noise; this plan "
            f"has {plan.mechanism.name!r}, noise correlation {plan.correlation}, groups {plan.groups}."
        )
    if not 1 <= steps <= plan.steps:
        raise ValueError(f"steps={steps} is outside 1..{plan.steps}, the steps of the run.")
    mechanism = plan.mechanism_at(int(np.argmin(plan.multipliers)))
    sampler: Sampler = plan.sampler
    if every_row:
        mechanism = replace(mechanism, expected_batch_size=1.0)
        sampler = FullBatchSampler(num_examples=1, expected_batch_size=1)
    return replace(
        plan,
        mechanism=mechanism,
        sampler=sampler,
        steps=steps,
        noise_schedule=None,
        clip_schedule=None,
        after=(),
    )


def scores(
    plan: PrivacyPlan,
    runs: int,
    noise: NoiseSource,
    key: bytes,
    with_row: bool,
    again: bool = False,
) -> np.ndarray:
    """Runs the plan many times on one of the two data sets, and scores each run.

    Args:
      plan: as `audited_plan` returns it. An adaptive clip stays at its first value.
      runs: n, independent of each other.
      noise: where the noise comes from; step s of run r asks it for a step of its own.
      key: secret, 32 bytes; every run has a sampler key made from it.
      with_row: which data set.
      again: whether the score is of the release less another one of nothing, of the same step.

    Returns:
      float64 [n], log-likelihood ratios; larger ones speak for the row.
    """
    pair, q = neighbours_of(plan), plan.sampler.sampling_probability
    case, values = (2 if with_row else 1), pair.means.shape[1]
    # Turns steps round (Thue and Morse): noise that they share cancels. A count has no other side.
    turn = np.ones((plan.steps, values), dtype=np.int64)
    odd = [step for step in range(plan.steps) if step.bit_count() % 2]
    turn[odd, : pair.mechanism.num_directions] = -1
    sums = (np.array(pair.sums)[:, None] * turn).tolist()
    released = np.empty((runs, plan.steps, values))
    blocks, first = _InBlocks(noise), int(with_row) * runs * plan.steps
    for place, drawn in enumerate(_drawn(plan, runs, key + bytes([with_row]))):
        run, step = divmod(place, plan.steps)
        total = sums[case if drawn else 0][step]
        released[run, step] = pair.mechanism.release(total, first + place, blocks)
    if again:
        blocks = _InBlocks(noise)
        for place in range(runs * plan.steps):
            nothing = pair.mechanism.release(pair.sums[0], first + place, blocks)
            released[divmod(place, plan.steps)] -= nothing - pair.means[0]
    return pair.log_ratio(released * turn, q).sum(axis=1)


def _drawn(plan: PrivacyPlan, runs: int, secret: bytes) -> Iterator[bool]:
    """Says of each step of each run whether it has the canary."""
    for run in range(runs):
        key = hashlib.sha256(secret + run.to_bytes(8, "little")).digest()
        for step in range(plan.steps):
            chosen = plan.sampler.batch(step, key)
            yield bool(len(chosen)) and int(chosen[0]) == CANARY  # they increase


@dataclass(frozen=True, kw_only=True)
class Audit:
    """One claim and what was found.

    Attributes:
      what: was audited, in words.
      steps: of each run.
      sampling_probability: q of a step.
      runs: on each of the two data sets.
      delta: of claim and bounds.
      claim: epsilon by the accountant, an upper bound.
      bounds: lower ones, at each of `CONFIDENCES`.
      seconds: that it took.
    """

    what: str
    steps: int
    sampling_probability: float
    runs: int
    delta: float
    claim: float
    bounds: tuple[Bound, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Says whether the surest bound stays below the claim."""
        return self.bounds[-1].epsilon <= self.claim


def audit(
    plan: PrivacyPlan,
    delta: float,
    runs: int,
    noise: NoiseSource | None = None,
    key: bytes | None = None,
    what: str = "",
    again: bool = False,
    draws: bool = False,
) -> Audit:
    """Audits a plan that `audited_plan` made.

    Guarantee: sound code fails with a probability of at most 1e-6. The Gaussian bound counts where no
    step is sampled and noise is Gaussian.

    Args:
      plan: every step of it is run.
      delta: of the claim.
      runs: on each data set, at least 100.
      noise: default the operating system's, as in training.
      key: default a new one.
      what: for the result.
      again: see `scores`.
      draws: of how many rows a Poisson sampler draws, in place of releases.

    Raises:
      ValueError: too few runs.
    """
    if runs < 100:
        raise ValueError(f"runs={runs} show nothing: give at least 100, e.g. 40000.")
    started, noise, key = time.monotonic(), noise or SecureNoise(), key or new_sampler_key()
    q = plan.sampler.sampling_probability
    if draws:
        bounds = _bounds_of_draws(plan, delta, runs, key)
    else:
        absent, present = (scores(plan, runs, noise, key, side, again) for side in (False, True))
        gaussian = q == 1 and plan.mechanism.distribution == "gaussian" and delta > 0
        bounds = [lower_bound(absent, present, delta, c, gaussian) for c in CONFIDENCES]
    return Audit(
        what=what,
        steps=plan.steps,
        sampling_probability=q,
        runs=runs,
        delta=delta,
        claim=plan.epsilon(delta),
        bounds=tuple(bounds),
        seconds=time.monotonic() - started,
    )


def _bounds_of_draws(plan: PrivacyPlan, delta: float, steps: int, key: bytes) -> list[Bound]:
    """What the accountant says of the least q that explains the rows of so many steps: a binomial."""
    n, bounds = plan.sampler.num_examples, []
    left = steps * n - sum(len(plan.sampler.batch(step, key)) for step in range(steps))
    for confidence in CONFIDENCES:
        share = 1 - float(upper_limit(left, steps * n, 1 - confidence))
        seen = replace(plan.spec, batch_size=max(share * n, 2.0**-30))
        bounds.append(Bound(epsilon_after(seen, 1, delta), confidence, share, 1.0, 1.0))
    return bounds


def audits_of(
    plan: PrivacyPlan,
    delta: float,
    runs: int = 40_000,
    steps: int = 8,
    noise: NoiseSource | None = None,
    key: bytes | None = None,
) -> Iterator[Audit]:
    """Audits one step and a short run of every row, a short run as the plan samples, and its draws.

    Args:
      plan: of the whole run.
      delta: of the run.
      runs: of one step, on each data set; of T steps a T-th of them, so that each audit takes as long.
      steps: T, of the short run; fewer where the run has fewer.
      noise: see `audit`.
      key: see `audit`.

    Raises:
      ValueError: see `audited_plan` and `audit`.
    """
    steps, q = min(steps, plan.steps), plan.sampler.sampling_probability
    if runs < 100 * steps:  # before the first of them
        raise ValueError(f"runs={runs} show nothing of steps={steps}: give at least {100 * steps}.")
    for length in sorted({1, steps}):
        words = "one step" if length == 1 else f"{length} steps"
        few = audited_plan(plan, length, every_row=True)
        yield audit(few, delta, runs // length, noise, key, f"{words}, every row in it")
    if q < 1:
        few = audited_plan(plan, steps, every_row=False)
        yield audit(few, delta, runs // steps, noise, key, f"{words}, q = {q:.3g}")
    if isinstance(plan.sampler, PoissonSampler):
        few, words = audited_plan(plan, 1, every_row=False), f"rows of a step, q = {q:.3g}"
        often = max(100, min(runs, math.ceil(runs / plan.sampler.expected_batch_size)))
        yield audit(few, delta, often, noise, key, words, draws=True)
    few, tenth = audited_plan(plan, 1, every_row=True), max(runs // 10, 100)
    yield audit(few, delta, tenth, noise, key, "one step, less its repetition", again=True)
