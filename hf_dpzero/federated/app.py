"""Flower's two apps for a SuperLink and SuperNodes: a server, and a client with rows of its own.

What concerns a client's privacy (recipe, overrides, rows, folder) comes from the client's own
`--node-config`, never from the server's run configuration. `docs/how_to/federated.md` has the commands;
`configs/federated` is the folder that `flwr run` takes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.federated import flower
from hf_dpzero.federated.report import summary
from hf_dpzero.federated.run import ServerRun
from hf_dpzero.federated.setup import Settings, Side
from hf_dpzero.ledger.trajectory import LEDGER_NAME

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp


def settings_of(values: Mapping[str, Any]) -> Settings:
    """A side's settings from a configuration of Flower.

    Args:
      values: `recipe`, and if wanted `overrides` (words), `rounds`, `participation`,
        `sampling-probability`.

    Raises:
      ValueError: no recipe.
    """
    if not values.get("recipe"):
        raise ValueError(
            "recipe is missing: give it in --node-config for a client, in --run-config for the server."
        )
    probability = values.get("sampling-probability")
    return Settings(
        recipe=str(values["recipe"]),
        overrides=tuple(shlex.split(str(values.get("overrides", "")))),
        rounds=int(values["rounds"]) if values.get("rounds") else None,
        participation=values.get("participation") or "sampled",
        sampling_probability=float(probability) if probability else None,
        own_rows=True,
    )


def client_app() -> ClientApp:
    """A client with rows of its own, for a SuperNode."""
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def join(message: Message, context: Context) -> Message:
        return flower.answer_invitation(*_own(context.node_config), message)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        return flower.answer_round(*_own(context.node_config), message)

    return app


def _own(config: Mapping[str, Any]) -> tuple[Settings, str, str, int, Path]:
    """What is this client's: settings, folder for its trainer, name, number, folder of its ledger."""
    name = str(config.get("name", ""))
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"name={name!r} in --node-config: give each client a name of its own.")
    folder = Path(str(config.get("output-dir", f"out/{name}"))).absolute()
    return settings_of(config), str(folder), name, 0, folder


def server_app() -> ServerApp:
    """The server, for a SuperLink; it goes on where its output-dir has a ledger."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        config = context.run_config
        folder = Path(str(config["output-dir"])).absolute()
        resume = (folder / LEDGER_NAME).is_file()
        run = ServerRun(Side.build(settings_of(config), folder), folder, resume=resume)
        transport = flower.FlowerTransport(grid, float(config.get("timeout", 600.0)))
        try:
            run.run(transport, min_clients=int(config.get("min-clients", 1)), patience=600.0)
            print(summary(run.report()))
        finally:
            run.close()

    return app
