"""What a client agrees to: its own privacy plan, and the contract that it shares with the server.

A plan says which of the client's rows take part in a round, and what that costs them:

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

The contract is the header of the server's ledger: base model, directions, update rule, and what all
clients' plans have in common. Sizes and noise are each client's own and stand in its plan.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hf_dpzero.federated.messages import DIGEST_BYTES, MAX_RELEASES
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import flat
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.mechanisms.adaptive import MIN_CLIP_CHANGE
from hf_dpzero.privacy.mechanisms.base import MAX_CLIP
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import (
    PoissonSampler,
    TruncatedPoissonSampler,
    new_sampler_key,
    place_order,
)
from hf_dpzero.settings.defaults import CLASSIC

if TYPE_CHECKING:
    from hf_dpzero.settings.config import DPZeroConfig


class PlanError(ValueError):
    """A client, or a recipe, without a plan; says why, and nothing of any row."""


class ContractError(LedgerError):
    """Two sides that are not of one run; says in what they differ."""


Participation = Literal["sampled", "once"]
PARTICIPATIONS: tuple[Participation, ...] = ("sampled", "once")

_DRAWN_AFRESH = ("poisson", "truncated_poisson", "fixed_size_without_replacement", "full_batch")
_MISSED_ROUND = (
    "a client that misses a round has spent other steps than the first ones, for which there is no "
    "accounting here; leave it out"
)
_ALLOWED: dict[str, tuple[tuple[str | bool | None, ...], str]] = {
    "method": (
        ("dpzero",),
        "a client sends K noised numbers along public directions, which method: dpzero releases and no "
        "other does. Use it (noise_multiplier: 0 for a run without noise)",
    ),
    "clipping": (
        ("fixed",),
        "clients would clip differently, and their mean would be of different things; use clipping: "
        "fixed, or leave clipping and clip out: public rows then choose a clip for all",
    ),
    "load_best_model_at_end": ((False,), "a run ends with its last round; leave it out"),
    "schedules.noise": ((None,), _MISSED_ROUND),
    "schedules.clip": ((None,), _MISSED_ROUND),
    "schedules.smoothing": ((None,), _MISSED_ROUND),
    "sampling": (
        _DRAWN_AFRESH,
        "clients draw each round afresh and may miss rounds, and its account needs one order for the "
        f"whole run; use one of {', '.join(_DRAWN_AFRESH)}",
    ),
    "correlated_noise.kind": (
        ("none",),
        "a client that misses a round would break the sequence that its noise is accounted for; leave "
        "it out",
    ),
    "group_robust.column": ((None,), "clients do not know each other's groups; leave it out"),
    "extends_run": ((None,), "clients keep ledgers of their own and extend no run; leave it out"),
    "testing.sampler_key": ((None,), "each client draws its own, known to nobody; leave it out"),
    "testing.log_private_diagnostics": ((False,), "they stay on the client; leave it out"),
}
"""By setting: the values that rounds of many clients have an account for, and why no others."""

CHOSEN_BY_SERVER = ("direction_key", "sampling_probability", "median_norm")
"""What a client takes from the server, with the clip where its recipe leaves it out. The guarantee holds
along any directions; of probabilities `check_probability` refuses those that would cost more than the
client agreed to, and of clips `check_clip` those that its model was not checked for."""

SMALLEST_CLIP = CLASSIC["clip"] * MIN_CLIP_CHANGE
"""For which a model is checked whose clip is left out, as where it adapts."""

_NOT_COMPARED = ("versions", "format", "version")
_TAIL = 50.0  # an honest message is refused with probability below 2 exp(-50) = 4e-22


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """One client's plan over all rounds.

    Attributes:
      plan: the releases that one row may be part of: all rounds (`sampled`), or one (`once`).
      num_examples: n_i, the client's rows; public.
      rounds: R, at most so many releases.
    """

    plan: PrivacyPlan
    num_examples: int
    rounds: int
    participation: Participation
    delta: float

    @property
    def mechanism(self) -> ScalarMechanism:
        """Clip, noise and divisor of this client's releases."""
        mechanism = self.plan.mechanism
        if not isinstance(mechanism, ScalarMechanism):  # a stranger declared it
            raise TypeError(f"a plan of {mechanism.name}, which releases no K numbers")
        return mechanism

    def steps_of(self, released: int) -> int:
        """Counts the releases that a row can have been part of, of so many that the client made."""
        return min(released, 1) if self.participation == "once" else released

    def epsilon(self, released: int) -> float:
        """Returns what `released` rounds cost any one row, at `delta`; 0 for none."""
        return self.plan.epsilon(self.delta, at=self.steps_of(released))

    def rows(self, number: int) -> np.ndarray:
        """Draws the client's rows of a round, int64 in [0, n_i), with a key that nobody keeps.

        They come in the secret order in which they take their places in passes (`batches.placement`).
        """
        if self.participation == "once":
            block = self.plan.sampler.num_examples
            chosen = np.arange(number * block, (number + 1) * block, dtype=np.int64)
        else:
            chosen = self.plan.sampler.batch(number, new_sampler_key())
        return chosen[place_order(len(chosen), number, new_sampler_key())]

    def largest_value(self) -> float:
        """Bounds each value of an honest message; exceeded with probability below 1e-21.

        (m C + t sigma C) / B with m the largest batch (Bernstein's inequality for Poisson sampling) and
        t the noise's tail, each at exp(-50). Not a privacy statement: it keeps broken clients out.
        """
        mechanism, sampler = self.mechanism, self.plan.sampler
        largest, expected = float(sampler.num_examples), float(sampler.expected_batch_size)
        if isinstance(sampler, TruncatedPoissonSampler):
            largest = float(sampler.max_batch_size)
        elif isinstance(sampler, PoissonSampler):
            third = _TAIL / 3
            largest = min(largest, expected + third + math.sqrt(third**2 + 2 * _TAIL * expected))
        elif sampler.name == "fixed_size_without_replacement":
            largest = expected
        tail = _TAIL + math.log(2 * mechanism.num_directions)  # a union bound over K, both signs
        if mechanism.distribution == "gaussian":
            tail = math.sqrt(2 * tail)
        # 1e-6: values are rounded to float32 before they are compared
        return (
            mechanism.clip * (largest + tail * mechanism.noise_multiplier) / expected * (1 + 1e-6)
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-safe values; `from_dict` reads them."""
        return {**vars(self), "plan": self.plan.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LocalPlan:
        """Reads what `to_dict` returned."""
        return cls(**{**values, "plan": PrivacyPlan.from_dict(values["plan"])})


def check_settings(config: DPZeroConfig) -> None:
    """Refuses settings that rounds of many clients have no accounting for."""
    for name, (allowed, why) in _ALLOWED.items():
        if (value := operator.attrgetter(name)(config)) not in allowed:
            raise PlanError(f"{name}={value!r}: {why}.")
    if not 1 <= config.max_steps <= MAX_RELEASES:
        raise PlanError(
            f"max_steps={config.max_steps}: give a number of rounds (--rounds) from 1 to "
            f"{MAX_RELEASES}: the releases of all rounds must fit into one message to a client that "
            "comes late."
        )


def local_plan(
    config: DPZeroConfig,
    num_examples: int,
    *,
    sampling_probability: float,
    participation: Participation = "sampled",
) -> LocalPlan:
    """Makes the plan of a client with so many rows.

    Args:
      config: of the recipe; max_steps is R, target_epsilon or noise_multiplier are each client's own.
      num_examples: n_i.
      sampling_probability: q, the same on every client; its expected batch is q n_i.

    Returns:
      The plan, calibrated if the recipe has a target.
    """
    check_settings(config)
    if participation not in PARTICIPATIONS:
        raise PlanError(f"participation={participation!r}; use one of {', '.join(PARTICIPATIONS)}.")
    if num_examples < 1:
        raise PlanError(
            "the client has no rows: an empty shard has nothing to take part with, and its messages "
            "would be noise alone. Leave the client out, or give it rows."
        )
    rounds, own, rows = config.max_steps, copy.copy(config), num_examples
    if participation == "once":
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
        # a row is in one block, so its plan is one step over that block
        rows = num_examples // rounds
        own.sampling, own.max_batch_size, own.max_steps = "full_batch", None, 1
    elif own.sampling != "full_batch":
        expected = sampling_probability * num_examples
        if own.sampling == "fixed_size_without_replacement":
            expected = float(max(1, round(expected)))
        if own.max_batch_size is not None:
            # the recipe's cap is on all clients' batches together: keep its ratio to the expected one
            assert own.expected_batch_size is not None  # a made configuration has one
            cap = own.max_batch_size / own.expected_batch_size
            own.max_batch_size = max(1, math.ceil(cap * expected))
        own.expected_batch_size = expected
    return LocalPlan(
        plan=own.plan(rows),
        num_examples=num_examples,
        rounds=rounds,
        participation=participation,
        delta=config.delta(num_examples),
    )


def check_probability(config: DPZeroConfig, offered: float | None, own: float) -> float:
    """Refuses a probability that a server may not choose for a client.

    With a target epsilon the noise follows q, so any q will do that leaves it something to hide. With a
    noise multiplier epsilon follows q, so the client's own q is the largest it agreed to.

    Args:
      config: the client's.
      offered: q of the server's contract, whatever JSON had there.
      own: q of the client's settings; above 1 it counts as 1.

    Raises:
      PlanError: no number in (0, 1], more than the client's own where its noise is fixed, or so small
        that delta alone would pay for rows that are published without noise.
    """
    number = isinstance(offered, int | float) and not isinstance(offered, bool)
    if offered is None or not number or not 0 < offered <= 1:
        raise PlanError(f"the server's sampling_probability={offered!r} is no number in (0, 1].")
    # 1e-9: both sides divide B by N, in floats
    if config.target_epsilon is None and offered > min(1.0, own) * (1 + 1e-9):
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


def check_clip(offered: object) -> float:
    """Returns a server's clip, if the client's model was checked for it; epsilon follows no clip."""
    if not isinstance(offered, float) or not SMALLEST_CLIP <= offered <= MAX_CLIP:
        raise PlanError(f"the server's clip={offered!r} is no number from {SMALLEST_CLIP:g} on.")
    return offered


def contract_digest(contract: Mapping[str, Any]) -> bytes:
    """Returns the first 16 bytes of the SHA-256 of the contract's canonical JSON, versions left out."""
    # NaN is no JSON, and two contracts that hold one would never be equal
    text = json.dumps(_compared(contract), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]


def adopt(own: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contract that a client goes by: the server's.

    Raises:
      ContractError: it and the client's own differ in more than `CHOSEN_BY_SERVER`.
    """
    mine, theirs = (_compared(side, but=CHOSEN_BY_SERVER) for side in (own, offered))
    if mine != theirs:
        here, there = flat(mine), flat(theirs)
        changed = [k for k in sorted(here.keys() | there.keys()) if here.get(k) != there.get(k)]
        # names with dots can make two different contracts flat alike
        words = "; ".join(
            f"{k}: {_short(there.get(k))} there, {_short(here.get(k))} here" for k in changed
        )
        raise ContractError(
            "the server's run is another one than this client's recipe describes "
            f"({words or 'an entry that reads in two ways'}). Use the same recipe, base model and "
            "settings on both sides."
        )
    if missing := [name for name in CHOSEN_BY_SERVER if name not in offered]:
        raise ContractError(f"the server's contract lacks {', '.join(missing)}.")
    return dict(offered)


def check_plan(contract: Mapping[str, Any], local: LocalPlan) -> None:
    """Refuses a client whose declared plan is not the contract's."""
    mechanism, sampler = local.mechanism, local.plan.sampler
    common = {"num_directions": contract["num_directions"], "method": "dpzero"}
    common |= contract["federated"]
    declared: dict[str, str | float] = {
        "rounds": local.rounds,
        "participation": local.participation,
        "clip": mechanism.clip,
        "noise_distribution": mechanism.distribution,
        "neighboring_relation": local.plan.relation,
        "num_directions": mechanism.num_directions,
        "method": mechanism.name,
        "steps": local.plan.steps,
    }
    if local.participation == "once":  # a plan is of one block
        common |= {"steps": 1, "rows of a round": local.num_examples // local.rounds}
        declared["rows of a round"] = sampler.num_examples
    else:
        expected = contract["sampling_probability"] * local.num_examples
        common |= {"steps": local.rounds, "rows": local.num_examples, "expected batch": expected}
        declared |= {"sampling": sampler.name, "rows": sampler.num_examples}
        if abs(mechanism.expected_batch_size - expected) > 1:  # a fixed size is rounded
            declared["expected batch"] = mechanism.expected_batch_size
    wrong = [
        f"{name} {value} and not {common[name]}"
        for name, value in declared.items()
        if value != common[name]
    ]
    if wrong:
        raise ContractError(
            f"another plan than the contract's: {'; '.join(wrong)}. Clients of one run share clip, "
            "directions, rounds and sampling; only rows and noise are their own."
        )


def _compared(contract: Mapping[str, Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a contract as JSON brings it to the other side, without what may differ."""
    plain: dict[str, Any] = json.loads(json.dumps(contract))
    return {k: v for k, v in plain.items() if k not in (*_NOT_COMPARED, *but)}


def _short(value: str | float | list[Any] | None) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) < 80 else text[:80] + "..."
