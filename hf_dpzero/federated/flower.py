"""Carries a run's bytes by Flower (https://flower.ai), and simulates its clients by Flower on Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.federated.client import RELEASED_NAME
from hf_dpzero.federated.envelope import TYPES, failure, reply, unwrapped, wrapped
from hf_dpzero.federated.message_log import read_count
from hf_dpzero.federated.setup import CLIENTS, Settings, Side

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)

_SIDES: dict[Any, Side] = {}


def check_flower() -> None:
    """Refuses to go on without Flower.

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


class FlowerTransport:
    """A `rounds.Transport` over Flower's grid: addresses are node ids.

    Args:
      grid: of a ServerApp.
      timeout: seconds for the answers of a round; later ones are not taken.
      join_timeout: for answers to an invitation, which load model and data first.
    """

    def __init__(self, grid: Grid, timeout: float, join_timeout: float = 1800.0) -> None:
        self.grid = grid
        self.timeouts = {"join": join_timeout, "round": timeout}

    def present(self) -> Sequence[str]:
        """Nodes that are connected."""
        return [str(node) for node in self.grid.get_node_ids()]

    def exchange(self, kind: str, payloads: Mapping[str, bytes]) -> dict[str, Any]:
        """As in `Transport`; a client that fails answers with an error and is missing."""
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


def client_app(
    settings: Settings, folder: str, stops: Mapping[int, int] | None = None
) -> ClientApp:
    """The clients of a simulation: partition i is the client with shard i.

    Args:
      settings: of the run.
      folder: the run's output_dir; clients keep their ledgers in folders of their own below it.
      stops: client -> the number of asks after which it is dead, for trials of dropouts.
    """
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def join(message: Message, context: Context) -> Message:
        return _join(settings, folder, message, context)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        return _answer(settings, folder, stops or {}, message, context)

    return app


def _side(settings: Settings, folder: str) -> Side:
    """One for each process: a module's function travels by name, so that all messages find it."""
    if (settings, folder) not in _SIDES:
        _SIDES[settings, folder] = Side.build(settings, folder)
    return _SIDES[settings, folder]


def _join(settings: Settings, folder: str, message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    where = (name := client_name(client), client, client_folder(folder, name))
    return _answered(
        name, message, lambda side: side.invited(*where, unwrapped(message)), settings, folder
    )


def _answer(
    settings: Settings, folder: str, stops: Mapping[int, int], message: Message, context: Context
) -> Message:
    client = int(context.node_config["partition-id"])
    where = (name := client_name(client), client, client_folder(folder, name))
    if client in stops and read_count(where[-1] / RELEASED_NAME) >= stops[client]:
        return failure(message, "dropped out")

    def values(side: Side) -> bytes:
        return side.client(*where).answer(side.replica, unwrapped(message))

    return _answered(name, message, values, settings, folder)


def _answered(
    name: str,
    message: Message,
    answer: Callable[[Side], bytes],
    settings: Settings,
    folder: str,
) -> Message:
    """An answer; of an error, only that there was one: its words stay in the client's own log."""
    try:
        return reply(answer(_side(settings, folder)), message)
    except Exception:
        logger.exception("%s failed", name)
        return failure(message)


def client_name(client: int) -> str:
    """What a simulation calls its clients.

    >>> client_name(7)
    'client-007'
    """
    return f"client-{client:03d}"


def client_folder(folder: str | Path, name: str) -> Path:
    """Where a client of a simulation keeps its ledger."""
    return Path(folder) / CLIENTS / name


def random_stops(clients: int, rounds: int, drop: int) -> dict[int, int]:
    """`drop` clients drawn at random, and the round in which each dies."""
    drawn = random.SystemRandom()
    return {c: drawn.randrange(1, max(2, rounds)) for c in drawn.sample(range(clients), drop)}


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
      clients: of `client_app`.
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
    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": actors, "include_dashboard": False, "log_to_driver": False},
    }
    with _importable():
        run_simulation(server, clients, num_supernodes=num_clients, backend_config=backend)
    if failures:
        raise failures[0]


@contextlib.contextmanager
def _importable() -> Any:
    """Ray's processes find this package where this process found it."""
    import hf_dpzero

    root, before = str(Path(hf_dpzero.__file__).parent.parent), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
