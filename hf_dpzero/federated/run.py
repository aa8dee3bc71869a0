"""A whole federated run: the server's side from start to report, over a transport."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_dpzero.federated.ending import Start, save_weights
from hf_dpzero.federated.rates import Rates
from hf_dpzero.federated.report import federated_report, save_report
from hf_dpzero.federated.rounds import InProcess, Rounds, Transport
from hf_dpzero.federated.server import RoundServer
from hf_dpzero.federated.setup import CLIENTS, Settings, Side
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Release
from hf_dpzero.reporting.hub import RECIPE_FILE

EVALUATIONS_NAME = "evaluations.json"


def _evaluations_before(folder: Path, number: int) -> list[dict[str, Any]]:
    """Those of the processes before this one, up to a round."""
    path = folder / EVALUATIONS_NAME
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return [entry for entry in found if entry["round"] <= number]


class ServerRun:
    """The server's side of a run: rounds, evaluations, report and weights.

    Args:
      side: built from the recipe.
      folder: output_dir.
      resume: go on with its ledgers.
    """

    def __init__(self, side: Side, folder: Path, *, resume: bool = False) -> None:
        self.side, self.folder = side, folder
        self.start = Start.of(side.replica.trainer)
        self.server: RoundServer = side.start_server(folder, resume=resume)
        self.evaluations = _evaluations_before(folder, self.server.round) if resume else []
        self.answered: list[int] = []
        self.rounds: Rounds | None = None

    def run(self, transport: Transport, *, min_clients: int = 1, patience: float = 60.0) -> None:
        """Takes the rounds that are left and writes everything; after a failure, the report alone.

        Args:
          transport: to the clients.
          min_clients, patience: see `rounds.Rounds`.
        """
        self.rounds = rounds = Rounds(
            self.server,
            transport,
            Rates(self.side.recipe.training, self.server),
            min_clients=min_clients,
            patience=patience,
        )
        if not self.evaluations or self.evaluations[-1]["round"] < self.server.round:
            self._evaluate()
        done = False
        bar = tqdm(
            total=self.server.rounds, initial=self.server.round, desc="rounds", file=sys.stderr
        )
        try:
            with bar:

                def on_round(release: Release, count: int) -> None:
                    self._after(release, count)
                    bar.update()
                    bar.set_postfix(clients=count, refresh=False)

                rounds.run(on_round)
            done = True
        finally:
            if self.server.round:
                self._finish(weights=done)

    def _after(self, release: Release, count: int) -> None:
        self.answered.append(count)
        self.side.replica.catch_up(self.server.trajectory.releases)
        config = self.side.recipe.training
        every = int(config.eval_steps or 0) if config.eval_strategy == "steps" else 0
        last = self.server.round == self.server.rounds
        if last or (every and self.server.round % every == 0):
            self._evaluate()

    def _evaluate(self) -> None:
        metrics = self.side.replica.evaluate()
        kept = {
            name: value
            for name, value in metrics.items()
            if not name.endswith(("_runtime", "_per_second", "_time")) and name != "epoch"
        }
        self.evaluations.append({"round": self.server.round, **kept})
        write_atomically(self.folder / EVALUATIONS_NAME, json.dumps(self.evaluations))

    def report(self) -> dict[str, Any]:
        """The run's report so far."""
        report = federated_report(self.server, self.folder / CLIENTS, self.evaluations)
        return {**report, "left_out": self.rounds.left_out() if self.rounds else []}

    def _finish(self, weights: bool) -> None:
        report = self.report()
        save_report(report, self.folder, self.answered)
        self.server.trajectory.to_safetensors(self.folder / SHIPPING_NAME)
        recipe = self.side.recipe.to_yaml()
        (self.folder / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        if weights:
            config = copy.copy(self.side.recipe.training)
            if self.side.settings.own_rows:
                config.target_epsilon = None  # each client has one of its own
            save_weights(self.server, self.side.replica.trainer, config, report, self.start)

    def close(self) -> None:
        """Lets go of the ledgers and the model."""
        self.server.close()
        self.side.replica.close()


def in_process(side: Side, folder: Path, names: Sequence[str]) -> InProcess:
    """Clients in this process on the server's replica, shard i for the i-th name.

    Args:
      side: of the server, started.
      folder: the run's.
      names: of the clients.
    """

    def join(name: str, invitation: bytes) -> bytes:
        return side.join(name, names.index(name), folder / CLIENTS / name, invitation)

    return InProcess(side.clients, names, side.replica, join)


def run_in_process(settings: Settings, folder: Path, *, resume: bool = False) -> dict[str, Any]:
    """A run of server and clients in one process: the same messages and ledgers, without a network.

    Args:
      settings: of the run.
      folder: output_dir.
      resume: go on with its ledgers.

    Returns:
      The report.
    """
    run = ServerRun(Side.build(settings, folder), folder, resume=resume)
    try:
        names = [f"client-{i:03d}" for i in range(settings.clients)]
        run.run(in_process(run.side, folder, names))
        return run.report()
    finally:
        run.close()
