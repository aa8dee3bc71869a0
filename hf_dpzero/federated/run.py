"""A whole federated run: its rounds over any transport (join, ask, take, update), from start to report.

A learning rate that the recipe leaves out is chosen as on one machine, from the noise that the run adds
up to (`settings.defaults`). Here that of a round's mean is C sqrt(sum_i (a_i sigma_i)^2) / sum_i a_i B_i
over all clients, with a_i of `server.shares`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm.auto import tqdm

from hf_dpzero.federated.messages import MessageError
from hf_dpzero.federated.plan import LocalPlan, PlanError
from hf_dpzero.federated.report import REPORT_NAME, federated_report, save_costliest
from hf_dpzero.federated.server import RoundServer, shares
from hf_dpzero.federated.setup import CLIENTS, CLIPPED_FROM, Settings, Side, client_names
from hf_dpzero.ledger.log_file import LedgerError, write_atomically
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Release
from hf_dpzero.reporting.public import RECIPE_FILE
from hf_dpzero.run_folder.base_model import check_start
from hf_dpzero.settings.defaults import CLASSIC, rate_of_noise

if TYPE_CHECKING:
    from transformers import SchedulerType

    from hf_dpzero.settings.config import DPZeroConfig

logger = logging.getLogger(__name__)

EVALUATIONS_NAME = "evaluations.json"

ATTEMPTS = 3
"""So often a round is asked for before the run stops; who has released answers from its ledger."""


class Transport(Protocol):
    """Carries payloads to clients and back, and knows who sent what."""

    def present(self) -> Sequence[str]:
        """Returns the addresses that can be reached now."""

    def exchange(self, kind: str, payloads: Mapping[str, bytes]) -> Mapping[str, bytes | None]:
        """Sends payloads of one kind, "join" or "round", by address, and returns what comes back.

        Answers are not checked; who failed or was too slow is missing.
        """


@dataclass
class InProcess(Transport):
    """Clients in this process, on the server's started side: the same mechanism without a network.

    Their names are also their addresses, and the i-th has shard i; those in `gone` cannot be reached.
    """

    side: Side
    folder: Path
    names: list[str]
    gone: set[str] = field(default_factory=set)

    def present(self) -> list[str]:
        return sorted(set(self.names) - self.gone)

    def exchange(self, kind: str, payloads: Mapping[str, bytes]) -> dict[str, bytes | None]:
        answers: dict[str, bytes | None] = {}
        for name in sorted(payloads.keys() - self.gone):
            own = (name, self.names.index(name), self.folder / CLIENTS / name)
            try:
                answers[name] = self.side.answer(kind, payloads[name], *own)
            except (ValueError, OSError) as error:
                logger.warning("client %s failed: %s", name, error)
        return answers


@dataclass
class Rounds:
    """Runs the rounds of a server; see `run`."""

    server: RoundServer
    transport: Transport
    learning_rates: Callable[
        [], Sequence[float]
    ]  # of every round; asked for after the first answers
    min_clients: int = 1  # so many must be present before a round, within `patience` seconds
    patience: float = 60.0
    names: dict[str, str] = field(default_factory=dict)  # of members, by address
    # why an address is no member, and its name if another address has it
    declined: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    invited: Counter[str] = field(default_factory=Counter)  # addresses that have not joined yet

    def left_out(self) -> list[str]:
        """Returns who was there and is no member, and why, a line for each."""
        silent = sorted(self.invited.keys() - self.names.keys() - self.declined.keys())
        return [
            *(f"{who}: {why}" for who, (why, _) in sorted(self.declined.items())),
            *(f"{a}: gave no answer to {self.invited[a]} invitations; see its log" for a in silent),
        ]

    def run(self, on_round: Callable[[Release, int], None] | None = None) -> None:
        """Takes the rounds that are left; `on_round` gets each release, and how many clients are in it.

        Clients that are slow, gone or refused are left out of a round; who comes later joins at the next
        one and is sent the releases so far. Where too few are there, or none answers, it stops with a
        `LedgerError`, and can be resumed.
        """
        rates: Sequence[float] = ()
        while self.server.round < self.server.rounds:
            self.gather()
            count = self._collect()
            # a chosen rate follows from the clients of the first round, and never changes after it
            rates = rates or self.learning_rates()
            release = self.server.close_round(rates[self.server.round])
            if on_round is not None:
                on_round(release, count)

    def gather(self) -> None:
        """Invites until enough clients are there in time."""
        deadline = time.monotonic() + self.patience
        while True:
            self._invite()
            here = [address for address in self.transport.present() if address in self.names]
            if len(here) >= self.min_clients:
                return
            if time.monotonic() > deadline:
                raise LedgerError(
                    f"{len(here)} clients are there and min_clients={self.min_clients}, in "
                    f"{self.patience:g} s before round {self.server.round}; it can be resumed. "
                    + ". ".join(self.left_out())
                )
            time.sleep(0.2)

    def _invite(self) -> None:
        """Takes in clients that are new, but for those that declined or were silent `ATTEMPTS` times."""
        present = set(self.transport.present())
        # names of connected members that answered when they were asked last; others may be gone by now
        held = {
            name
            for address, name in self.names.items()
            if address in present and not self.server.members[name].unsure
        }
        self.declined = {a: why for a, why in self.declined.items() if why[1] in (None, *held)}
        silent = {address for address, count in self.invited.items() if count >= ATTEMPTS}
        new = sorted(present - self.names.keys() - self.declined.keys() - silent)
        self.invited.update(new)
        invitation, before = self.server.invitation(), set(self.server.members)
        for address, raw in self.transport.exchange("join", dict.fromkeys(new, invitation)).items():
            name = None
            try:
                name = (member := self.server.join(raw)).name
                if name in held:
                    raise PlanError(
                        f"it joins as {name}, the name of a client that is connected: give each client "
                        "a name of its own"
                    )
            except ValueError as error:
                self.declined[address] = (str(error), name)
                logger.warning("%s cannot take part: %s", address, error)
                continue
            # a client that was started again has a new address, and its old one answers no more
            self.names = {a: n for a, n in self.names.items() if n != name} | {address: member.name}
            member.unsure = name in before
            if not member.unsure:  # of two that come at once with one name, the first is in
                held.add(member.name)
            del self.invited[address]  # it may come back

    def _collect(self) -> int:
        """Asks until somebody has answered; returns how many did."""
        for _ in range(ATTEMPTS):
            behind = self._ask([a for a in self.transport.present() if a in self.names])
            self._ask(behind)  # once more, with the releases that they lack
            if count := len(self.server.taken):
                return count
            self._invite()
        raise LedgerError(
            f"no client answered round {self.server.round} in {ATTEMPTS} attempts; it can be resumed."
        )

    def _ask(self, addresses: Sequence[str]) -> list[str]:
        """Asks for the open round and takes the answers; returns who lacks releases."""
        asks = {address: self.server.ask(self.names[address]) for address in addresses}
        behind = []
        for address, raw in self.transport.exchange("round", asks).items():
            name = self.names.get(address, address)
            try:
                taken = self.server.take(name, raw)
            except MessageError as error:
                logger.warning("a message of %s is refused: %s", name, error)
                continue
            if not taken and self.server.members[name].known < self.server.round:
                behind.append(address)
        return behind


def learning_rates(
    config: DPZeroConfig, plans: Sequence[LocalPlan] = (), slope: float | None = None
) -> list[float]:
    """Returns alpha_r of every round, by the recipe's scheduler.

    One that it leaves out is chosen from the noise of these clients, and the `slope` of `rate_of_noise`.
    """
    import torch
    from transformers import get_scheduler

    kind, rounds, options = config.lr_scheduler_type, config.max_steps, config.lr_scheduler_kwargs
    chosen = "learning_rate" in config.chosen
    first = chosen_rate(plans, kind, slope) if chosen else config.learning_rate
    rate = CLASSIC["learning_rate"] if first is None else first
    assert isinstance(options, dict | None)  # transformers parses a JSON text
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    scheduler = get_scheduler(
        kind, optimizer, config.get_warmup_steps(rounds), rounds, options or {}
    )
    return [rate * float(scheduler.lr_lambdas[0](number)) for number in range(rounds)]


def chosen_rate(
    plans: Sequence[LocalPlan], schedule: SchedulerType | str, slope: float | None = None
) -> float | None:
    """Returns the rate of `rate_of_noise` for the mean of these clients; None without noise."""
    mechanisms = [local.mechanism for local in plans]
    pairs = list(zip(shares(plans), mechanisms, strict=True))
    noise = math.sqrt(math.fsum((share * m.noise_multiplier) ** 2 for share, m in pairs))
    if not noise:
        return None
    clip, expected = mechanisms[0].clip, math.fsum(a * m.expected_batch_size for a, m in pairs)
    summed = clip * noise / expected * math.sqrt(plans[0].rounds)
    return rate_of_noise(summed, clip, mechanisms[0].num_directions, schedule, slope)


class ServerRun:
    """The server's side of a run in its output_dir: rounds, evaluations, report and weights."""

    def __init__(self, side: Side, folder: Path, *, resume: bool = False) -> None:
        self.side, self.folder, self.config = side, folder, side.recipe.training
        run = side.replica.run
        # before the replica moves: afterwards every base differs from what its name leads to
        words, _ = check_start(run.model, run.args.base_is_public)
        self.base = {"base_weights": words, "earlier_runs": run.earlier_runs}
        self.server = side.start_server(folder, resume=resume)
        write_atomically(folder / RECIPE_FILE, side.recipe.to_yaml())
        self.evaluations: list[dict[str, float]] = []
        path = folder / EVALUATIONS_NAME
        if resume and path.is_file():  # a round that was not closed before may be another now
            before = json.loads(path.read_text(encoding="utf-8"))
            self.evaluations = [entry for entry in before if entry["round"] <= self.server.round]
        self.rounds: Rounds | None = None

    @classmethod
    def of(cls, settings: Settings, folder: Path, resume: bool) -> ServerRun:
        """Builds the server's side too."""
        return cls(Side.build(settings, folder), folder, resume=resume)

    def run(self, transport: Transport, *, min_clients: int = 1, patience: float = 60.0) -> None:
        """Takes the rounds that are left and writes everything; after a failure, the report alone."""
        members = self.server.members.values()
        slope = CLIPPED_FROM * (self.server.trajectory.header["median_norm"] or 0.0)
        self.rounds = Rounds(
            self.server,
            transport,
            # of the clients that the folder remembers from the first round on: resumed, the same
            lambda: learning_rates(self.config, [m.local for m in members if not m.joined], slope),
            min_clients=min_clients,
            patience=patience,
        )
        if not self.evaluations or self.evaluations[-1]["round"] < self.server.round:
            self._evaluate()
        every = int(self.config.eval_steps or 0) if self.config.eval_strategy == "steps" else 0
        now, last = self.server.round, self.server.rounds
        bar = tqdm(total=last, initial=now, desc="rounds", file=sys.stderr)

        def on_round(release: Release, count: int) -> None:
            self.side.replica.catch_up(self.server.trajectory.releases)
            now = self.server.round
            if now == last or (every and now % every == 0):
                self._evaluate()
            bar.update()
            bar.set_postfix(clients=count, refresh=False)

        try:
            self.rounds.run(on_round)
        finally:  # also of a run that stops the releases are public, and its costs are to be known
            bar.close()
            if self.server.round:
                self._save_report()
        self._save_weights()

    def _evaluate(self) -> None:
        metrics = self.side.replica.trainer.evaluate()
        times = ("_runtime", "_per_second", "_time", "epoch")
        kept = {name: value for name, value in metrics.items() if not name.endswith(times)}
        self.evaluations.append({"round": self.server.round, **kept})
        write_atomically(self.folder / EVALUATIONS_NAME, json.dumps(self.evaluations))

    def report(self) -> dict[str, Any]:
        """Returns the run's report so far."""
        report = federated_report(self.server, self.folder / CLIENTS, self.evaluations)
        return {**report, "left_out": self.rounds.left_out() if self.rounds else []}

    def _save_report(self) -> None:
        text = json.dumps(self.report(), indent=2, allow_nan=False)
        write_atomically(self.folder / REPORT_NAME, f"{text}\n")
        self.server.trajectory.to_safetensors(self.folder / SHIPPING_NAME)

    def _save_weights(self) -> None:
        trainer, config = self.side.replica.trainer, copy.copy(self.config)
        if self.side.settings.own_rows:
            config.target_epsilon = None  # each client has one of its own
        trainer.model.save_pretrained(self.folder)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(self.folder)
        save_costliest(self.server, config, self.report(), self.base)

    def close(self) -> None:
        """Lets go of the ledgers and the model."""
        self.server.close()
        self.side.replica.close()


def run_in_process(settings: Settings, folder: Path, *, resume: bool = False) -> dict[str, Any]:
    """Runs server and clients in one process, without a network, and returns the report."""
    with contextlib.closing(ServerRun.of(settings, folder, resume=resume)) as run:
        run.run(InProcess(run.side, folder, client_names(settings.clients)))
        return run.report()
