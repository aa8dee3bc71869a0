"""All that knows Flower (https://flower.ai): payloads in its messages, a simulation on Ray, two apps.

What concerns a client's privacy (recipe, overrides, rows, folder) comes from its own `--node-config`,
never from the server.

Flower 1.41 starts a process for each message of a client on a SuperNode, under both of its isolations.
That process loads neither torch nor transformers (nor does importing this module): it hands the payload
over a local socket to the client's resident process, which ends with its SuperNode. Where there is none,
or it was killed, the message starts one, which continues from the client's ledger:

    python -m hf_dpzero.federated.flower FOLDER PID

What it prints goes to FOLDER/client.log, which may quote rows: only its owner reads it, and it stays
there. Telemetry of Flower and usage statistics of Ray are off unless the environment says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hf_dpzero.federated import NAME
from hf_dpzero.ledger.log_file import locked, write_for_owner

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
_T = TypeVar("_T")

RECORD, ANSWER = "hf_dpzero", "answer"

ADDRESS_NAME, LOCK_NAME, LOG_NAME = "resident.json", "resident.lock", "client.log"
START_SECONDS, WATCH_SECONDS = 120.0, 2.0
_GONE = (OSError, EOFError, AuthenticationError)  # a process that ended, or is not the one meant


class ResidentError(ValueError):
    """A resident process that could not be started, or that failed; its log says why."""


def check_flower() -> None:
    """Raises an ImportError that says what to install, where Flower is not."""
    if importlib.util.find_spec("flwr") is None:
        raise ImportError(
            "federated runs travel by Flower, which is not installed: pip install "
            "'flwr[simulation]' (CPython 3.11 or newer), or use --engine in_process."
        )


def wrapped(payload: bytes, kind: str = ANSWER) -> RecordDict:
    """Returns a payload as Flower carries it; `kind` is "join" or "round" of a server's message."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({RECORD: ConfigRecord({kind: payload})})


def unwrapped(message: Message) -> tuple[str, bytes | None]:
    """Returns kind and payload of a message; no payload if it has none."""
    record = message.content.config_records.get(RECORD)
    kind, payload = next(iter(record.items()), ("", None)) if record else ("", None)
    return kind, payload if isinstance(payload, bytes) else None


class FlowerTransport:
    """A `run.Transport` over Flower's grid: addresses are node ids; a round ends after `timeout` s."""

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.grid = grid
        # to answer an invitation, a client loads model and data first
        self.timeouts = {"join": 1800.0, "round": timeout}

    def present(self) -> Sequence[str]:
        return [str(node) for node in self.grid.get_node_ids()]

    def exchange(self, kind: str, payloads: Mapping[str, bytes]) -> dict[str, bytes | None]:
        from flwr.app import Message

        if not payloads:
            return {}
        messages = [
            Message(wrapped(payload, kind), dst_node_id=int(node), message_type="train")
            for node, payload in payloads.items()
        ]
        answers = {}
        for answer in self.grid.send_and_receive(messages, timeout=self.timeouts[kind]):
            node = str(answer.metadata.src_node_id)
            if answer.has_error():
                logger.warning("node %s gave no answer: %s", node, answer.error.reason)
            else:
                answers[node] = unwrapped(answer)[1]
        return answers


def client_of(values: Mapping[str, Any]) -> tuple[str, Path]:
    """Reads a client's name and its own folder: `name`, and if wanted `output-dir`."""
    name = str(values.get("name", ""))
    if not NAME.fullmatch(name):
        raise ValueError(
            f"name={name!r} in --node-config: give each client a name of its own, of letters and digits."
        )
    return name, Path(str(values.get("output-dir") or f"out/{name}")).absolute()


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Reads a side's settings from a configuration of Flower, where "" stands for none."""
    if not values.get("recipe"):
        raise ValueError(
            "recipe is missing: give it in --node-config for a client, in --run-config for the server."
        )
    numbers: dict[str, Any] = {}
    for name, kind in (("rounds", int), ("sampling-probability", float), ("max-epsilon", float)):
        if (given := values.get(name, "")) != "":
            try:
                numbers[name.replace("-", "_")] = kind(given)
            except (TypeError, ValueError):
                raise ValueError(f"{name}={given!r}: give a number.") from None
    from hf_dpzero.federated.setup import Settings

    words = tuple(shlex.split(str(values.get("overrides", ""))))
    given = {"recipe": str(values["recipe"]), "overrides": words, "clients": 1, "own_rows": True}
    return Settings(**given, **numbers)


def hand_over(folder: Path, values: Mapping[str, Any], kind: str, payload: bytes) -> bytes:
    """Has a client's resident process answer a message, or raises a `ResidentError`."""
    for _ in range(2):  # once more if it is killed meanwhile
        with contextlib.suppress(*_GONE), _connected(folder) as connection:
            connection.send((dict(values), kind, payload))
            answer: bytes | None = connection.recv()
            if answer is not None:
                return answer
            break
    raise ResidentError(f"no answer; {folder / LOG_NAME} says why.")


def _connected(folder: Path) -> Connection:
    deadline, process = time.monotonic() + START_SECONDS, None
    while process is None or (process.poll() is None and time.monotonic() < deadline):
        with contextlib.suppress(*_GONE, ValueError, KeyError):
            return _call(folder)
        process = process or _start(folder)
        time.sleep(0.05)
    process.kill()
    raise ResidentError(f"the client's process does not start; {folder / LOG_NAME} says why.")


def _call(folder: Path) -> Connection:
    entry = json.loads((folder / ADDRESS_NAME).read_text(encoding="utf-8"))
    return Client(entry["address"], authkey=bytes.fromhex(entry["key"]))


def _start(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG_NAME
    log.touch(mode=0o600)
    log.chmod(0o600)  # an older log may be readable by others
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "hf_dpzero.federated.flower", str(folder), str(os.getppid())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Flower ends the process of a message with its group
        )


def serve(folder: Path) -> None:
    """Answers the messages of one client, one after the other."""
    key, answers = secrets.token_bytes(32), _Answers(folder)
    # the key keeps out whoever reaches the socket and cannot read the owner's file
    with Listener(authkey=key) as listener:
        entry = {"address": listener.address, "key": key.hex(), "pid": os.getpid()}
        write_for_owner(folder / ADDRESS_NAME, json.dumps(entry))
        while True:
            with contextlib.suppress(*_GONE), listener.accept() as connection:
                connection.send(answers(*connection.recv()))


class _Answers:
    """Answers of a client; model and rows are loaded with the first message of a run.

    Each run has a folder of its own, named by its contract. For two runs at a time model and rows are
    loaded anew at each turn, as they are for other values of `--node-config`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: str | None = None
        self.side: Side | None = None

    def __call__(self, values: Mapping[str, Any], kind: str, payload: bytes) -> bytes | None:
        return _or_logged(self._answer, values, kind, payload)

    def _answer(self, values: Mapping[str, Any], kind: str, payload: bytes) -> bytes:
        (name, _), settings = client_of(values), settings_of(values)
        from hf_dpzero.federated.report import RUNS
        from hf_dpzero.federated.setup import Side, run_of

        run, side = run_of(kind, payload), self.side
        followed = side is not None and side.contract is not None
        if side is None or side.settings != settings or (followed and self.run != run):
            self.side = side = None  # one model in memory
            self.side = side = Side.build(settings, self.folder)
        self.run = run
        return side.answer(kind, payload, name, 0, self.folder / RUNS / run)


def _or_logged(answer: Callable[..., _T], *given: Any) -> _T | None:
    """Returns an answer, or None: no word of an error leaves the client."""
    try:
        return answer(*given)
    except (ValueError, OSError, ImportError) as error:  # what the user can mend
        logger.debug("where it came from", exc_info=True)
        logger.error("no answer: %s", error)
    except Exception:
        logger.exception("no answer")
    return None


def _end_with(watched: int) -> None:
    """Ends this process after another one: what was released is on disk before it is sent."""
    while True:
        try:
            os.kill(watched, 0)
        except ProcessLookupError:
            os._exit(0)
        except OSError:  # one that is there and another user's may not be signalled
            pass
        time.sleep(WATCH_SECONDS)


Answer = Callable[[str, bytes, "Context"], bytes]
"""(kind, payload, Flower's context of the node) -> payload of the answer."""


def answered(answer: Answer, message: Message, context: Context) -> RecordDict | None:
    """Returns what a client answers with; None, and nothing of the error, if it has no answer."""
    kind, payload = unwrapped(message)
    found = None if payload is None else _or_logged(answer, kind, payload, context)
    return None if found is None else wrapped(found)


def _app_of(answer: Answer) -> ClientApp:
    from flwr.app import Error, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def reply(message: Message, context: Context) -> Message:
        found = answered(answer, message, context)
        # all that leaves a client of an error, whose words may quote a row
        return Message(found or Error(0, "failed; its own log says why"), reply_to=message)

    return app


def client_app() -> ClientApp:
    """Makes the app of a client with rows of its own, for a SuperNode."""
    return _app_of(deployed_answer)


def deployed_answer(kind: str, payload: bytes, context: Context) -> bytes:
    """Has a SuperNode's resident process answer."""
    return hand_over(client_of(context.node_config)[1], context.node_config, kind, payload)


def simulated_answer(
    settings: Settings, folder: Path, kind: str, payload: bytes, context: Context
) -> bytes:
    """Answers for a client of a simulation in the run's folder: partition i has shard i."""
    from hf_dpzero.federated.setup import CLIENTS, client_names

    client = int(context.node_config["partition-id"])
    name = client_names(settings.clients)[client]
    own = (name, client, folder / CLIENTS / name)
    return _side(settings, folder).answer(kind, payload, *own)


@functools.cache
def _side(settings: Settings, folder: Path) -> Side:
    """Builds one for each process: a module's function travels by name, so all messages find it."""
    from hf_dpzero.federated.setup import Side

    return Side.build(settings, folder)


def server_app() -> ServerApp:
    """Makes the server's app, for a SuperLink; it resumes where its output-dir has a ledger."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        from hf_dpzero.federated.report import summary
        from hf_dpzero.federated.run import ServerRun
        from hf_dpzero.ledger.trajectory import LEDGER_NAME

        config = context.run_config
        folder = Path(str(config["output-dir"])).absolute()
        transport = FlowerTransport(grid, float(config.get("timeout", 600.0)))
        resume = (folder / LEDGER_NAME).is_file()
        with contextlib.closing(ServerRun.of(settings_of(config), folder, resume=resume)) as run:
            run.run(transport, min_clients=int(config.get("min-clients", 1)), patience=600.0)
            print(summary(run.report()))

    return app


def simulate(
    serve: Callable[[FlowerTransport], None],
    settings: Settings,
    folder: Path,
    timeout: float,
    actors: int,
) -> None:
    """Runs server and clients on this machine: clients share `actors` processes of Ray."""
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
        _app_of(functools.partial(simulated_answer, settings, folder)),
        num_supernodes=settings.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": actors, "include_dashboard": False, "log_to_driver": False},
        },
    )
    if failures:
        raise failures[0]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    own = Path(sys.argv[1])
    (own / LOCK_NAME).touch()
    # one for a folder: two at once could each admit a run that both together may not
    with locked(own / LOCK_NAME):
        serve(own)
