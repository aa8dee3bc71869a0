"""`hf-dpzero sweep RECIPE --grid field=value,value`: try settings, and state what tuning costs."""

from __future__ import annotations

import math
from pathlib import Path

from hf_dpzero.cli.options import Sweep
from hf_dpzero.experiments import sweep_outputs as outputs
from hf_dpzero.experiments.sweep import (
    SweepSettings,
    parse_grid,
    prepare,
    run_trials,
    trial_count_from,
)
from hf_dpzero.recipes.recipe import COMMAND_LINE, coerce_fields, parse_overrides, read_recipe
from hf_dpzero.reporting.wording import delta_words, round_up


def run(arguments: Sweep) -> None:
    """Plans the sweep, runs or continues its trials, writes its results.

    Interrupted, the same command continues where it stopped.
    """
    settings = _read_settings(arguments)
    prepared = prepare(settings)
    print(outputs.statement(settings, prepared))
    print(f"grid: {len(settings.points)} settings of {', '.join(settings.grid)}")
    if prepared.epsilon is not None and prepared.epsilon_one_run is not None:
        assert prepared.delta is not None
        print(
            f"epsilon in total {round_up(prepared.epsilon)}, of one run alone "
            f"{round_up(prepared.epsilon_one_run)}, delta {delta_words(prepared.delta)}\n"
            f"noise multiplier of every trial {prepared.noise_multiplier:.6g}"
        )
    if arguments.dry_run:
        return
    try:
        workspace = run_trials(settings, prepared, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("interrupted: repeat the command to continue the sweep")
        raise
    best = outputs.write(settings, prepared, workspace)["best"]
    if best is None:
        print(f"no result to release; see {settings.output_dir / outputs.TABLE_FILE}")
        return
    chosen = ", ".join(f"{name}={value}" for name, value in best["settings"].items())
    where = settings.output_dir / best["folder"]
    print(f"best: {chosen}: {prepared.metric} {best['score']}; in {where}")


def _read_settings(arguments: Sweep) -> SweepSettings:
    """The sweep that the command line describes."""
    grid = parse_grid(arguments.grid or [], arguments.grid_file)
    size = math.prod(len(values) for values in grid.values())
    mean = float(size if arguments.mean_trials is None else arguments.mean_trials)
    folder = arguments.output_dir
    if folder is None:
        own = str(read_recipe(arguments.recipe).get("output_dir", "out/run")).rstrip("/")
        folder = f"{own}-sweep"
    return SweepSettings(
        recipe=arguments.recipe,
        overrides=coerce_fields(parse_overrides(arguments.overrides), COMMAND_LINE),
        grid=grid,
        tuning=arguments.tuning,
        selection=arguments.selection,
        trials=trial_count_from(arguments.trial_count, mean),
        metric=arguments.metric,
        output_dir=Path(folder),
    )
