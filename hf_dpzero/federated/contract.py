"""What a server and its clients must agree on before any number is sent, and its digest.

The contract is the header of the server's ledger: base model, directions, update rule, and what all
clients' plans have in common. Sizes and noise are each client's own and stand in its plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hf_dpzero.federated.local_plan import LocalPlan, Participation
from hf_dpzero.federated.messages import DIGEST_BYTES
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import flat
from hf_dpzero.run import Run
from hf_dpzero.run_folder.folder import ledger_header

CHOSEN_BY_SERVER = ("direction_key", "sampling_probability")
"""What a client takes from the server. The guarantee holds along any directions; of probabilities
`local_plan.check_probability` refuses those that would cost more than the client agreed to."""

_OWN = (  # of a run on one machine's data: not in a contract
    *("plan", "target_epsilon", "target_delta", "tuning", "noise_source", "privacy_unit"),
    *("sampler_key_is_secret", "log_private_diagnostics"),
)
_NOT_COMPARED = ("versions", "format", "version")


class ContractError(LedgerError):
    """Two sides that are not of one run; says in what they differ."""


def contract_of(
    run: Run, *, participation: Participation, sampling_probability: float
) -> dict[str, Any]:
    """The contract as one side sees it, without the direction key where the recipe sets none.

    Args:
      run: after the checks before training, on its base weights.
      participation: see `local_plan`.
      sampling_probability: q.

    Returns:
      JSON-safe; also a valid header of a `Trajectory` once it has a direction key.
    """
    args = run.args
    header = {k: v for k, v in ledger_header(run).items() if k not in _OWN}
    return {
        **header,
        "base_model_digest": digest_model(run.model),
        "sampling_probability": sampling_probability,
        "federated": {
            "rounds": int(args.max_steps),
            "participation": participation,
            "sampling": args.sampling,
            "clip": args.clip,
            "noise_distribution": args.noise_distribution,
            "neighboring_relation": args.neighboring_relation,
        },
    }


def contract_digest(contract: Mapping[str, Any]) -> bytes:
    """The first 16 bytes of the SHA-256 of the contract's canonical JSON, versions left out."""
    text = json.dumps(_compared(contract), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]


def adopt(own: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The contract that a client goes by: the server's, if it agrees with the client's own.

    Args:
      own: of `contract_of`, on the client.
      offered: the server's.

    Returns:
      The server's.

    Raises:
      ContractError: they differ in more than `CHOSEN_BY_SERVER`.
    """
    mine, theirs = (
        {k: v for k, v in flat(_compared(side)).items() if k not in CHOSEN_BY_SERVER}
        for side in (own, offered)
    )
    if changed := sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)):
        told = "; ".join(
            f"{k}: {_short(theirs.get(k))} there, {_short(mine.get(k))} here" for k in changed
        )
        raise ContractError(
            f"the server's run is another one than this client's recipe describes ({told}). Use the "
            "same recipe, base model and settings on both sides."
        )
    if _rest(own) != _rest(offered):
        raise ContractError(
            "the server's contract repeats entries under names with dots, so that it reads in two ways."
        )
    if missing := [name for name in CHOSEN_BY_SERVER if name not in offered]:
        raise ContractError(f"the server's contract lacks {', '.join(missing)}.")
    return dict(offered)


def check_plan(contract: Mapping[str, Any], local: LocalPlan) -> None:
    """Refuses a client whose declared plan is not the contract's.

    Raises:
      ContractError: names what differs.
    """
    common, mechanism = contract["federated"], local.mechanism
    rows = local.plan.sampler.num_examples
    expected = contract["sampling_probability"] * local.num_examples
    pairs = {
        "rounds": (common["rounds"], local.rounds),
        "participation": (common["participation"], local.participation),
        "clip": (float(common["clip"]), mechanism.clip),
        "noise_distribution": (common["noise_distribution"], mechanism.distribution),
        "neighboring_relation": (common["neighboring_relation"], local.plan.relation),
        "num_directions": (contract["num_directions"], mechanism.num_directions),
        "method": ("dpzero", mechanism.name),
    }
    if local.participation == "once":
        pairs["rows of a round"] = (local.num_examples // local.rounds, rows)
        pairs["steps"] = (1, local.plan.steps)
    else:
        pairs["sampling"] = (common["sampling"], local.plan.sampler.name)
        pairs["rows"] = (local.num_examples, rows)
        pairs["steps"] = (local.rounds, local.plan.steps)
        if abs(mechanism.expected_batch_size - expected) > 1:
            pairs["expected batch"] = (expected, mechanism.expected_batch_size)
    wrong = [
        f"{name} {theirs} and not {ours}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    if wrong:
        raise ContractError(
            f"another plan than the contract's: {'; '.join(wrong)}. Clients of one run share clip, "
            "directions, rounds and sampling; only rows and noise are their own."
        )


def _compared(contract: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(contract))
    return {k: v for k, v in plain.items() if k not in _NOT_COMPARED}


def _rest(side: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in _compared(side).items() if k not in CHOSEN_BY_SERVER}


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) < 80 else text[:80] + "..."
