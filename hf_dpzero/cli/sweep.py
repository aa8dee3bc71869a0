"""`hf-dpzero sweep RECIPE --grid field=value,value`: try settings, and state what tuning costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_dpzero.experiments import sweep_outputs as outputs
from hf_dpzero.experiments.sweep import (
    Prepared,
    SweepSettings,
    parse_grid,
    prepare,
    trial_count_from,
)
from hf_dpzero.experiments.sweep_trials import run_trials
from hf_dpzero.recipes.recipe import COMMAND_LINE, coerce_fields, parse_overrides, read_recipe
from hf_dpzero.reporting.wording import round_up


def run(arguments: argparse.Namespace) -> None:
    """Plans the sweep, runs or continues its trials, writes its results.

    Interrupted, the same command continues where it stopped.

    Raises:
      ValueError: whatever may not be swept or cannot be accounted, before anything is written.
      OSError: the recipe, the grid file or the data are missing.
    """
    settings = read_settings(arguments)
    prepared = prepare(settings)
    print(outputs.statement(settings, prepared))
    for line in plan_lines(settings, prepared):
        print(line)
    if arguments.dry_run:
        return
    try:
        workspace = run_trials(settings, prepared, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("interrupted: repeat the command to continue the sweep")
        raise
    print(result_line(outputs.write(settings, prepared, workspace), settings))


def read_settings(arguments: argparse.Namespace) -> SweepSettings:
    """The sweep that the command line describes.

    Raises:
      ValueError: an unknown field, a malformed grid, a distribution out of range.
    """
    grid = parse_grid(arguments.grid or [], arguments.grid_file)
    overrides = coerce_fields(parse_overrides(arguments.overrides), COMMAND_LINE)
    size = 1
    for values in grid.values():
        size *= len(values)
    mean = float(size if arguments.mean_trials is None else arguments.mean_trials)
    return SweepSettings(
        recipe=arguments.recipe,
        overrides=overrides,
        grid=grid,
        tuning=arguments.tuning,
        selection=arguments.selection,
        trials=trial_count_from(arguments.trial_count, mean),
        metric=arguments.metric,
        output_dir=_output_dir(arguments),
    )


def _output_dir(arguments: argparse.Namespace) -> Path:
    """The given folder, or the recipe's own with "-sweep" behind it."""
    if arguments.output_dir is not None:
        return Path(arguments.output_dir)
    own = str(read_recipe(arguments.recipe).get("output_dir", "out/run")).rstrip("/")
    return Path(f"{own}-sweep")


def plan_lines(settings: SweepSettings, prepared: Prepared) -> list[str]:
    """The plan in a few lines: grid, budget, noise."""
    lines = [f"grid: {len(settings.points)} settings of {', '.join(settings.grid)}"]
    if prepared.epsilon is not None and prepared.epsilon_one_run is not None:
        lines += [
            f"epsilon in total {round_up(prepared.epsilon)}, of one run alone "
            f"{round_up(prepared.epsilon_one_run)}, delta {prepared.delta:g}",
            f"noise multiplier of every trial {prepared.noise_multiplier:.6g}",
        ]
    return lines


def result_line(found: dict, settings: SweepSettings) -> str:
    """Where the result is, and the best settings."""
    if found["best"] is None:
        return f"no result to release; see {settings.output_dir / outputs.TABLE_FILE}"
    best = found["best"]
    chosen = ", ".join(f"{name}={value}" for name, value in best["settings"].items())
    where = settings.output_dir / best["folder"]
    return f"best: {chosen}: {found['metric']} {best['score']}; in {where}"
