"""A client's own privacy plan: which of its rows take part in a round, and what that costs them.

Two ways to take part:

  sampled  each round draws the client's rows afresh by the recipe's sampler, whose key only the client
           knows. A row may take part in every round: the plan composes all rounds in which the client
           released.
  once     round r takes the r-th block of the client's rows, so that a row takes part in one round only:
           one pass over a stream, the online setting of Zhang, Zhu, Fay and Johansson ("Locally
           Differentially Private Online Federated Learning With Correlated Noise"). Blocks are disjoint
           and fixed beforehand, so exchanging a row changes one release, whatever the number of rounds:
           parallel composition, one Gaussian release of sensitivity 2C. This compares data sets of equal
           size; under add-or-remove all later blocks would move.

The guarantee holds against the server and everybody who reads the messages. It is for one row of one
client; all rows of a client together are not covered.
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hf_dpzero.federated.messages import MOST_RELEASES
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import (
    PoissonSampler,
    TruncatedPoissonSampler,
    new_sampler_key,
    place_order,
)


class PlanError(ValueError):
    """A client, or a recipe, without a plan; says why, and nothing of any row."""


Participation = Literal["sampled", "once"]
PARTICIPATIONS: tuple[Participation, ...] = ("sampled", "once")
DRAWN_AFRESH = ("poisson", "truncated_poisson", "fixed_size_without_replacement", "full_batch")
"""Samplings whose rounds are independent of each other: the key of each round is its own, and rounds
may be missed."""
_TAIL = 50.0  # an honest message is refused with probability below 2 exp(-50) = 4e-22


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """One client's plan over all rounds.

    Attributes:
      plan: the releases that one row may be part of: all rounds (`sampled`), or one (`once`).
      num_examples: n_i, the client's rows; public.
      rounds: R, at most so many releases.
      participation: see the module.
      delta: at which epsilon is stated.
    """

    plan: PrivacyPlan
    num_examples: int
    rounds: int
    participation: Participation
    delta: float

    @property
    def mechanism(self) -> Any:
        """Clip, noise and divisor of this client's releases: a `ScalarMechanism`."""
        return self.plan.mechanism

    def steps_of(self, released: int) -> int:
        """Releases that a row can have been part of, when the client has made `released` of them."""
        return min(released, 1) if self.participation == "once" else released

    def epsilon(self, released: int) -> float:
        """What `released` rounds cost any one row, at `delta`; 0 for none."""
        return self.plan.epsilon(self.delta, at=self.steps_of(released))

    def rows(self, number: int) -> np.ndarray:
        """The client's rows in a round, int64 in [0, n_i); drawn with a key that nobody keeps.

        They come in the secret order in which they take their places in passes (`batches.placement`).
        """
        if self.participation == "once":
            block = self.plan.sampler.num_examples
            chosen = np.arange(number * block, (number + 1) * block, dtype=np.int64)
        else:
            chosen = self.plan.sampler.batch(number, new_sampler_key())
        return chosen[place_order(len(chosen), number, new_sampler_key())]

    def largest_value(self) -> float:
        """A bound on each value of an honest message; exceeded with probability below 1e-21.

        (m C + t sigma C) / B with m the largest batch (Bernstein's inequality for Poisson sampling) and
        t the noise's tail, each at exp(-50). Not a privacy statement: it keeps broken clients out.
        """
        mechanism, sampler = self.mechanism, self.plan.sampler
        most, expected = float(sampler.num_examples), float(sampler.expected_batch_size)
        if isinstance(sampler, TruncatedPoissonSampler):
            most = float(sampler.max_batch_size)
        elif isinstance(sampler, PoissonSampler):
            third = _TAIL / 3
            most = min(most, expected + third + math.sqrt(third**2 + 2 * _TAIL * expected))
        elif sampler.name == "fixed_size_without_replacement":
            most = expected
        tail = _TAIL + math.log(2 * mechanism.num_directions)
        if mechanism.distribution == "gaussian":
            tail = math.sqrt(2 * tail)
        return mechanism.clip * (most + tail * mechanism.noise_multiplier) / expected * (1 + 1e-6)


def check_settings(config: Any) -> None:
    """Refuses settings that rounds of many clients have no accounting for.

    Args:
      config: a `DPZeroConfig`.

    Raises:
      PlanError: names the setting and what to do instead.
    """
    if config.method != "dpzero":
        raise PlanError(
            f"method={config.method!r}: a client sends K noised numbers along public directions, which "
            "method: dpzero releases and no other does. Use it (noise_multiplier: 0 for a run without "
            "noise)."
        )
    if config.clipping != "fixed":
        raise PlanError(
            f"clipping={config.clipping!r}: clients would clip differently, and their mean would be of "
            "different things; use clipping: fixed, and give clip and num_directions too, whose "
            "defaults are others there."
        )
    for name in ("noise", "clip", "smoothing"):
        if (schedule := getattr(config.schedules, name)) is not None:
            raise PlanError(
                f"schedules.{name}={schedule!r}: a client that misses a round has spent other steps "
                "than the first ones, for which there is no accounting here; leave it out."
            )
    if config.sampling not in DRAWN_AFRESH:
        raise PlanError(
            f"sampling={config.sampling!r}: clients draw each round afresh and may miss rounds, and its "
            f"account needs one order for the whole run; use one of {', '.join(DRAWN_AFRESH)}."
        )
    if config.correlated_noise.kind != "none":
        raise PlanError(
            f"correlated_noise.kind={config.correlated_noise.kind!r}: a client that misses a round "
            "would break the sequence that its noise is accounted for; leave it out."
        )
    refused = {
        "group_robust.column": "clients do not know each other's groups; leave it out",
        "extends_run": "clients keep ledgers of their own and extend no run; leave it out",
        "testing.sampler_key": "each client draws its own, which nobody may know; leave it out",
        "testing.log_private_diagnostics": "un-noised statistics stay on the client; leave it out",
    }
    for name, why in refused.items():
        if value := operator.attrgetter(name)(config):
            raise PlanError(f"{name}={value!r}: {why}.")


def check_rounds(rounds: int) -> int:
    """R, if a run can have so many rounds.

    Raises:
      PlanError: none, or more than fit into one message.
    """
    if not 1 <= rounds <= MOST_RELEASES:
        raise PlanError(
            f"max_steps={rounds}: give a number of rounds (--rounds) from 1 to {MOST_RELEASES}: the "
            "releases of all rounds must fit into one message to a client that comes late."
        )
    return rounds


def local_plan(
    config: Any,
    num_examples: int,
    *,
    sampling_probability: float,
    participation: Participation = "sampled",
) -> LocalPlan:
    """The plan of a client with so many rows.

    Args:
      config: the recipe's `DPZeroConfig`; max_steps is R, target_epsilon or noise_multiplier are each
        client's own.
      num_examples: n_i.
      sampling_probability: q, the same on every client; its expected batch is q n_i.
      participation: see the module.

    Returns:
      The plan, calibrated if the recipe has a target.

    Raises:
      PlanError: no rows, too few of them, or settings without accounting.
    """
    check_settings(config)
    if participation not in PARTICIPATIONS:
        raise PlanError(f"participation={participation!r}; use one of {', '.join(PARTICIPATIONS)}.")
    rounds = check_rounds(int(config.max_steps))
    if num_examples < 1:
        raise PlanError(
            "the client has no rows: an empty shard has nothing to take part with, and its messages "
            "would be noise alone. Leave the client out, or give it rows."
        )
    own, rows = copy.copy(config), num_examples
    if participation == "once":
        rows = _block(config, num_examples, rounds)
        own.sampling, own.expected_batch_size, own.max_batch_size, own.max_steps = (
            "full_batch",
            None,
            None,
            1,
        )
    elif own.sampling != "full_batch":
        expected = sampling_probability * num_examples
        if own.sampling == "fixed_size_without_replacement":
            expected = float(max(1, round(expected)))
        if own.max_batch_size is not None:
            cap = own.max_batch_size / float(own.expected_batch_size)
            own.max_batch_size = max(1, math.ceil(cap * expected))
        own.expected_batch_size = expected
    return LocalPlan(
        plan=own.plan(rows),
        num_examples=num_examples,
        rounds=rounds,
        participation=participation,
        delta=config.delta(num_examples),
    )


def check_probability(config: Any, offered: Any, own: float) -> float:
    """Refuses a probability that a server may not choose for a client.

    With a target epsilon the noise follows q, so any q will do that leaves it something to hide. With a
    noise multiplier epsilon follows q, so the client's own q is the most it agreed to.

    Args:
      config: the client's `DPZeroConfig`.
      offered: q of the server's contract.
      own: q of the client's settings; above 1 it counts as 1.

    Returns:
      q.

    Raises:
      PlanError: no number in (0, 1], more than the client's own where its noise is fixed, or so small
        that delta alone would pay for rows that are published without noise.
    """
    number = isinstance(offered, int | float) and not isinstance(offered, bool)
    if not number or not 0 < offered <= 1:
        raise PlanError(f"the server's sampling_probability={offered!r} is no number in (0, 1].")
    most = min(1.0, own) * (1 + 1e-9)
    if config.target_epsilon is None and offered > most:
        raise PlanError(
            f"the server's sampling_probability={offered:.6g} is above this client's own {own:.6g}, and "
            "with a fixed noise_multiplier that costs more than the client agreed to: set "
            "target_epsilon, or a larger sampling_probability on the client."
        )
    delta = config.target_delta
    if config.target_epsilon is not None and delta and offered * config.max_steps <= delta:
        raise PlanError(
            f"the server's sampling_probability={offered:.6g} over {config.max_steps} rounds is below "
            f"delta={delta:.6g}: the plan would hold without noise, by publishing rows so seldom that "
            "delta pays for it. Use a larger expected_batch_size."
        )
    return float(offered)


def _block(config: Any, num_examples: int, rounds: int) -> int:
    if config.neighboring_relation == "add_or_remove_one":
        raise PlanError(
            "participation=once with neighboring_relation=add_or_remove_one: one row less moves all "
            "later ones to other rounds; use neighboring_relation: replace_one (sensitivity 2C)."
        )
    if num_examples < rounds:
        raise PlanError(
            f"{num_examples} rows for {rounds} rounds with participation=once, where each row takes "
            f"part in one round: use at most {num_examples} rounds, or participation=sampled."
        )
    return num_examples // rounds
