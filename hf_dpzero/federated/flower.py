"""Carries a run's bytes by Flower (https://flower.ai), which only this file and `app.py` import.

Each payload travels as one bytes entry of a `ConfigRecord`: kind "join" as Flower's message type query,
kind "round" as train. Flower knows who sent a message; the payload's own checks are in `messages`.
Telemetry of Flower and usage statistics of Ray are off unless the environment says otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.federated.client import RELEASED_NAME
from hf_dpzero.federated.contract import ContractError
from hf_dpzero.federated.local_plan import PlanError
from hf_dpzero.federated.message_log import read_count
from hf_dpzero.federated.messages import pack_json
from hf_dpzero.federated.setup import CLIENTS, Settings, Side

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
    from flwr.serverapp import Grid

logger = logging.getLogger(__name__)

RECORD, PAYLOAD = "hf_dpzero", "payload"
_TYPES = {"join": "query", "round": "train"}
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
            Message(wrapped(payload), dst_node_id=int(node), message_type=_TYPES[kind])
            for node, payload in payloads.items()
        ]
        answers = {}
        for reply in self.grid.send_and_receive(messages, timeout=self.timeouts[kind]):
            node = str(reply.metadata.src_node_id)
            if reply.has_error():
                logger.warning("node %s gave no answer: %s", node, reply.error.reason)
            else:
                answers[node] = unwrapped(reply)
        return answers


def wrapped(payload: bytes) -> RecordDict:
    """A payload as Flower carries it."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({RECORD: ConfigRecord({PAYLOAD: payload})})


def unwrapped(message: Message) -> Any:
    """The payload of a message; None if it has none."""
    with contextlib.suppress(KeyError, TypeError):
        record: Any = message.content[RECORD]
        return record[PAYLOAD]
    return None


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
    name = client_name(client)
    return answer_invitation(settings, folder, name, client, client_folder(folder, name), message)


def answer_invitation(
    settings: Settings, folder: str, name: str, client: int, where: Path, message: Message
) -> Message:
    """A client's plan; where it cannot take part, the reason, in words that quote no row.

    Args:
      settings: of the run.
      folder: for what the recipe's trainer writes.
      name: of the client.
      client: its number, for its shard.
      where: its own folder.
      message: the invitation.
    """
    try:
        payload = _side(settings, folder).join(name, client, where, unwrapped(message))
    except (ContractError, PlanError) as error:  # their words say nothing of any row
        payload = pack_json({"declined": str(error)})
    except Exception:
        return _failed(name, message)
    return _reply(payload, message)


def _answer(
    settings: Settings, folder: str, stops: Mapping[int, int], message: Message, context: Context
) -> Message:
    client = int(context.node_config["partition-id"])
    name = client_name(client)
    where = client_folder(folder, name)
    if client in stops and read_count(where / RELEASED_NAME) >= stops[client]:
        return _error("dropped out", message)
    return answer_round(settings, folder, name, client, where, message)


def answer_round(
    settings: Settings, folder: str, name: str, client: int, where: Path, message: Message
) -> Message:
    """A client's noised numbers, written down before; arguments as in `answer_invitation`."""
    try:
        side = _side(settings, folder)
        payload = side.client(name, client, where).answer(side.replica, unwrapped(message))
    except Exception:
        return _failed(name, message)
    return _reply(payload, message)


def _failed(name: str, message: Message) -> Message:
    """An error without its words, which may quote a row: they stay in the client's own log."""
    logger.exception("%s failed", name)
    return _error("failed; its own log says why", message)


def _error(reason: str, message: Message) -> Message:
    from flwr.app import Error, Message

    return Message(Error(code=0, reason=reason), reply_to=message)


def _reply(payload: bytes, message: Message) -> Message:
    from flwr.app import Message

    return Message(wrapped(payload), reply_to=message)


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
