"""Which runs a comparison consists of, methods x epsilons x seeds on the same data, and running them.

Every method trains on the same rows under the same neighbouring relation and delta; whatever else its
recipe says (model, clip, steps, learning rate, sampler, accountant) is the method's own. Each sampler
and accountant states a valid epsilon, so methods may differ in those.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpzero.estimators.ghost_clipping import opacus_rules
from hf_dpzero.experiments import runner
from hf_dpzero.experiments.results import Record, Row, Run, aggregate
from hf_dpzero.experiments.runner import Attempt, Start, Workspace
from hf_dpzero.experiments.tables import (
    PLOT_FILE,
    TABLE_FILE,
    markdown,
    percent,
    plot_comparison,
    unsearched,
)
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.recipes.recipe import (
    Recipe,
    build_recipe,
    load_recipe,
    parse_overrides,
    recipe_chain,
)
from hf_dpzero.reporting.model_card import optional_plot
from hf_dpzero.reporting.privacy_report import versions
from hf_dpzero.shipped import find_recipe

METHODS_FOLDER = "methods"
"""Beside a recipe or above its folder; it holds one file a method, such as `_minilm-dp-adamw.yaml`."""

SET_BY_THE_GRID = {
    "method": "--methods", "target_epsilon": "--epsilons", "noise_multiplier": "--epsilons",
    "seed": "--seeds", "subset_seed": "--seeds", "init_seed": "--seeds",
    "testing.direction_key": "--seeds",
    "output_dir": "--output_dir of the comparison", "resume_from_checkpoint": "the comparison itself",
}  # fmt: skip
_ADAPTER_METHODS = ("dp-lora", "lora", "dp-bitfit", "bitfit", "dp-prefix", "prefix")
_LARGEST_SEED = 2**32 - 1  # numpy's, which Hugging Face seeds


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of a comparison, before an epsilon and a seed are laid over it."""

    name: str
    source: str  # which files its settings come from
    chain: Sequence[tuple[Path, Mapping[str, Any]]]  # their keys; later files replace earlier ones
    fixed: Mapping[str, Any]  # settings of each of its runs that replace those of the files
    recipe: Recipe  # as loaded with them, at some epsilon

    @property
    def private(self) -> bool:
        """Whether it runs once an epsilon; without privacy it runs once a seed, at epsilon = inf."""
        return not self.recipe.training.not_private

    def at(self, epsilon: float, seed: int) -> Run:
        """Returns its run at a target epsilon, inf without privacy, and a seed."""
        settings = {
            **_budget(epsilon if self.private else None),
            "seed": seed,
            "subset_seed": seed,
            "init_seed": seed,
            "resume_from_checkpoint": None,
            "disable_tqdm": True,  # the log of a run is a file
        }
        if not self.recipe.training.first_order:  # gradients have no directions
            settings["testing.direction_key"] = seed
        return Run(
            name=f"{self.name}-eps{epsilon:.12g}-seed{seed}",
            method=self.name,
            source=self.source,
            epsilon=epsilon,
            recipe=build_recipe(self.chain, {**self.fixed, **settings}, self.source),
        )


def _budget(epsilon: float | None) -> dict[str, Any]:
    """Settings of a run at a target epsilon, which sets the noise; None without privacy."""
    budget = {"target_epsilon": epsilon, "noise_multiplier": None}
    return budget if epsilon is not None else {**budget, "target_delta": None}


def build_grid(
    recipe: str | Path,
    *,
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
) -> list[Run]:
    """Returns all runs: seed by seed the methods in the given order, a method's epsilons together.

    Args:
      recipe: the recipe that every method's recipe must agree with on the data.
      methods: entries of --methods; `_find_method` says what they may be.
      epsilons: targets of the private methods; none takes the recipe's own target_epsilon.
      seeds: each sets seed, subset_seed (the few-shot draw), init_seed and direction_key; none takes
        the recipe's own seed.
      overrides: command-line words that hold for every run.

    Raises:
      ValueError: nothing to run, a value out of range, or methods that cannot be compared.
    """
    settings = dict(parse_overrides(overrides))
    for name, option in SET_BY_THE_GRID.items():
        if name in settings:
            raise ValueError(
                f"--{name} {settings[name]}: set by {option} for each run of the grid; leave it out."
            )
    recipe = find_recipe(recipe)
    base = load_recipe(recipe, settings)
    own = base.training.target_epsilon
    epsilons = list(epsilons) or ([] if own is None else [own])
    seeds = list(seeds) or [base.training.seed]
    if not methods:
        raise ValueError("there are no methods; give e.g. --methods dpzero,mezo.")
    for what, values in (("epsilons", epsilons), ("seeds", seeds), ("methods", methods)):
        _refuse_repeats(what, values)
    for epsilon in epsilons:
        if not 0 < epsilon < math.inf:
            raise ValueError(
                f"epsilon={epsilon:g} must be a finite number above 0; methods without privacy "
                "(mezo, sgd, adamw) need none."
            )
    for seed in seeds:
        if not 0 <= seed <= _LARGEST_SEED:
            raise ValueError(f"seed={seed} must lie in 0..{_LARGEST_SEED}.")
    some_epsilon = epsilons[0] if epsilons else 1.0
    compared = [_find_method(name, recipe, base, settings, some_epsilon) for name in methods]
    if not epsilons and any(method.private for method in compared):
        raise ValueError("there are no epsilons; give e.g. --epsilons 2,6.")
    _refuse_repeats("methods (by name)", [method.name for method in compared])
    _check_comparable(compared)
    if any(method.private and method.recipe.training.first_order for method in compared):
        opacus_rules()  # refuses before the first run where it is not installed
    # Seeds outermost: an interrupted comparison has compared all methods on those it finished.
    runs = [
        method.at(epsilon, seed)
        for seed in seeds
        for method in compared
        for epsilon in (epsilons if method.private else [math.inf])
    ]
    first: dict[str, Run] = {}
    for run in runs:  # rows are found by their digest, so equal settings would share one
        if (twin := first.setdefault(run.digest, run)) is not run:
            raise ValueError(
                f"methods {twin.method!r} and {run.method!r} have the same settings ({twin.source}; "
                f"{run.source}); name one of them."
            )
    return runs


def _refuse_repeats(what: str, values: Sequence[str] | Sequence[float]) -> None:
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"{what}: {value!r} is given more than once; give it once.")


def _find_method(
    method: str, recipe: Path, base: Recipe, settings: Mapping[str, Any], epsilon: float
) -> Method:
    """Finds the settings that `method` trains with; the first of these that exists.

    1. The recipe NAME-METHOD.yaml beside `recipe`, where NAME is what stands before the method in the
       name of `recipe`: "dp-adamw" takes sst2/minilm-dp-adamw.yaml beside sst2/minilm-dpzero.yaml.
    2. The recipe file whose path is `method`.
    3. `recipe` with the keys of a method's file in place of its own: `_NAME-METHOD.yaml` in a folder
       "methods" beside or above `recipe`; where there is none, NAME loses its last word
       ("minilm-fewshot" -> "minilm"). A file of the same kind that `recipe` extends for its own method
       is left out, and so is this step where `recipe` is a recipe for METHOD whose name names none.
    4. `recipe` with `method: METHOD`.
    """
    from hf_dpzero.settings.nested import METHODS, NOT_PRIVATE

    fixed, name = dict(settings), method
    beside = recipe.parent / _sibling_name(recipe, method, base.training.method)
    unnamed = beside.stem == f"{recipe.stem}-{method}"
    shared = _method_file(recipe, beside, method)
    if beside.is_file():
        chain, source = recipe_chain(beside), str(beside)
    elif Path(method).is_file():
        chain, source, name = recipe_chain(Path(method)), method, Path(method).stem
    elif shared is not None and not (method == base.training.method and unnamed):
        prefix = shared.name.removesuffix(f"{method}{shared.suffix}")
        # The recipe's own method may have a file of the same kind: its adapters must not stay.
        own = [
            (file, keys)
            for file, keys in recipe_chain(recipe)
            if file.parent.resolve() != shared.parent.resolve() or not file.name.startswith(prefix)
        ]
        chain, source = [*own, *recipe_chain(shared)], f"{recipe} with {shared}"
    elif method in METHODS:
        chain, source = recipe_chain(recipe), f"{recipe} with method: {method}"
        fixed["method"] = method
    else:
        raise ValueError(
            f"method {method!r} is no method ({', '.join(METHODS)}), no recipe file, and "
            f"{recipe.parent} has no {beside.name}."
        )
    trains = {key: value for _, keys in chain for key, value in keys.items()} | fixed
    target = _budget(None if trains.get("method") in NOT_PRIVATE else epsilon)
    try:  # loaded once here, so that what is wrong is said of the method, not of a run
        loaded = build_recipe(chain, {**fixed, **target}, source)
    except ValueError as error:
        raise ValueError(f"method {method!r}: {error}") from error
    return Method(name=name, source=source, chain=chain, fixed=fixed, recipe=loaded)


def _sibling_name(recipe: Path, method: str, own_method: str = "dpzero") -> str:
    """Returns what the recipe for `method` beside `recipe` would be called.

    In the stem of `recipe`, the name of a method ends the part that siblings share.

    >>> _sibling_name(Path("trec/minilm-dpzero.yaml"), "dp-adamw")
    'minilm-dp-adamw.yaml'
    >>> _sibling_name(Path("roberta-large-dp-lora.yaml"), "dpzero", "dp-adamw")
    'roberta-large-dpzero.yaml'
    >>> _sibling_name(Path("quickstart.yaml"), "mezo")
    'quickstart-mezo.yaml'
    """
    from hf_dpzero.settings.nested import METHODS

    # the longest first: lora also ends dp-lora
    known = sorted({*METHODS, *_ADAPTER_METHODS, own_method}, key=len, reverse=True)
    named = re.search(rf"-(?:{'|'.join(map(re.escape, known))})(?:-|$)", recipe.stem)
    stem = recipe.stem[: named.start()] if named else recipe.stem
    return f"{stem}-{method}{recipe.suffix or '.yaml'}"


def _method_file(recipe: Path, sibling: Path, method: str) -> Path | None:
    """Finds `_NAME-METHOD.yaml` of the longest NAME, in the nearest folder that has one."""
    words = sibling.stem.removesuffix(f"-{method}").split("-")
    for count in range(len(words), 0, -1):
        for place in (recipe.parent, Path(os.path.normpath(recipe.parent / ".."))):
            file = f"_{'-'.join(words[:count])}-{method}{sibling.suffix}"
            if (path := place / METHODS_FOLDER / file).is_file():
                return path
    return None


def _check_comparable(methods: Sequence[Method]) -> None:
    """Refuses methods that differ in their data or, among private ones, in what epsilon means."""

    def data_of(recipe: Recipe) -> dict[str, str]:
        # as text: lists, nulls and numbers alike can be compared, and shown
        values = {name: repr(value) for name, value in vars(recipe.data).items()}
        return {name: value for name, value in values.items() if name != "subset_seed"}  # --seeds

    def meaning_of(recipe: Recipe) -> dict[str, str]:
        relation, unit = recipe.training.neighboring_relation, recipe.training.privacy_unit
        delta = delta_of(recipe)
        return {"neighboring_relation": relation, "unit": unit, "target_delta": delta}

    private = [method for method in methods if method.private]
    for among, settings_of, what in (
        (methods, data_of, "are of different data"),
        (private, meaning_of, "mean different things by epsilon"),
    ):
        for method in among:
            first, own = settings_of(among[0].recipe), settings_of(method.recipe)
            for name in first:
                if own[name] != first[name]:
                    raise ValueError(
                        f"{among[0].source} and {method.source} {what}: {name} is {first[name]} in the "
                        f"first and {own[name]} in the second. Give both the same, e.g. --{name} after "
                        "the recipe."
                    )
    for method in methods:
        if method.recipe.training.push_to_hub:
            raise ValueError(
                f"push_to_hub=True in {method.source} would publish every run of the grid; set it to "
                "false, and push the run that you want with `hf-dpzero push`."
            )


def used_by(recipe: Recipe) -> dict[str, Any]:
    """Returns T, B, K, clip and rate of a method's runs, by setting; None is chosen for each run."""
    args = recipe.training
    names = ["max_steps", "expected_batch_size", "learning_rate"]
    names += ["clip"] * (not args.not_private) + ["num_directions"] * (not args.first_order)
    return {name: getattr(args, name) for name in names}


def left_out(recipe: Recipe) -> list[str]:
    """Returns settings that decide what a method reaches and that nothing chose for this task.

    Only DPZero chooses its own; of any other method a default stands for them.
    """
    args = recipe.training
    names = used_by(recipe).keys() & {"learning_rate", "clip"} - args.chosen - recipe.values.keys()
    return sorted(names) if args.method != "dpzero" else []


def delta_of(recipe: Recipe) -> str:
    """Returns delta in words; on the same rows two deltas are equal iff these words are."""
    training = recipe.training
    if training.target_delta is not None:
        return f"{training.target_delta:g}"
    return "0" if training.noise_distribution == "laplace" else "1 / (10 n)"


# ---- running


def compare(
    folder: Path,
    runs: Sequence[Run],
    *,
    recipe: str,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    retry_failed: bool = False,
    keep_weights: bool = True,
    start: Start | None = None,
) -> Record:
    """Runs those of `runs` that have no row in `folder`, and keeps comparison.{json,md,png} true.

    Args:
      folder: made, or continued; one comparison at a time.
      runs: the grid.
      recipe: path of the recipe compared with.
      overrides: command-line words that hold for every run.
      jobs: runs at once, >= 1.
      retry_failed: also run again those whose row is no success.
      keep_weights: otherwise the models and checkpoints of finished runs are removed.
      start: starts an attempt; default a training process.

    Raises:
      ValueError: `jobs` < 1.
      OSError: the folder is in use.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1.")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with runner.locked(folder) as lock:
        workspace = Workspace(folder, runs)
        settings = _settings_of(runs, recipe, overrides, jobs)
        waiting = workspace.pending(retry_failed)
        for method in settings["methods"]:
            if method["left_out"]:
                say(f"{method['name']}: {unsearched(method)}")
        if len(waiting) < len(runs):
            say(f"{len(runs) - len(waiting)} of {len(runs)} runs are in the table already")

        def started(attempt: Attempt) -> None:
            continued = f" from {attempt.checkpoint.name}" if attempt.checkpoint else ""
            say(f"{attempt.folder.name} starts{continued}")

        def ended(attempt: Attempt, row: Row) -> None:
            if row.done and not keep_weights:
                runner.discard_weights(attempt.folder)
            left = len(write(workspace, settings).pending)
            result = f"{row.status}: {row.error}"
            if row.done and row.score is not None:
                result = f"{row.metric} {percent(row.score)} %"
            say(f"{attempt.folder.name}: {result} in {row.wall_seconds or 0:.0f} s; {left} to go")

        begin = start or runner.train_in_process(jobs, lock)
        runner.execute(workspace, waiting, begin, jobs=jobs, started=started, ended=ended)
        record = write(workspace, settings)
        with optional_plot(PLOT_FILE):
            plot_comparison(record, folder)
    return record


def write(workspace: Workspace, settings: dict[str, Any]) -> Record:
    """Writes comparison.json and comparison.md as the rows are now."""
    keys = [(run.method, run.epsilon) for run in workspace.runs]
    methods = [method for method, _ in keys]
    ordered = sorted(dict.fromkeys(keys), key=lambda key: (methods.index(key[0]), key[1]))
    rows = workspace.rows()
    cells, zero_shot = aggregate(rows, {key: keys.count(key) for key in ordered})
    pending = [run.name for run in workspace.pending()]
    record = Record(settings=settings, rows=rows, cells=cells, zero_shot=zero_shot, pending=pending)
    record.save(workspace.folder)
    write_atomically(workspace.folder / TABLE_FILE, markdown(record))
    return record


def _settings_of(
    runs: Sequence[Run], recipe: str, overrides: Sequence[str], jobs: int
) -> dict[str, Any]:
    """Returns what comparison.json says of the grid: task, methods, epsilons, guarantee, machine."""
    methods = {run.method: run for run in runs}
    private = [run.recipe for run in methods.values() if run.private]
    return {
        "task": runs[0].recipe.data.task,
        "recipe": recipe,
        "methods": [
            {
                "name": name,
                "source": run.source,
                "method": run.recipe.training.method,
                "private": run.private,
                "settings": used_by(run.recipe),
                "left_out": left_out(run.recipe),
            }
            for name, run in methods.items()
        ],
        "epsilons": sorted({run.epsilon for run in runs if run.private}),
        "seeds": list(dict.fromkeys(run.recipe.training.seed for run in runs)),
        "overrides": list(overrides),
        "delta": delta_of(private[0]) if private else None,
        "neighboring_relation": private[0].training.neighboring_relation if private else None,
        "privacy_unit": private[0].training.privacy_unit if private else None,
        "jobs": jobs,
        "cores": runner.cores(),
        "versions": versions(),
    }
