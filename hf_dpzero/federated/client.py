"""A client of a federated run: its rows, its noise, its ledger; it answers with K noised numbers."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hf_dpzero.checks.public_rows import leaving_out, public_microbatches
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.federated.messages import (
    ASK,
    BEHIND,
    NOTHING,
    RELEASED_NAME,
    VALUES,
    Message,
    MessageError,
    MessageLog,
    check_contract,
    pack,
    unpack,
)
from hf_dpzero.federated.plan import LocalPlan, PlanError, contract_digest
from hf_dpzero.federated.report import RUNS, served, together
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import apply_release, directions_of
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Release, Trajectory
from hf_dpzero.privacy.noise import NoiseSource
from hf_dpzero.reporting.wording import round_up
from hf_dpzero.training.preparation import prepare
from hf_dpzero.training.zeroth_order_method import ZerothOrderMethod

if TYPE_CHECKING:
    from hf_dpzero.training.dpzero_trainer import DPZeroTrainer

logger = logging.getLogger(__name__)

PUBLIC_ROWS = 64
"""So many, at most, say how large differences are."""


class Replica:
    """The weights of a run, moved by its releases alone, and finite differences of rows at them.

    All that a private run is checked for is checked here by the trainer's own code, before round 0.
    """

    def __init__(self, trainer: DPZeroTrainer) -> None:
        self.trainer, self.run = trainer, trainer._new_run()
        prepare(self.run)

    def follow(self, contract: Mapping[str, Any]) -> None:
        """Snaps the base weights to the contract's grid; from then on the replica is at round 0.

        Before any release it may follow another contract of the same base and directions.
        """
        self.run.ledger = Trajectory(contract)
        if not hasattr(self, "method"):
            self.method = ZerothOrderMethod(self.run, None)

    @property
    def round(self) -> int:
        """The number of releases that are in the weights, r."""
        return self.run.opened.next_step

    def catch_up(self, releases: Sequence[Release]) -> None:
        """Applies those releases of rounds 0, 1, ... that the weights lack."""
        applied = self.run.opened
        # of what both have the last one is enough: ledgers are compared whole where they are kept
        last = min(self.round, len(releases)) - 1
        if last >= 0 and applied.releases[last] != releases[last]:
            raise LedgerError(
                f"round {last} was another one here: these releases are another run's."
            )
        for release in releases[self.round :]:
            applied.append(release)
            apply_release(self.method.space, applied, release)

    def differences(self, indices: Sequence[int]) -> Tensor:
        """Measures rows along this round's K directions: private float64 [B, K]; the weights stay."""
        if self.run.shapes is not None:
            return self._measured(self.run.shapes.microbatches(indices))
        # a run without noise protects nothing, so its passes may be of any size
        size, collate = self.run.args.physical_batch_size, self.run.rows.collate_rows
        starts = range(0, len(indices), size)
        return self._measured([collate(list(indices[i : i + size])) for i in starts])

    def public_norms(self) -> Tensor | None:
        """Measures public rows as `differences` does: finite float64 norms [B]; None without any."""
        with leaving_out("public rows were not measured"):
            norms = self._measured(public_microbatches(self.run, PUBLIC_ROWS)).norm(dim=1)
            return norms[norms.isfinite()] if norms.isfinite().any() else None
        return None

    def _measured(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        directions = directions_of(self.round, self.run.header)
        with self.method.reads.own_step(), isolated_randomness():
            differences: Tensor = self.method.step.differences(parts, directions)
            self.method.settle_()
        return differences

    def close(self) -> None:
        """Takes the watchers off the model; the weights stay where they are."""
        self.run.resources.close()


@dataclass(eq=False, repr=False)
class LocalClient:
    """Answers a server's messages for one client.

    Guarantee: one release a round at most, and no more than the plan's rounds, whatever the server asks,
    how often, and through how many crashes: the noised values are in `released.ledger` before they are
    sent, and a round that is there is answered from there. So `local.epsilon(count)` bounds what the
    server and everybody who reads the messages can learn of a row.

    Attributes:
      folder: its own, for its ledger and the run's releases; refused where it is of another run.
      contract: that it adopted (`plan.adopt`).
      rows: which rows of the replica's data are its own, int64 [n_i].
      noise: drawn here and nowhere else.
    """

    name: str
    folder: Path
    local: LocalPlan
    contract: Mapping[str, Any]
    rows: np.ndarray
    noise: NoiseSource

    def __post_init__(self) -> None:
        self._digest = contract_digest(self.contract)
        with self._files():  # the next process of this client finds the contract in the folder
            pass

    @contextlib.contextmanager
    def _files(self) -> Iterator[tuple[MessageLog, Trajectory]]:
        """Opens its own ledger, made before any other file of a run, and the public releases so far."""
        path, public = self.folder / RELEASED_NAME, self.folder / LEDGER_NAME
        if public.exists() and not path.exists():
            raise LedgerError(
                f"{path} is missing, which said what this client released: a new one would forget what "
                f"was spent, and draw the open round's noise again. Restore it, or take another "
                "output-dir; what was spent stays spent."
            )
        header = {
            "client": self.name,
            "contract_digest": self._digest.hex(),
            "noise_source": self.noise.stated_name,
            **self.local.to_dict(),
        }
        with contextlib.closing(
            MessageLog(path, header, self.local.mechanism.values_per_release)
        ) as ledger:
            opened = Trajectory.open if public.exists() else Trajectory.create
            with contextlib.closing(opened(public, self.contract)) as known:
                yield ledger, known

    def answer(self, replica: Replica, raw: bytes | None) -> bytes:
        """Takes the releases that an ask brings, and answers with this round's values.

        Answers `BEHIND` where releases are missing, before any row is read, and `NOTHING` for a round
        that is over here or beyond the plan. Nothing is released where it raises: for a message that is
        malformed or of another contract, and files that are damaged or held by another process.
        """
        ask = unpack(raw, self.local.mechanism.values_per_release)
        check_contract(ask.contract, self._digest)
        if ask.kind != ASK:
            raise MessageError(f"a message of kind {ask.kind} to a client, which takes asks only.")
        # held for one message only: a process that takes this one's place finds them free
        with self._files() as (ledger, known):
            return pack(self._answer(replica, known, ledger, ask))

    def _answer(
        self, replica: Replica, known: Trajectory, ledger: MessageLog, ask: Message
    ) -> Message:
        for release in ask.releases:
            if (before := known.get(release.step)) is None:
                if release.step > known.next_step:
                    break  # of a gap in front of it the server hears below
                known.append(release)
            elif before != release:
                raise MessageError(
                    f"round {release.step} is another one than this client was told before."
                )
        if known.next_step < ask.round:
            return Message(BEHIND, known.next_step, self._digest)
        if (values := ledger.messages.get((ask.round, 0))) is not None:
            # the answer was lost: other noise over the same rows would be a second release
            return Message(VALUES, ask.round, self._digest, values=values)
        last, rounds = max((r for r, _ in ledger.messages), default=-1), self.local.rounds
        if known.next_step > ask.round or ask.round < last:  # over: the weights have moved on
            return Message(NOTHING, ask.round, self._digest)
        if ask.round >= rounds or len(ledger.messages) >= rounds:
            logger.warning("client %s is asked for more than its %s rounds.", self.name, rounds)
            return Message(NOTHING, ask.round, self._digest)
        replica.catch_up(known.releases)
        if replica.round != ask.round:
            raise LedgerError(f"the replica is at round {replica.round}: start this client anew.")
        mechanism = self.local.mechanism
        drawn = self.rows[self.local.rows(ask.round)].tolist()
        total = mechanism.clip_sum(replica.differences(drawn))
        noised = mechanism.release(total, ask.round, self.noise)
        ledger.append(ask.round, 0, noised)  # paid for before it is sent
        return Message(VALUES, ask.round, self._digest, values=tuple(noised))


def check_ceiling(folder: Path, local: LocalPlan, ceiling: float | None) -> None:
    """Refuses a new run that could pass a client's epsilon of all its runs; None allows the first alone.

    A run counts with all of its rounds, whatever was released so far: it may go on.
    """
    if (folder / RELEASED_NAME).exists() or folder.parent.name != RUNS:
        return
    before = served(folder.parent.parent)
    if not before and ceiling is None:
        return
    plans = [*(run.local for run in before), local]
    total = together([(plan, plan.rounds) for plan in plans], local.delta)
    total = total if all(run.private for run in before) else math.inf
    if ceiling is None or not total <= ceiling:  # NaN allows nothing
        most = (
            "no max-epsilon says how much they may" if ceiling is None else f"{ceiling:g} at most"
        )
        raise PlanError(
            f"all rounds of this run and of {len(before)} earlier ones on the client's rows would cost "
            f"epsilon = {round_up(total)} together, and {most}: set max-epsilon in --node-config, a "
            "smaller target_epsilon, or leave this run out."
        )
