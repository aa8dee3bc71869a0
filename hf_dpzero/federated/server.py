"""The server of a federated run: it takes K noised numbers a client and round, and makes the update.

    v^r = sum_i a_i B_i v_i^r / sum_i a_i B_i    over the clients whose message was taken
    theta^{r+1} = theta^r - alpha_r sum_k v_k^r u_k^r          (`ledger.replay.apply_release`)

With B_i = q n_i and equal noise (a_i = 1, see `shares`) this is the mean over the union of all rows, as
on one machine, with the noise of every client in it. The server reads no row and draws no noise.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dpzero.federated import NAME
from hf_dpzero.federated.messages import (
    ASK,
    BEHIND,
    NOTHING,
    VALUES,
    Message,
    MessageError,
    MessageLog,
    check_contract,
    check_values,
    pack,
    pack_json,
    unpack,
    unpack_json,
)
from hf_dpzero.federated.plan import LocalPlan, PlanError, contract_digest
from hf_dpzero.ledger.log_file import LedgerError, write_atomically
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Release, Trajectory
from hf_dpzero.privacy.discretization import float32s

MEMBERS_NAME, MESSAGES_NAME = "clients.json", "messages.ledger"

Plans = Callable[[int, float, float], LocalPlan]
"""(rows, noise multiplier, delta), as a client declares them -> its plan under the contract."""


@dataclass
class Member:
    """A client that joined."""

    name: str
    index: int  # in `messages.ledger`
    local: LocalPlan
    noise_source: str  # as it declared it
    joined: int  # the first round that it could take part in
    known: int = 0  # rounds whose release it has
    unsure: bool = False  # `known` is a guess: its last message went unanswered, or it came back
    refused: dict[str, int] = field(default_factory=dict)  # messages, by why
    sent: int = 0  # payload bytes of rounds
    received: int = 0


class RoundServer:
    """Keeps the run's ledger, its members and their messages; transport-free.

    A message is in `messages.ledger` before it counts, and a round's mean in `trajectory.ledger` before
    any client hears of it: a server that is killed continues from its folder (`resume`).

    Args:
      folder: without a run, or to `resume` with one of this contract.
      contract: with a direction key (`setup.Side.start_server`).
    """

    def __init__(
        self, folder: Path, contract: Mapping[str, Any], plans: Plans, resume: bool = False
    ) -> None:
        self.folder, self.plans, self.digest = folder, plans, contract_digest(contract)
        opened = Trajectory.open if resume else Trajectory.create
        self.trajectory = opened(folder / LEDGER_NAME, contract)
        self.num_values = self.trajectory.num_values
        header = {"contract_digest": self.digest.hex()}
        self.log = MessageLog(folder / MESSAGES_NAME, header, self.num_values)
        self.members: dict[str, Member] = {}
        self.taken: dict[str, tuple[float, ...]] = {}  # what counts in the open round, by member
        for entry in members_in(folder) if resume else ():
            # what a member knew is forgotten: it may have been sent more than was saved
            now = {"local": LocalPlan.from_dict(entry["local"]), "known": 0, "unsure": True}
            self.members[entry["name"]] = Member(**{**entry, **now})

    @property
    def round(self) -> int:
        """The round that is open: so many are in the ledger."""
        return self.trajectory.next_step

    @property
    def rounds(self) -> int:
        """The number of rounds of the whole run, R."""
        return int(self.trajectory.header["federated"]["rounds"])

    def invitation(self) -> bytes:
        """Returns what a client gets that wants to join: the contract."""
        return pack_json({"contract": self.trajectory.header})

    def join(self, raw: bytes | None) -> Member:
        """Takes a client in, or back after it was away, by its answer to the invitation.

        Raises:
          MessageError: malformed, or nothing that a plan can be made of.
          PlanError: it declined, or came back with another plan.
        """
        answer = unpack_json(raw)
        if reason := answer.get("declined"):
            raise PlanError(f"the client declined: {reason}")
        try:
            name, digest = str(answer["name"]), bytes.fromhex(answer["contract_digest"])
            source, local = str(answer["noise_source"]), self._declared_by(answer)
        # a stranger wrote it: JSON holds any number, and 1e400 reads as infinity
        except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
            raise MessageError(f"malformed: a plan that cannot be accounted ({error!r}).") from None
        if not NAME.fullmatch(name):
            raise MessageError(f"malformed: the client's name {name[:64]!r} is no plain word.")
        check_contract(digest, self.digest)
        if (member := self.members.get(name)) is None:
            member = Member(name, len(self.members), local, source, self.round)
            self.members[name] = member
            self._save_members()
        elif member.local != local:
            raise PlanError(
                f"another plan than {name} joined with: put its rows and settings back."
            )
        return member

    def _declared_by(self, answer: Mapping[str, Any]) -> LocalPlan:
        """Makes a client's plan of what it declares, if the report can say what it costs."""
        num_examples, noise = answer["num_examples"], answer["noise_multiplier"]
        delta = answer["delta"]
        numbers = type(num_examples) is int and {type(noise), type(delta)} <= {int, float}
        if not numbers or not 0 < num_examples < 2**53 or not 0 <= delta < 1:
            raise ValueError(f"{num_examples, noise, delta} are no rows, noise and delta")
        local = self.plans(num_examples, float(noise), float(delta))
        local.epsilon(local.rounds)
        if not math.isfinite(local.largest_value()):
            raise ValueError("its noise is not finite")
        return local

    def _save_members(self) -> None:
        members = [
            {**vars(member), "local": member.local.to_dict()} for member in self.members.values()
        ]
        # at joining and at the end only: what a member knew meanwhile is asked for again
        write_atomically(self.folder / MEMBERS_NAME, json.dumps(members, indent=1))

    def ask(self, name: str) -> bytes:
        """Returns the open round's message to a member: what it lacks of the releases so far.

        One that left its last message unanswered is sent none: it says first which it has (`BEHIND`), so
        that a client that is gone costs the head of a message in each round.
        """
        member = self.members[name]
        first = self.round if member.unsure else member.known
        lacking = tuple(self.trajectory.releases[first:])
        payload = pack(Message(ASK, self.round, self.digest, lacking))
        member.sent += len(payload)
        member.unsure = True
        return payload

    def take(self, name: str, raw: bytes | None) -> bool:
        """Takes an answer to `ask` of the member that the transport says it is of.

        Returns whether its values count. If not, it is to be asked again, with releases that it lacks,
        or released nothing in this round. What is refused (`MessageError`) is counted in the report.
        """
        if name not in self.members:
            raise MessageError(f"unknown client {name!r}: it did not join this run.")
        member = self.members[name]
        member.received += len(raw) if isinstance(raw, bytes) else 0
        try:
            return self._take(member, unpack(raw, self.num_values))
        except MessageError as error:
            kind = str(error).partition(":")[0]
            member.refused[kind] = member.refused.get(kind, 0) + 1
            raise

    def _take(self, member: Member, message: Message) -> bool:
        check_contract(message.contract, self.digest)
        member.unsure = False
        if message.kind == BEHIND:
            member.known = min(message.round, self.round)
            return False
        if message.round != self.round:
            raise MessageError(
                f"replayed or late: it is of round {message.round}, and round {self.round} is open."
            )
        if message.kind == NOTHING:
            member.known = self.round
            return False
        if message.kind != VALUES:
            raise MessageError(f"malformed: kind {message.kind} to a server.")
        if member.name in self.taken:
            raise MessageError(
                f"replayed: client {member.name} has sent round {self.round} before."
            )
        check_values(message.values, member.local.largest_value())
        logged = self.log.messages.get((self.round, member.index))
        if logged is None:
            self.log.append(self.round, member.index, message.values)
        elif logged != message.values:  # the server was killed after it had logged them
            raise MessageError(
                f"two releases: client {member.name} sent other values for round {self.round} before; "
                "its ledger was lost or rolled back, and it spent more."
            )
        member.known = self.round
        self.taken[member.name] = message.values
        return True

    def close_round(self, learning_rate: float) -> Release:
        """Makes the round's update of what was taken; it is on disk on return."""
        if not self.taken:
            raise LedgerError(f"round {self.round} has no values: no client answered it.")
        sizes = weights({name: self.members[name].local for name in self.taken})
        total = math.fsum(sizes.values())
        # fsum is exact, so the mean does not depend on the order in which messages came
        mean = [
            math.fsum(size * self.taken[name][k] for name, size in sizes.items()) / total
            for k in range(self.num_values)
        ]
        release = Release(self.round, tuple(float32s(mean)), learning_rate)
        self.trajectory.append(release)
        self.taken = {}
        return release

    def applied(self, name: str) -> int:
        """Counts the rounds in which a member's values are in the update."""
        index = self.members[name].index
        return sum(number < self.round and who == index for number, who in self.log.messages)

    def close(self) -> None:
        """Lets another process open the folder."""
        self._save_members()
        self.trajectory.close()
        self.log.close()


def shares(plans: Sequence[LocalPlan]) -> list[float]:
    """Returns what a row of each client counts, a_i = (least / own noise multiplier)^2, to six digits.

    So the mean of clients with equal batches has the least variance that weights can give it; noise of a
    client's sum has (sigma_i C)^2. Noise is as a client declares it: below half of the median it counts
    as that half, so that no row counts more than four of a client with the median's noise.
    """
    noises = [local.mechanism.noise_multiplier for local in plans]
    # of two the larger: who declares next to none is not the one that it is compared with
    floor = statistics.median_high(noises) / 2 if noises else 0.0
    noises = [max(noise, floor) for noise in noises]
    return [float(f"{(min(noises) / noise) ** 2:.6g}") if floor else 1.0 for noise in noises]


def weights(plans: Mapping[str, LocalPlan]) -> dict[str, float]:
    """Returns the weight of each client's values in a mean of these clients, a_i B_i, by name."""
    pairs = zip(plans.items(), shares(list(plans.values())), strict=True)
    return {name: share * plan.mechanism.expected_batch_size for (name, plan), share in pairs}


def members_in(folder: Path) -> list[dict[str, Any]]:
    """Reads what is kept of a run's members; nothing where none joined."""
    path = folder / MEMBERS_NAME
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []
