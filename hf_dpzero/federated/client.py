"""A client of a federated run: its rows, its noise, its ledger; it answers with K noised numbers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from hf_dpzero.federated.contract import contract_digest
from hf_dpzero.federated.local_plan import LocalPlan
from hf_dpzero.federated.message_log import MessageLog
from hf_dpzero.federated.messages import (
    ASK,
    BEHIND,
    NOTHING,
    VALUES,
    Message,
    MessageError,
    check_contract,
    pack,
    unpack,
)
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Release, Trajectory
from hf_dpzero.privacy.noise import NoiseSource, SecureNoise

logger = logging.getLogger(__name__)

RELEASED_NAME = "released.ledger"
"""A client's own ledger, in its folder: what it released, written before it is sent."""


class Weights(Protocol):
    """What a client needs of a `replica.Replica`."""

    @property
    def round(self) -> int: ...

    def catch_up(self, releases: Sequence[Release]) -> None: ...

    def differences(self, indices: Sequence[int]) -> Tensor: ...


class LocalClient:
    """Answers a server's messages for one client.

    Guarantee: one release a round at most, whatever the server asks, how often, and through how many
    crashes: the noised values are in `released.ledger` before they are sent, and a round that is there
    is answered from there. So `local.epsilon(count)` bounds what the server and everybody who reads the
    messages can learn of a row. No more than the plan's rounds are released.

    Args:
      name: of the client, as the server knows it.
      folder: where it keeps its ledger and the run's releases; its own.
      local: its plan.
      contract: that it adopted (`contract.adopt`).
      rows: which rows of the replica's data are its own, int64 [n_i].
      noise: drawn here and nowhere else; default operating-system entropy.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        local: LocalPlan,
        contract: Mapping[str, Any],
        rows: np.ndarray,
        noise: NoiseSource | None = None,
    ) -> None:
        if len(rows) != local.num_examples:
            raise ValueError(
                f"client {name} has {len(rows)} rows and a plan for {local.num_examples}; make the plan "
                "for its own shard."
            )
        self.name, self.folder, self.local, self.rows = name, folder, local, rows
        self.contract, self._digest = contract, contract_digest(contract)
        self.noise = noise or SecureNoise()
        folder.mkdir(parents=True, exist_ok=True)

    def _ledger(self) -> MessageLog:
        """Its own ledger; made before anything else of the run is in the folder, and never again."""
        path = self.folder / RELEASED_NAME
        if (self.folder / LEDGER_NAME).exists() and not path.exists():
            raise LedgerError(
                f"{path} is missing, which said what this client released: a new one would forget what "
                "was spent, and draw the open round's noise again. Restore it, or take another "
                "output-dir; what was spent stays spent."
            )
        header = {
            "client": self.name,
            "contract_digest": self._digest.hex(),
            "num_values": self.local.mechanism.values_per_release,
            "participation": self.local.participation,
            "num_examples": self.local.num_examples,
            "rounds": self.local.rounds,
            "delta": self.local.delta,
            "noise_source": self.noise.name,
            "plan": self.local.plan.to_dict(),
        }
        return MessageLog(path, header)

    def _known(self) -> Trajectory:
        """The run's public releases as far as this client has them; K numbers a round."""
        path = self.folder / LEDGER_NAME
        return (
            Trajectory.open(path, self.contract)
            if path.exists()
            else Trajectory.create(path, self.contract)
        )

    def remember_contract(self) -> None:
        """Leaves the contract in the folder, for the next process of this client.

        Raises:
          LedgerError: the folder is of another run.
        """
        self._ledger().close()
        self._known().close()

    def released(self) -> int:
        """In how many rounds this client released."""
        with self._ledger() as ledger:
            return len(ledger.messages)

    def answer(self, weights: Weights, raw: bytes) -> bytes:
        """Takes the releases that a server's message brings, and answers with this round's values.

        Args:
          weights: a replica at this round or before it.
          raw: an ask (`messages`).

        Returns:
          `VALUES`; `BEHIND` where releases are missing, before any row is read; `NOTHING` for a round
          that is over here or beyond the plan.

        Raises:
          MessageError: malformed, or of another contract. Nothing is released.
          LedgerError: its files are damaged, or held by another process. Nothing is released.
        """
        message = unpack(raw, self.local.mechanism.values_per_release)
        check_contract(message, self._digest)
        if message.kind != ASK:
            raise MessageError(
                f"a message of kind {message.kind} to a client, which takes asks only."
            )
        with self._ledger() as ledger, contextlib.closing(self._known()) as known:
            return pack(self._answer(weights, known, ledger, message))

    def _answer(
        self, weights: Weights, known: Trajectory, ledger: MessageLog, ask: Message
    ) -> Message:
        for release in ask.releases:
            if (before := known.get(release.step)) is None:
                if release.step > known.next_step:
                    break
                known.append(release)
            elif before != release:
                raise MessageError(
                    f"round {release.step} is another one than this client was told before."
                )
        if known.next_step < ask.round:
            return Message(BEHIND, known.next_step, self._digest)
        if (values := ledger.get(ask.round, 0)) is None:
            if known.next_step > ask.round or not self._may_release(ledger, ask.round):
                return Message(NOTHING, ask.round, self._digest)
            values = self._release(weights, known, ledger, ask.round)
        return Message(VALUES, ask.round, self._digest, values=values)

    def _may_release(self, ledger: MessageLog, number: int) -> bool:
        if number >= self.local.rounds or len(ledger.messages) >= self.local.rounds:
            logger.warning(
                "client %s was asked for round %s of a plan of %s rounds: it releases nothing more.",
                *(self.name, number, self.local.rounds),
            )
            return False
        return number > ledger.last_round()

    def _release(
        self, weights: Weights, known: Trajectory, ledger: MessageLog, number: int
    ) -> tuple[float, ...]:
        weights.catch_up(known.releases)
        if weights.round != number:
            raise LedgerError(
                f"the replica is at round {weights.round}, the server at {number}: start this "
                "client anew."
            )
        indices = self.rows[self.local.rows(number)].tolist()
        mechanism = self.local.mechanism
        total = mechanism.clip_sum(weights.differences(indices))
        values = mechanism.release(total, number, self.noise)
        ledger.append(number, 0, values)  # paid for before it is sent
        return tuple(values)
