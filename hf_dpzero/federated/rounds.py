"""The rounds of a federated run over any transport: join, ask, take, update."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from hf_dpzero.federated.client import LocalClient, Weights
from hf_dpzero.federated.messages import MessageError
from hf_dpzero.federated.server import RoundServer
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import Release

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""So often a round is asked for before the run stops; who has released answers from its ledger."""


class Transport(Protocol):
    """Carries payloads to clients and back, and knows who sent what."""

    def present(self) -> Sequence[str]:
        """Addresses that can be reached now."""
        ...

    def exchange(self, kind: str, payloads: Mapping[str, bytes]) -> dict[str, Any]:
        """Sends a payload to each address; returns the answers that came in time.

        Args:
          kind: "join" or "round".
          payloads: by address.

        Returns:
          Answers by address; who failed or was too slow is missing.
        """
        ...


class Rounds:
    """Runs the rounds of a server; see `run`.

    Args:
      server: with its ledgers open.
      transport: to the clients.
      learning_rates: alpha_r for every round.
      min_clients: so many must be present before a round is asked for.
      patience: seconds to wait for them.
    """

    def __init__(
        self,
        server: RoundServer,
        transport: Transport,
        learning_rates: Sequence[float],
        *,
        min_clients: int = 1,
        patience: float = 60.0,
    ) -> None:
        if len(learning_rates) != server.rounds:
            raise ValueError(f"{len(learning_rates)} learning rates for {server.rounds} rounds.")
        self.server, self.transport = server, transport
        self.learning_rates, self.min_clients, self.patience = learning_rates, min_clients, patience
        self.names: dict[str, str] = {}
        self.declined: dict[str, str] = {}
        self.invited: dict[str, int] = {}
        self.waits_for: dict[str, str] = {}

    def left_out(self) -> list[str]:
        """Who was there and is no member, and why, a line for each."""
        silent = self.invited.keys() - self.names.keys() - self.declined.keys()
        lines = [f"{who}: {why}" for who, why in sorted(self.declined.items())]
        return lines + [
            f"{who}: gave no answer to {self.invited[who]} invitations; its own log says why"
            for who in sorted(silent)
        ]

    def run(self, on_round: Callable[[Release, int], None] | None = None) -> None:
        """Takes the rounds that are left.

        Clients that are slow, gone or refused are left out of a round; who comes later joins at the next
        one and is sent the releases so far.

        Args:
          on_round: called after each round with its release and the number of clients in it.

        Raises:
          LedgerError: too few clients, or none that answers; the folder can be resumed.
        """
        while self.server.round < self.server.rounds:
            self._gather()
            count = self._collect()
            rate = self.learning_rates[self.server.round]
            release = self.server.close_round(rate)
            if on_round is not None:
                on_round(release, count)

    def _gather(self) -> None:
        deadline = time.monotonic() + self.patience
        while True:
            self._invite()
            here = [address for address in self.transport.present() if address in self.names]
            if len(here) >= self.min_clients:
                return
            if time.monotonic() > deadline:
                declined = "".join(f" {line}." for line in self.left_out())
                raise LedgerError(
                    f"{len(here)} clients are there and min_clients={self.min_clients} after "
                    f"{self.patience:g} s, before round {self.server.round}.{declined} The run can be "
                    "resumed."
                )
            time.sleep(0.2)

    def _invite(self) -> None:
        """Takes in whoever is new; not again who declined, or gave no answer `ATTEMPTS` times."""
        present = set(self.transport.present())
        for address, holder in list(self.waits_for.items()):
            if holder not in self._answering(present):
                del self.waits_for[address], self.declined[address]
        silent = {address for address, count in self.invited.items() if count >= ATTEMPTS}
        new = sorted(present - self.names.keys() - self.declined.keys() - silent)
        for address in new:
            self.invited[address] = self.invited.get(address, 0) + 1
        invitation, before = self.server.invitation(), set(self.server.members)
        for address, raw in self.transport.exchange("join", dict.fromkeys(new, invitation)).items():
            try:
                member = self.server.join(raw)
            except ValueError as error:
                self.declined[address] = str(error)
                logger.warning("a client cannot take part: %s", error)
                continue
            holders = [a for a, name in self.names.items() if name == member.name]
            if taken := [a for a in holders if a in self._answering(present)]:
                self.waits_for[address] = taken[0]
                self.declined[address] = (
                    f"it joins as {member.name}, the name of {taken[0]}, which is connected: give each "
                    "client a name of its own"
                )
                logger.warning("%s cannot take part: %s", address, self.declined[address])
                continue
            for old in holders:
                del self.names[old]
            self.names[address] = member.name
            member.unsure = member.name in before
            self.invited.pop(address)  # it may come back

    def _answering(self, present: Collection[str]) -> set[str]:
        """Connected members that answered when they were asked last; others may be gone by now."""
        members = self.server.members
        return {a for a, name in self.names.items() if a in present and not members[name].unsure}

    def _collect(self) -> int:
        """Asks until somebody has answered; returns how many did."""
        for _ in range(ATTEMPTS):
            self._ask()
            if count := len(tuple(self.server.taken())):
                return count
            self._invite()
        raise LedgerError(
            f"no client answered round {self.server.round} in {ATTEMPTS} attempts. The run can be "
            "resumed: clients answer a round that they released from their ledgers."
        )

    def _ask(self) -> None:
        waiting = [a for a in self.transport.present() if a in self.names]
        for _ in range(2):  # once more to those that lack releases
            before = {a: self.server.knows(self.names[a]) for a in waiting}
            asks = {a: self.server.ask(self.names[a]) for a in waiting}
            waiting = []
            for address, raw in self.transport.exchange("round", asks).items():
                name = self.names.get(address, address)
                try:
                    done = self.server.take(name, raw)
                except MessageError as error:
                    logger.warning("a message of %s is refused: %s", name, error)
                    continue
                known = self.server.knows(name)
                if not done and known[0] < self.server.round and known != before.get(address):
                    waiting.append(address)
            if not waiting:
                return


class InProcess:
    """Clients in this process, for tests and for the same mechanism without a network.

    Args:
      clients: by name, once they joined; one that raises is a client that fails, for that round.
      names: of all that can be reached, also their addresses.
      weights: their replica (clients of one process share one: it holds public weights).
      join: address -> its answer to an invitation.
    """

    def __init__(
        self,
        clients: Mapping[str, LocalClient],
        names: Sequence[str],
        weights: Weights,
        join: Callable[[str, bytes], bytes],
    ) -> None:
        self.clients, self.names, self.weights, self.join = clients, list(names), weights, join
        self.gone: set[str] = set()

    def present(self) -> list[str]:
        """Everybody who is not `gone`."""
        return sorted(set(self.names) - self.gone)

    def exchange(self, kind: str, payloads: Mapping[str, bytes]) -> dict[str, Any]:
        """As in `Transport`."""
        answers = {}
        for address, payload in payloads.items():
            if address in self.gone:
                continue
            try:
                if kind == "join":
                    answers[address] = self.join(address, payload)
                else:
                    answers[address] = self.clients[address].answer(self.weights, payload)
            except (ValueError, OSError) as error:
                logger.warning("client %s failed: %s", address, error)
        return answers
