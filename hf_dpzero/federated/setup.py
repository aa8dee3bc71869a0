"""From a recipe to the sides of a federated run: shards, a client with its plan, the server's start."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpzero.federated.client import LocalClient, Replica, check_ceiling
from hf_dpzero.federated.messages import DIGEST_AT, pack_json, unpack_json
from hf_dpzero.federated.plan import (
    SMALLEST_CLIP,
    LocalPlan,
    PlanError,
    adopt,
    check_probability,
    check_settings,
    contract_digest,
    largest_over_expected,
    local_plan,
)
from hf_dpzero.federated.server import RoundServer, members_in
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.log_file import LedgerError, split_header
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.perturbation.directions import new_key
from hf_dpzero.privacy.mechanisms.base import MAX_CLIP
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise
from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.recipe import Recipe, load_recipe
from hf_dpzero.run_folder.folder import ledger_header
from hf_dpzero.tasks.rows import files_of, read_alike

logger = logging.getLogger(__name__)

CLIENTS = "clients"
"""Where the clients of a simulation keep their folders, in the run's output_dir."""

_MOVED = (
    "rows that change between clients would be charged in part only. Resume with the number of clients "
    "and the rows that the run was started with."
)

CLIPPED_FROM = 0.5
"""C over the median norm of public rows' differences, where it is left out: noise shrinks with C, and
what is clipped keeps its sign."""

_OF_ONE_MACHINE = (  # entries of a ledger's header about one data set: each client has its own
    *("plan", "target_epsilon", "target_delta", "tuning", "noise_source", "privacy_unit"),
    *("sampler_key_is_secret", "log_private_diagnostics"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the sides of a run are made from; plain values, so that it travels to other processes."""

    recipe: str  # YAML file or shipped name; its expected_batch_size is all clients' together
    overrides: tuple[str, ...] = ()  # of its fields
    clients: int = 2  # n, shards of its rows; each a file where `train_file` names several
    rounds: int | None = None  # R, in place of max_steps
    sampling_probability: float | None = None  # q; None for expected_batch_size over the rows
    own_rows: bool = False  # they are this client's alone: with clients=1
    max_epsilon: float | None = (
        None  # of all runs of a client; None for the recipe's target_epsilon
    )
    partition: str | None = None  # see `partitioned`; None deals every n-th row

    def load(self, output_dir: str | Path) -> Recipe:
        """Loads the recipe, R in it; refuses settings that federated runs have no accounting for."""
        words = [*self.overrides, "--output_dir", str(output_dir)]
        if self.rounds is not None:
            words += ["--max_steps", str(self.rounds)]
        recipe = load_recipe(self.recipe, words)
        if recipe.training.clip_left_out:  # until the contract says: see `Side.start_server`
            recipe.training.clipping, recipe.training.clip = "fixed", SMALLEST_CLIP
        check_settings(recipe.training)
        if self.clients < 1:
            raise ValueError(f"clients={self.clients}; at least one must take part.")
        return recipe


def shard(num_examples: int, clients: int, client: int) -> np.ndarray:
    """Returns every n-th row, int64, from a client's first on: sizes differ by one at most."""
    if num_examples < clients:
        empty = clients - num_examples
        raise PlanError(f"of {clients} shards, {empty} of them would be empty: use fewer clients.")
    return np.arange(client, num_examples, clients, dtype=np.int64)


def client_names(clients: int) -> list[str]:
    """Returns the names of a simulation's clients, whose numbers are their shards'."""
    return [f"client-{number:03d}" for number in range(clients)]


def run_of(kind: str, payload: bytes) -> str:
    """Returns the contract's digest that a server's message, "join" or "round", is about, in hex."""
    if kind == "join":
        return contract_digest(unpack_json(payload).get("contract", {})).hex()
    return payload[DIGEST_AT].hex()


def check_folder(folder: Path, clients: int, *, resume: bool) -> None:
    """Refuses a simulation's folder in which it cannot start or go on, before anything is loaded."""
    there, before = (folder / LEDGER_NAME).is_file(), len(members_in(folder))
    if there and not resume:
        raise LedgerError(
            f"{folder} holds the ledger of an earlier run, and what it spent stays spent: go on with "
            "--resume, or take another --output_dir."
        )
    if resume and not there:
        raise LedgerError(f"{folder} has no {LEDGER_NAME} to resume from: leave --resume out.")
    if before > clients:
        raise LedgerError(f"{folder} is of {before} clients, and clients={clients}: {_MOVED}")


PARTITIONERS = {
    "dirichlet": ("DirichletPartitioner", "alpha", float),
    "pathological": ("PathologicalPartitioner", "num_classes_per_partition", int),
}
"""By name: Flower's class, and what the number behind the colon is of it."""


def partitioned(labels: Sequence[int], clients: int, partition: str, seed: int) -> list[np.ndarray]:
    """Returns each client's rows as `flwr_datasets` deals them by label, int64, increasing.

    Their numbers follow from the labels, and reports name them: for studies on public rows.
    """
    name, _, number = partition.partition(":")
    try:
        kind, setting, read = PARTITIONERS[name]
        settings = {"num_partitions": clients, "partition_by": "label", setting: read(number)}
    except (KeyError, ValueError):
        known = ", ".join(f"{key}:{entry[1].upper()}" for key, entry in PARTITIONERS.items())
        raise PlanError(f"partition={partition!r}: use one of {known}.") from None
    try:
        from flwr_datasets import partitioner
    except ImportError:
        raise ImportError("partitions need flwr-datasets: pip install flwr-datasets.") from None
    from datasets import Dataset

    made = getattr(partitioner, kind)(seed=seed, **settings)
    made.dataset = Dataset.from_dict({"label": labels, "row": range(len(labels))})
    try:
        return [np.sort(np.asarray(made.load_partition(i)["row"][:])) for i in range(clients)]
    except ValueError as error:
        raise PlanError(f"partition={partition!r}: {error}") from None


@dataclass
class Side:
    """One process of a run: a replica on the rows that are here, a contract and its clients' plans."""

    settings: Settings
    recipe: Recipe
    replica: Replica
    contract: dict[str, Any] | None = None  # until a server offered one, or this side made one
    clients: dict[str, LocalClient] = field(default_factory=dict)  # that joined here, by name
    plans: dict[tuple[int, float, float], LocalPlan] = field(default_factory=dict)

    @classmethod
    def build(cls, settings: Settings, output_dir: str | Path) -> Side:
        """Builds the recipe's trainer with passes as large as a client's batches."""
        recipe = settings.load(output_dir)
        if recipe.data.holdout:
            raise PlanError("holdout: each client holds rows of its own out, in another file.")
        args = copy.copy(recipe.training)
        if args.expected_batch_size is not None:
            all_clients = args.expected_batch_size if settings.own_rows else settings.clients
            args.expected_batch_size = max(1.0, float(args.expected_batch_size // all_clients))
            if args.max_batch_size is not None:
                args.max_batch_size = max(1, math.ceil(args.max_batch_size / all_clients))
        if args.target_epsilon is not None:  # the plan of this trainer is not used: see `LocalPlan`
            args.target_epsilon, args.noise_multiplier = None, 1.0
        trainer = build_trainer(dataclasses.replace(recipe, training=args))
        replica = Replica(trainer)
        recipe.training.num_directions = replica.run.args.num_directions
        return cls(settings, recipe, replica)

    @property
    def num_examples(self) -> int:
        """The number of rows on this machine."""
        return len(self.replica.run.dataset)

    def probability(self) -> float:
        """Returns q of the recipe, or as it was set."""
        given, config = self.settings.sampling_probability, self.recipe.training
        if given is not None:
            return given
        if config.sampling == "full_batch":
            return 1.0
        assert config.expected_batch_size is not None  # a made configuration has one
        return min(1.0, float(config.expected_batch_size) / self.num_examples)

    def own_contract(self) -> dict[str, Any]:
        """Returns the contract of this side's recipe, whose direction key it may leave out."""
        if self.contract is not None:
            return self.contract
        run = self.replica.run
        header, args = ledger_header(run), run.args
        return {
            **{name: value for name, value in header.items() if name not in _OF_ONE_MACHINE},
            "base_model_digest": digest_model(run.model),
            "sampling_probability": self.probability(),
            "federated": {
                "rounds": int(args.max_steps),
                "sampling": args.sampling,
                "largest_over_expected": largest_over_expected(self.recipe.training),
                "clip": self.recipe.training.clip,
                "noise_distribution": args.noise_distribution,
                "neighboring_relation": args.neighboring_relation,
            },
        }

    @functools.cached_property
    def shards(self) -> list[np.ndarray]:
        """Each client's rows among those on this machine."""
        settings, data = self.settings, self.recipe.data
        files = files_of(data.train_file) if data.train_file else []
        if not settings.own_rows and len(files) > 1:
            ends = np.cumsum([len(rows) for rows in read_alike(files)])
            if ends[-1] != self.num_examples:
                raise PlanError(
                    f"the clients' files have {ends[-1]} rows, of which {self.num_examples} are left: "
                    "leave max_train_samples and num_examples_per_class out."
                )
            return np.split(np.arange(self.num_examples), ends[:-1])
        if settings.partition is None:
            return [shard(self.num_examples, settings.clients, i) for i in range(settings.clients)]
        labels = np.asarray(self.replica.run.dataset["labels"][:]).tolist()  # type: ignore[index]
        return partitioned(labels, settings.clients, settings.partition, data.subset_seed)

    def plan_of(self, num_examples: int, sampling_probability: float) -> LocalPlan:
        """Returns the plan of a client with so many rows; calibrated once, which takes seconds."""
        config = self.recipe.training
        key = (num_examples, sampling_probability, config.clip)
        if key not in self.plans:
            self.plans[key] = local_plan(config, *key[:2])
        return self.plans[key]

    def declared_plan(self, num_examples: int, noise_multiplier: float, delta: float) -> LocalPlan:
        """Returns the plan under this side's contract of a client elsewhere, by what it declared."""
        config = copy.copy(self.recipe.training)
        config.target_epsilon, config.noise_multiplier = None, noise_multiplier
        config.target_delta = delta
        q = self.own_contract()["sampling_probability"]
        return local_plan(config, num_examples, q)

    def join(self, name: str, client: int, folder: Path, invitation: bytes | None) -> bytes:
        """Makes a client with that number of shard, and answers an invitation with its plan's numbers.

        Raises:
          PlanError: the server's run is not this recipe's, or there is no plan for these rows.
        """
        made = self._made(name, client, folder, unpack_json(invitation)["contract"])
        local, digest = made.local, contract_digest(made.contract).hex()
        logger.info(
            "%s answers the invitation: %s rows, noise multiplier %.6g, epsilon at most %.6g in all %s "
            "rounds (delta %.6g)",
            *(name, local.num_examples, local.mechanism.noise_multiplier),
            *(local.epsilon(local.rounds), local.rounds, local.delta),
        )
        answer = {"name": name, "contract_digest": digest, "noise_source": made.noise.stated_name}
        return pack_json(answer | local.declared())

    def answer(self, kind: str, payload: bytes, name: str, client: int, folder: Path) -> bytes:
        """Answers a message, "join" or "round"; who cannot take part says why, and quotes no row."""
        if kind != "join":
            return self.client(name, client, folder).answer(self.replica, payload)
        try:
            return self.join(name, client, folder, payload)
        except PlanError as error:
            logger.warning("%s does not take part: %s", name, error)
            return pack_json({"declined": str(error)})

    def client(self, name: str, client: int, folder: Path) -> LocalClient:
        """Returns a client that joined, perhaps in another process, which left the contract."""
        if name in self.clients:
            return self.clients[name]
        ledger = folder / LEDGER_NAME
        if not ledger.is_file():
            raise LedgerError(f"client {name} did not join: {folder} has no {LEDGER_NAME}.")
        return self._made(name, client, folder, split_header(ledger.read_bytes(), ledger)[0])

    def _made(
        self, name: str, client: int, folder: Path, contract: Mapping[str, Any]
    ) -> LocalClient:
        own, config, said = self.own_contract(), self.recipe.training, self.settings
        if self.contract is None and config.clip_left_out:
            clip = contract["federated"]["clip"]  # epsilon follows no clip
            if not isinstance(clip, float) or not SMALLEST_CLIP <= clip <= MAX_CLIP:
                raise PlanError(
                    f"the server's clip={clip!r} is no number from {SMALLEST_CLIP:g} on."
                )
            own["federated"]["clip"] = config.clip = clip
        offered, rows = adopt(own, contract), self.shards[client]
        most = said.sampling_probability if said.own_rows else self.probability()
        q = check_probability(config, len(rows), offered["sampling_probability"], most)
        local = self.plan_of(len(rows), q)
        ceiling = config.target_epsilon if said.max_epsilon is None else said.max_epsilon
        check_ceiling(folder, local, ceiling)
        if self.contract is not None and contract_digest(self.contract) != contract_digest(offered):
            raise PlanError("this process follows another server's run: start the client anew.")
        seed = config.testing.insecure_noise_seed  # another stream for each client
        noise = SecureNoise() if seed is None else InsecureSeededNoise(seed + 1000 * (client + 1))
        # refuses a folder of another run, before the replica follows this one
        made = LocalClient(name, folder, local, offered, rows, noise)
        if self.contract is None:
            self.contract = offered
            self.replica.follow(offered)
        self.clients[name] = made
        return made

    def start_server(self, folder: Path, *, resume: bool = False) -> RoundServer:
        """Opens the run's ledgers; nothing is written where a shard has no plan, or no clip is found."""
        contract = {"direction_key": f"{new_key():032x}", **self.own_contract()}
        if resume:
            ledger = folder / LEDGER_NAME
            self._check_same_shards(folder)
            header = Trajectory(split_header(ledger.read_bytes(), ledger)[0]).header
            contract |= {name: header[name] for name in ("direction_key", "median_norm")}
            clip = header["federated"]["clip"]
        else:
            self.replica.follow(contract)
            contract["median_norm"], clip = self._measured()
        if self.recipe.training.clip_left_out:
            contract["federated"]["clip"] = self.recipe.training.clip = clip
        if not self.settings.own_rows:
            for size in set(map(len, self.shards)):
                self.plan_of(size, self.probability())
        server = RoundServer(folder, contract, self.declared_plan, resume=resume)
        self.contract = dict(server.trajectory.header)
        self.replica.follow(self.contract)
        self.replica.catch_up(server.trajectory.releases)
        return server

    def _measured(self) -> tuple[float | None, float]:
        """Returns the median norm of public rows' differences, or None, and the clip from it."""
        norms = self.replica.public_norms()
        median = None if norms is None else float(norms.median())
        clip = CLIPPED_FROM * (median or 0.0)
        if self.recipe.training.clip_left_out:
            words = f"{CLIPPED_FROM:g} of the median norm of public rows' differences"
            if not SMALLEST_CLIP <= clip <= MAX_CLIP:
                raise PlanError(f"clip is {words}, {median}: give validation_file, or clip.")
            logger.warning("clip=%.6g for all clients: %s.", clip, words)
        return median, clip

    def _check_same_shards(self, folder: Path) -> None:
        """Refuses another number of clients: rows would move to clients that count other rounds."""
        if self.settings.own_rows:
            return
        names = client_names(self.settings.clients)
        here = dict(zip(names, map(len, self.shards), strict=True))
        for entry in members_in(folder):
            rows = LocalPlan.from_dict(entry["local"]).num_examples
            if here.get(entry["name"]) != rows:
                raise LedgerError(
                    f"{entry['name']} has {rows} rows in {folder}, and would have "
                    f"{here.get(entry['name'], 'none')} with clients={self.settings.clients}: {_MOVED}"
                )
