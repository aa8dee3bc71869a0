"""Flower's two apps for a SuperLink and SuperNodes: a server, and a client with rows of its own.

`docs/how_to/federated.md` has the commands; `configs/federated` is the folder that `flwr run` takes. The
client's app loads neither model nor torch: see `resident`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dpzero.federated.envelope import failure, reply, unwrapped
from hf_dpzero.federated.node import node_of, settings_of
from hf_dpzero.federated.resident import ResidentError, hand_over

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

logger = logging.getLogger(__name__)


def client_app() -> ClientApp:
    """A client with rows of its own, for a SuperNode."""
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def join(message: Message, context: Context) -> Message:
        return answered("join", message, context)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        return answered("round", message, context)

    return app


def answered(kind: str, message: Message, context: Context) -> Message:
    """The client's answer; of an error, only that there was one."""
    try:
        node, payload = node_of(context.node_config), unwrapped(message)
        if not isinstance(payload, bytes):
            raise ValueError(f"a message without bytes, but {type(payload).__name__}")
        return reply(hand_over(node.folder, node.values, kind, payload), message)
    except (ResidentError, ValueError) as error:  # what the user can mend
        logger.error("%s", error)
        return failure(message)
    except Exception:
        logger.exception("no answer")
        return failure(message)


def server_app() -> ServerApp:
    """The server, for a SuperLink; it goes on where its output-dir has a ledger."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        from hf_dpzero.federated.flower import FlowerTransport
        from hf_dpzero.federated.report import summary
        from hf_dpzero.federated.run import ServerRun
        from hf_dpzero.federated.setup import Side
        from hf_dpzero.ledger.trajectory import LEDGER_NAME

        config = context.run_config
        folder = Path(str(config["output-dir"])).absolute()
        resume = (folder / LEDGER_NAME).is_file()
        run = ServerRun(Side.build(settings_of(config), folder), folder, resume=resume)
        transport = FlowerTransport(grid, float(config.get("timeout", 600.0)))
        try:
            run.run(transport, min_clients=int(config.get("min-clients", 1)), patience=600.0)
            print(summary(run.report()))
        finally:
            run.close()

    return app
