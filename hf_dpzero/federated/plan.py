"""What a client agrees to: its own privacy plan, and the contract that it shares with the server.

Each round draws a client's rows afresh by the recipe's sampler, whose key only the client knows; the
plan composes all rounds in which the client released. The guarantee holds against the server and
everybody who reads the messages, for one row of one client.

The contract is the header of the server's ledger: base model, directions, update rule, and what all
clients' plans have in common. Of these and the client's own rows and noise `local_plan` makes the plan.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dpzero.federated.messages import DIGEST_BYTES, MAX_RELEASES
from hf_dpzero.ledger.trajectory import flat
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.mechanisms.adaptive import MIN_CLIP_CHANGE
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
    """No plan for a client, or two sides that are not of one run; says why, and nothing of any row."""


_DRAWN_AFRESH = ("poisson", "truncated_poisson", "fixed_size_without_replacement", "full_batch")
_MISSED_ROUND = "a client that misses a round has spent other steps than the first; leave it out"
_ALLOWED: dict[str, tuple[tuple[str | bool | None, ...], str]] = {
    "method": (
        ("dpzero",),
        "no other releases K numbers along public directions. Use it (noise_multiplier: 0 for a run "
        "without noise)",
    ),
    "clipping": (
        ("fixed",),
        "clients would clip differently; use clipping: fixed, or leave clipping and clip out: public "
        "rows then choose a clip for all",
    ),
    "load_best_model_at_end": ((False,), "a run ends with its last round; leave it out"),
    **{f"schedules.{of}": ((None,), _MISSED_ROUND) for of in ("noise", "clip", "smoothing")},
    "sampling": (
        _DRAWN_AFRESH,
        "clients may miss rounds, and its account needs one order for the whole run; use one of "
        f"{', '.join(_DRAWN_AFRESH)}",
    ),
    "correlated_noise.kind": (("none",), "a missed round would break its sequence; leave it out"),
    "group_robust.column": ((None,), "clients do not know each other's groups; leave it out"),
    "unit_column": ((None,), "each claim is for one row of a client; leave it out"),
    "extends_run": ((None,), "clients keep ledgers of their own and extend no run; leave it out"),
    "budget_file": (
        (None,),
        "each client spends on rows of its own, and the server's file knows none of them; leave it out",
    ),
    "testing.sampler_key": ((None,), "each client draws its own, known to nobody; leave it out"),
    "testing.log_private_diagnostics": ((False,), "they stay on the client; leave it out"),
}
"""By setting: the values that rounds of many clients have an account for, and why no others."""

CHOSEN_BY_SERVER = ("direction_key", "sampling_probability", "median_norm")
"""What a client takes from the server, with the clip where its recipe leaves it out. The guarantee holds
along any directions; of probabilities `check_probability` refuses those that would cost more than the
client agreed to, and `Side` clips that its model was not checked for."""

SMALLEST_CLIP = CLASSIC["clip"] * MIN_CLIP_CHANGE
"""For which a model is checked whose clip is left out, as where it adapts."""

_NOT_COMPARED = ("versions", "format", "version")
_TAIL = 50.0  # an honest message is refused with probability below 2 exp(-50) = 4e-22


@dataclass(frozen=True)
class LocalPlan:
    """One client's plan over all rounds, and the delta that its epsilon is stated at."""

    plan: PrivacyPlan
    delta: float

    @property
    def num_examples(self) -> int:
        """The client's rows, n_i; public."""
        return self.plan.sampler.num_examples

    @property
    def rounds(self) -> int:
        """At most so many releases, R."""
        return self.plan.steps

    @property
    def mechanism(self) -> ScalarMechanism:
        """Clip, noise and divisor of this client's releases."""
        assert isinstance(self.plan.mechanism, ScalarMechanism)  # of method dpzero
        return self.plan.mechanism

    def epsilon(self, released: int) -> float:
        """Returns what `released` rounds cost any one row, at `delta`; 0 for none."""
        return self.plan.epsilon(self.delta, at=released)

    def rows(self, number: int) -> np.ndarray:
        """Draws the client's rows of a round, int64 in [0, n_i), with a key that nobody keeps.

        They come in the secret order in which they take their places in passes (`batches.placement`).
        """
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

    def declared(self) -> dict[str, Any]:
        """Returns what a client tells the server, which has the contract: the plan follows from both."""
        noise = self.mechanism.noise_multiplier
        return {"num_examples": self.num_examples, "noise_multiplier": noise, "delta": self.delta}

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-safe values; `from_dict` reads them."""
        return {"plan": self.plan.to_dict(), "delta": self.delta}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LocalPlan:
        """Reads what `to_dict` returned."""
        return cls(PrivacyPlan.from_dict(values["plan"]), values["delta"])


def check_settings(config: DPZeroConfig) -> None:
    """Refuses settings that rounds of many clients have no accounting for."""
    for name, (allowed, why) in _ALLOWED.items():
        if (value := operator.attrgetter(name)(config)) not in allowed:
            raise PlanError(f"{name}={value!r}: {why}.")
    if not 1 <= config.max_steps <= MAX_RELEASES:
        raise PlanError(
            f"max_steps={config.max_steps}: give a number of rounds (--rounds) from 1 to "
            f"{MAX_RELEASES}: all must fit into one message to a client that comes late."
        )


def local_plan(config: DPZeroConfig, num_examples: int, sampling_probability: float) -> LocalPlan:
    """Makes the plan of a client with n_i rows and batches of q n_i, calibrated if it has a target."""
    check_settings(config)
    if num_examples < 1:
        raise PlanError("the client has no rows, and would send noise alone: leave it out.")
    own = copy.copy(config)
    if own.sampling != "full_batch":
        expected = sampling_probability * num_examples
        if own.sampling == "fixed_size_without_replacement":
            expected = float(max(1, round(expected)))
        if (ratio := largest_over_expected(own)) is not None:
            own.max_batch_size = max(1, math.ceil(ratio * expected))
        own.expected_batch_size = expected
    return LocalPlan(own.plan(num_examples), config.delta(num_examples))


def largest_over_expected(config: DPZeroConfig) -> float | None:
    """Returns a recipe's cap on batches over the expected one, which is the same for every client."""
    return config.max_batch_size and config.max_batch_size / (config.expected_batch_size or 1)


def check_probability(
    config: DPZeroConfig, num_examples: int, offered: Any, own: float | None
) -> float:
    """Returns q of a server's contract, if a client's settings allow it.

    With a target epsilon the noise follows q, so any q will do that leaves it something to hide. With a
    noise multiplier epsilon follows q, so the client says the largest that it agrees to, its `own`.
    """
    if type(offered) not in (int, float) or not 0 < offered <= 1:
        raise PlanError(f"the server's sampling_probability={offered!r} is no number in (0, 1].")
    if config.target_epsilon is None and config.sampling != "full_batch":
        if own is None:
            raise PlanError(
                f"noise_multiplier={config.noise_multiplier!r} and no sampling-probability: with fixed "
                "noise, epsilon follows the server's. Set target_epsilon, or in --node-config the "
                "largest sampling-probability that this client agrees to."
            )
        if offered > min(1.0, own) * (1 + 1e-9):  # both sides divide B by N, in floats
            raise PlanError(
                f"the server's sampling_probability={offered:.6g} is above this client's own {own:.6g}, "
                "and costs more with a fixed noise_multiplier: set target_epsilon, or a larger one."
            )
    delta = config.delta(num_examples)
    if config.target_epsilon is not None and offered * config.max_steps <= delta:
        raise PlanError(
            f"the server's sampling_probability={offered:.6g} over {config.max_steps} rounds is below "
            f"delta={delta:.6g}, so that delta pays for it without noise: use a larger one."
        )
    return float(offered)


def contract_digest(contract: Mapping[str, Any]) -> bytes:
    """Returns the first 16 bytes of the SHA-256 of the contract's canonical JSON, versions left out."""
    # NaN is no JSON, and two contracts that hold one would never be equal
    text = json.dumps(_compared(contract), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]


def adopt(own: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contract that a client goes by: the server's.

    Raises:
      PlanError: it and the client's own differ in more than `CHOSEN_BY_SERVER`.
    """
    mine, theirs = (_compared(side, but=CHOSEN_BY_SERVER) for side in (own, offered))
    if mine != theirs:
        here, there = flat(mine), flat(theirs)
        changed = [
            f"{k}: {there.get(k)!r:.80} there, {here.get(k)!r:.80} here"
            for k in sorted(here.keys() | there.keys())
            if here.get(k) != there.get(k)
        ] or ["an entry that reads in two ways"]  # of names with dots
        raise PlanError(
            "the server's run is another one than this client's recipe describes "
            f"({'; '.join(changed)}). Use the same recipe, base model and settings on both sides."
        )
    if missing := [name for name in CHOSEN_BY_SERVER if name not in offered]:
        raise PlanError(f"the server's contract lacks {', '.join(missing)}.")
    return dict(offered)


def _compared(contract: Mapping[str, Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a contract as JSON brings it to the other side, without what may differ."""
    plain: dict[str, Any] = json.loads(json.dumps(contract))
    return {k: v for k, v in plain.items() if k not in (*_NOT_COMPARED, *but)}
