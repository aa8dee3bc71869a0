"""`hf-dpzero compare`, `sweep` and `federate`: several runs, or one that several clients share."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hf_dpzero.cli.options import Compare, Federate, Sweep
from hf_dpzero.recipes.recipe import (
    COMMAND_LINE,
    coerce_fields,
    load_recipe,
    parse_overrides,
    read_recipe,
)
from hf_dpzero.reporting.wording import round_up
from hf_dpzero.values import listed

ENGINES = ("flower", "in_process")
_T = TypeVar("_T")


def run_compare(arguments: Compare) -> None:
    """Runs the grid, writes comparison.{json,md,png} and prints the table."""
    from hf_dpzero.experiments.compare import build_grid, compare
    from hf_dpzero.experiments.results import JSON_FILE
    from hf_dpzero.experiments.tables import PLOT_FILE, TABLE_FILE, table
    from hf_dpzero.run_folder.left_on_disk import said_of_runs

    recipes, words = arguments.recipes, arguments.overrides
    if len(recipes) != 1:
        raise ValueError(f"{' '.join(recipes)}: give one recipe; others are named in --methods.")
    methods = items_of("methods", arguments.methods, str)
    epsilons = items_of("epsilons", arguments.epsilons, float)
    seeds = items_of("seeds", arguments.seeds, int)
    runs = build_grid(recipes[0], methods=methods, epsilons=epsilons, seeds=seeds, overrides=words)
    folder = Path(arguments.output_dir or f"out/compare-{Path(recipes[0]).stem}")
    record = compare(
        folder,
        runs,
        recipe=recipes[0],
        overrides=words,
        jobs=arguments.jobs,
        retry_failed=arguments.retry_failed,
        keep_weights=not arguments.discard_weights,
    )
    print(table(record))
    failed = sum(not row.done for row in record.rows)
    if failed:
        print(f"{failed} of {len(record.rows)} runs do not count; {folder / TABLE_FILE} says why.")
    names = (JSON_FILE, TABLE_FILE, PLOT_FILE)  # no plot without matplotlib or a finished run
    print("written:", *(str(folder / name) for name in names if (folder / name).is_file()))
    print(said_of_runs(folder))


def items_of(name: str, words: list[str] | None, kind: Callable[[str], _T]) -> list[_T]:
    """Reads the items of an option: `2,6`, `2 6` and `[2, 6]` are the same.

    >>> items_of("epsilons", ["2,", "6"], float), items_of("epsilons", ["[2, 6]"], float)
    ([2.0, 6.0], [2.0, 6.0])
    """
    text = ",".join(words or ()).replace("[", "").replace("]", "")
    try:
        return [kind(str(item)) for item in listed(text) if item]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ValueError(
            f"--{name} {' '.join(words or ())}: give {whole}numbers with commas between them."
        ) from None


def run_sweep(arguments: Sweep) -> None:
    """Plans the sweep, runs or continues its trials, writes its results.

    Interrupted, the same command continues where it stopped.
    """
    from hf_dpzero.experiments import sweep, sweep_outputs
    from hf_dpzero.privacy.selection import TrialCount
    from hf_dpzero.run_folder.left_on_disk import said_of_runs

    grid = sweep.parse_grid(arguments.grid or [], arguments.grid_file)
    size, mean = math.prod(len(values) for values in grid.values()), arguments.mean_trials
    own = str(read_recipe(arguments.recipe).get("output_dir", "out/run")).rstrip("/")
    folder = arguments.output_dir or f"{own}-sweep"
    settings = sweep.SweepSettings(
        recipe=arguments.recipe,
        overrides=coerce_fields(parse_overrides(arguments.overrides), COMMAND_LINE),
        grid=grid,
        tuning=arguments.tuning,
        selection=arguments.selection,
        trials=TrialCount(mean=float(size if mean is None else mean)),
        metric=arguments.metric,
        output_dir=Path(folder),
    )
    prepared = sweep.prepare(settings)
    print(sweep_outputs.statement(settings, prepared))
    print(f"grid: {len(settings.points)} settings of {', '.join(settings.grid)}")
    if prepared.epsilon_one_run is not None:
        one = round_up(prepared.epsilon_one_run)
        noise = f"noise multiplier of every trial {prepared.noise_multiplier:.6g}"
        print(f"epsilon of one run alone {one}, {noise}")
    if arguments.dry_run:
        return
    try:
        workspace = sweep.run_trials(settings, prepared, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("interrupted: repeat the command to continue the sweep")
        raise
    best = sweep_outputs.write(settings, prepared, workspace)["best"]
    if best is None:
        print(f"no result to release; see {settings.output_dir / sweep_outputs.TABLE_FILE}")
        return
    chosen = ", ".join(f"{name}={value}" for name, value in best["settings"].items())
    where = settings.output_dir / best["folder"]
    print(f"best: {chosen}: {prepared.metric} {best['score']}; in {where}")
    print(said_of_runs(settings.output_dir))


def run_federate(arguments: Federate) -> None:
    """Trains, writes ledgers, report, plot and weights into output_dir, prints the report.

    Interrupted, the same command with --resume continues from the ledgers.
    """
    from hf_dpzero.federated.report import summary
    from hf_dpzero.federated.run import RECIPE_FILE, ServerRun, run_in_process
    from hf_dpzero.federated.setup import Settings, check_folder

    engine = arguments.engine
    if engine not in ENGINES:
        raise ValueError(f"--engine {engine}: use one of {', '.join(ENGINES)}.")
    recipe, files = arguments.recipe, arguments.client_files or []
    given = 2 if arguments.clients is None else arguments.clients
    if files and (arguments.partition or arguments.clients not in (None, len(files))):
        raise ValueError(
            f"--client_files names {len(files)} files, one for each client: leave --clients and "
            "--partition out."
        )
    where = [os.path.realpath(file) for file in files]  # "a.csv" is also "./a.csv"
    if twice := [file for file, path in zip(files, where, strict=True) if where.count(path) > 1]:
        raise ValueError(f"--client_files {twice[-1]}: each file is one client's; name it once.")
    rows = ("--train_file", os.pathsep.join(map(os.path.abspath, files))) if files else ()
    settings = Settings(
        # A client's process may start in another folder.
        recipe=os.path.abspath(recipe) if os.path.exists(recipe) else recipe,
        overrides=(*arguments.overrides, *rows),
        clients=len(files) or given,
        partition=arguments.partition,
        rounds=arguments.rounds,
    )
    named = arguments.output_dir
    if named is None:
        own = str(load_recipe(recipe, arguments.overrides).training.output_dir)
        named = own.rstrip("/") + "-federated"
    folder = Path(named).absolute()
    settings.load(folder)  # refuses before anything is loaded
    check_folder(folder, settings.clients, resume=arguments.resume)
    begun = files and arguments.resume and (before := folder / RECIPE_FILE).is_file()
    if begun and read_recipe(before).get("train_file") not in rows:
        raise ValueError(
            f"--client_files are others than at the start, or in another order: {before} has them. "
            "A row that changes between clients would be charged in part only."
        )
    if engine == "in_process":
        print(summary(run_in_process(settings, folder, resume=arguments.resume)))
        return
    from hf_dpzero.federated import flower

    flower.check_flower()
    with contextlib.closing(ServerRun.of(settings, folder, resume=arguments.resume)) as server:
        flower.simulate(
            lambda transport: server.run(transport, min_clients=arguments.min_clients),
            settings,
            folder,
            timeout=arguments.timeout,
            actors=arguments.actors,
        )
        print(summary(server.report()))
