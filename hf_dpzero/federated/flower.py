"""All that knows Flower (https://flower.ai): payloads in its messages, a simulation on Ray, two apps.

Each payload travels as one bytes entry of a `ConfigRecord`: kind "join" as Flower's message type query,
kind "round" as train. Flower knows who sent a message; the payload's own checks are in `messages`.
Telemetry of Flower and usage statistics of Ray are off unless the environment says otherwise.

`docs/how_to/federated.md` has the commands for several machines; `configs/federated` is the folder that
`flwr run` takes. Importing this module loads neither torch nor transformers, nor does `client_app`: the
process of a message only carries it (see `node`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dpzero.federated.node import ResidentError, hand_over, node_of, settings_of

# before the first import of flwr or ray, which read them once
for _name, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
    ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
):
    os.environ.setdefault(_name, _value)

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from hf_dpzero.federated.setup import Settings, Side

logger = logging.getLogger(__name__)

RECORD, PAYLOAD = "hf_dpzero", "payload"
TYPES = {"join": "query", "round": "train"}
"""Flower's message type of each kind."""

FAILED = "failed; its own log says why"
"""All that leaves a client of an error, whose words may quote a row."""


def check_flower() -> None:
    """Refuses to start without Flower.

    Raises:
      ImportError: says what to install.
    """
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "federated runs travel by Flower, which is not installed: pip install "
            "'hf-dpzero[federated]' (CPython 3.11 or newer), or use --engine in_process."
        ) from error


# ------------------------------------------------------------------ payloads


def wrapped(payload: bytes) -> RecordDict:
    """Returns a payload as Flower carries it."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({RECORD: ConfigRecord({PAYLOAD: payload})})


def unwrapped(message: Message) -> bytes | None:
    """Returns the payload of a message; None if it has none."""
    record = message.content.config_records.get(RECORD)
    payload = None if record is None else record.get(PAYLOAD)
    return payload if isinstance(payload, bytes) else None


def reply(payload: bytes, message: Message) -> Message:
    """Returns an answer."""
    from flwr.app import Message

    return Message(wrapped(payload), reply_to=message)


def failure(message: Message, reason: str) -> Message:
    """Returns the answer of a client that has none."""
    from flwr.app import Error, Message

    return Message(Error(code=0, reason=reason), reply_to=message)


class FlowerTransport:
    """A `run.Transport` over Flower's grid: addresses are node ids.

    Args:
      grid: of a ServerApp.
      timeout: seconds for the answers of a round; later ones are not taken.
    """

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.grid = grid
        # to answer an invitation, a client loads model and data first
        self.timeouts = {"join": 1800.0, "round": timeout}

    def present(self) -> Sequence[str]:
        """Returns the nodes that are connected."""
        return [str(node) for node in self.grid.get_node_ids()]

    def exchange(self, kind: str, payloads: Mapping[str, bytes]) -> dict[str, bytes | None]:
        """Does what `Transport` says; a client that fails answers with an error and is missing."""
        from flwr.app import Message

        if not payloads:
            return {}
        messages = [
            Message(wrapped(payload), dst_node_id=int(node), message_type=TYPES[kind])
            for node, payload in payloads.items()
        ]
        answers = {}
        for answer in self.grid.send_and_receive(messages, timeout=self.timeouts[kind]):
            node = str(answer.metadata.src_node_id)
            if answer.has_error():
                logger.warning("node %s gave no answer: %s", node, answer.error.reason)
            else:
                answers[node] = unwrapped(answer)
        return answers


# ------------------------------------------------------------------ clients

Answer = Callable[[str, bytes, "Context"], bytes]
"""(kind, payload, Flower's context of the node) -> payload of the answer."""


def answered(answer: Answer, kind: str, message: Message, context: Context) -> Message:
    """Returns a client's answer; of an error, only that there was one."""
    try:
        payload = unwrapped(message)
        if payload is None:
            raise ValueError("a message without bytes")
        return reply(answer(kind, payload, context), message)
    except (ResidentError, ValueError) as error:  # what the user can mend
        logger.error("no answer: %s", error)
    except Exception:
        logger.exception("no answer")
    return failure(message, FAILED)


def _app_of(answer: Answer) -> ClientApp:
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def join(message: Message, context: Context) -> Message:
        return answered(answer, "join", message, context)

    @app.train()
    def take_part(message: Message, context: Context) -> Message:
        return answered(answer, "round", message, context)

    return app


def client_app() -> ClientApp:
    """Makes the app of a client with rows of its own, for a SuperNode."""
    return _app_of(deployed_answer)


def deployed_answer(kind: str, payload: bytes, context: Context) -> bytes:
    """Has a SuperNode's resident process answer."""
    node = node_of(context.node_config)
    return hand_over(node.folder, dict(context.node_config), kind, payload)


def simulated_clients(settings: Settings, folder: str) -> ClientApp:
    """Makes the app of a simulation's clients: partition i is the client with shard i.

    Args:
      settings: of the run.
      folder: the run's output_dir; clients keep their ledgers in folders of their own below it.
    """
    return _app_of(functools.partial(simulated_answer, settings, folder))


def simulated_answer(
    settings: Settings, folder: str, kind: str, payload: bytes, context: Context
) -> bytes:
    """Answers for a client of a simulation."""
    from hf_dpzero.federated.setup import CLIENTS

    client = int(context.node_config["partition-id"])
    name = f"client-{client:03d}"
    own = Path(folder) / CLIENTS / name
    if kind == "join":
        return _side(settings, folder).invited(name, client, own, payload)
    side = _side(settings, folder)
    return side.client(name, client, own).answer(side.replica, payload)


@functools.cache
def _side(settings: Settings, folder: str) -> Side:
    """Builds one for each process: a module's function travels by name, so all messages find it."""
    from hf_dpzero.federated.setup import Side

    return Side.build(settings, folder)


# ------------------------------------------------------------------ servers


def server_app() -> ServerApp:
    """Makes the server's app, for a SuperLink; it resumes where its output-dir has a ledger."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
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


def simulate(
    serve: Callable[[FlowerTransport], None],
    clients: ClientApp,
    *,
    num_clients: int,
    timeout: float,
    actors: int = 1,
) -> None:
    """Runs server and clients on this machine: clients share `actors` processes of Ray.

    Args:
      serve: what the server does with the transport.
      clients: of `simulated_clients`.
      num_clients: n.
      timeout: see `FlowerTransport`.
      actors: processes at once.

    Raises:
      Exception: whatever `serve` raised.
    """
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    failures: list[BaseException] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            serve(FlowerTransport(grid, timeout))
        except BaseException as error:  # Flower would only log it
            failures.append(error)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server,
        clients,
        num_supernodes=num_clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": actors, "include_dashboard": False, "log_to_driver": False},
        },
    )
    if failures:
        raise failures[0]
