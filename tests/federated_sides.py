"""Sides of a federated run on a two-layer BERT, in this process; a round takes some milliseconds."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import build, tiny_data

from hf_dpzero.federated.client import Replica
from hf_dpzero.federated.messages import RELEASED_NAME, read_log
from hf_dpzero.federated.plan import SMALLEST_CLIP
from hf_dpzero.federated.run import InProcess, Rounds, ServerRun, learning_rates
from hf_dpzero.federated.server import RoundServer
from hf_dpzero.federated.setup import CLIENTS, Settings, Side
from hf_dpzero.tasks.description import DataArguments

NAMES = ["client-000", "client-001", "client-002"]


def side(
    folder: Path, *, clients: int = 3, rounds: int = 4, data: Any = None, **settings: Any
) -> Side:
    """A side with rows of its own model; `settings` are a DPZeroConfig's."""
    own = {
        name: settings.pop(name)
        for name in ("own_rows", "sampling_probability", "max_epsilon")
        if name in settings
    }
    values = {
        "testing.sampler_key": None,
        "testing.insecure_noise_seed": None,
        "num_directions": 3,
        **settings,
    }
    if own.get("own_rows"):  # as `Side.build`
        values["expected_batch_size"] = 1
    if left_out := values.pop("clip_left_out", False):  # as `Settings.load`
        values["clip"] = SMALLEST_CLIP
    trainer = build(
        folder, data=data if data is not None else tiny_data(60), max_steps=rounds, **values
    )
    recipe_args = copy.copy(trainer.args)
    recipe_args.expected_batch_size = settings.get("expected_batch_size", 12)
    recipe_args.clip_left_out = left_out
    chosen = Settings(recipe="none", clients=clients, rounds=rounds, **own)
    recipe: Any = SimpleNamespace(training=recipe_args, data=DataArguments(), to_yaml=lambda: "")
    return Side(chosen, recipe, Replica(trainer))


def started(folder: Path, resume: bool = False, **settings: Any) -> tuple[Side, RoundServer]:
    """A side whose server is open."""
    made = side(folder, **settings)
    return made, made.start_server(folder, resume=resume)


def rounds_of(made: Side, server: RoundServer, names: list[str] = NAMES, **settings: Any) -> Rounds:
    """The rounds of a server with clients in this process."""
    transport = InProcess(made, server.folder, names)
    config = made.recipe.training
    return Rounds(
        server, transport, lambda: learning_rates(config), **{"patience": 0.0, **settings}
    )


def client_folder(folder: Path, name: str = NAMES[0]) -> Path:
    return folder / CLIENTS / name


def released(folder: Path, name: str = NAMES[0]) -> int:
    """In how many rounds a client released, by its own ledger."""
    return len(read_log(client_folder(folder, name) / RELEASED_NAME)[1])


def interrupted(run: ServerRun, transport: InProcess, at: int) -> None:
    """Runs a server until Ctrl-C before the messages of a round."""
    exchange = transport.exchange

    def stops(kind: str, payloads: Any) -> Any:
        if run.server.round == at:
            raise KeyboardInterrupt
        return exchange(kind, payloads)

    transport.exchange = stops  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.run(transport)
