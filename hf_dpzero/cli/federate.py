"""`hf-dpzero federate RECIPE --clients n --rounds R`: clients with their own rows and local noise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dpzero.cli.options import Federate
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME
from hf_dpzero.recipes.recipe import load_recipe

if TYPE_CHECKING:
    from hf_dpzero.federated.setup import Settings

ENGINES = ("flower", "in_process")


def run(arguments: Federate) -> None:
    """Trains, writes ledgers, report, plot and weights into output_dir, prints the report.

    Interrupted, the same command with --resume goes on from the ledgers.
    """
    from hf_dpzero.federated.report import summary
    from hf_dpzero.federated.run import ServerRun, run_in_process
    from hf_dpzero.federated.setup import Side

    settings, folder = _settings(arguments), _folder(arguments)
    settings.load(folder)  # refuses before anything is loaded
    if (folder / LEDGER_NAME).exists() and not arguments.resume:
        raise LedgerError(
            f"{folder} holds the ledger of an earlier run: go on with --resume, or take another "
            "--output_dir. What its clients spent stays spent either way."
        )
    if arguments.engine == "in_process":
        print(summary(run_in_process(settings, folder, resume=arguments.resume)))
        return
    from hf_dpzero.federated import flower

    flower.check_flower()
    side = Side.build(settings, folder)
    server = ServerRun(side, folder, resume=arguments.resume)
    stops = flower.random_stops(settings.clients, server.server.rounds, arguments.drop)

    def serve(transport: flower.FlowerTransport) -> None:
        server.run(transport, min_clients=arguments.min_clients)

    try:
        flower.simulate(
            serve,
            flower.simulated_clients(settings, str(folder), stops),
            num_clients=settings.clients,
            timeout=arguments.timeout,
            actors=arguments.actors,
        )
        print(summary(server.report()))
    finally:
        server.close()


def _settings(arguments: Federate) -> Settings:
    from hf_dpzero.federated.setup import Settings

    if arguments.engine not in ENGINES:
        raise ValueError(f"--engine {arguments.engine}: use one of {', '.join(ENGINES)}.")
    if arguments.drop and arguments.engine != "flower":
        raise ValueError("--drop is for --engine flower; leave it out.")
    if not 0 <= arguments.drop < max(1, arguments.clients):
        raise ValueError(
            f"--drop {arguments.drop} of {arguments.clients} clients: leave one at least."
        )
    return Settings(
        recipe=os.path.abspath(arguments.recipe)
        if os.path.exists(arguments.recipe)
        else arguments.recipe,
        overrides=tuple(arguments.overrides),
        clients=arguments.clients,
        rounds=arguments.rounds,
        participation=arguments.participation,  # type: ignore[arg-type] # checked by local_plan
    )


def _folder(arguments: Federate) -> Path:
    if arguments.output_dir is not None:
        return Path(arguments.output_dir).absolute()
    own = str(load_recipe(arguments.recipe, arguments.overrides).training.output_dir)
    return Path(own.rstrip("/") + "-federated").absolute()
