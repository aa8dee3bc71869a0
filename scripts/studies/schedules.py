"""Do noise schedules and averaged clipping help on SST-2? Every arm at the same total epsilon.

    python -m scripts.studies.schedules --data DATA/sst2 --output_dir out/schedules
    python -m scripts.studies.schedules --data DATA/sst2 --output_dir out/schedules-quick --quick

DATA/sst2 holds train.jsonl and validation.jsonl with the fields `sentence` and `label`. A linear head on
all-MiniLM-L6-v2 (the `demo` extra), few-shot and on all rows. Each arm is a recipe of its own under
OUTPUT_DIR/arms, and each half a comparison (`hf-dpzero compare`), which an interrupted run continues.
`--quick` is 20 runs of 4 steps in this process: starting processes would take longer than they do.
Writes schedules.md beside them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_dpzero.experiments.compare import build_grid, compare
from hf_dpzero.experiments.results import Exit, Record
from hf_dpzero.experiments.runner import Attempt
from scripts.markdown import table

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "sst2"
QUICK = (
    *("--num_examples_per_class", "32", "--max_steps", "4"),
    *("--expected_batch_size", "16"),
)


@dataclass(frozen=True)
class Half:
    """One amount of data.

    Attributes:
      title: heads its table.
      recipes: method -> its recipe under recipes/sst2.
      steps: method -> T. Schedules take kappa = T / 4, so that an early step's noise counts e^-4.
      averaged: method -> settings of averaged clipping; none leaves it out.
      schedules: which of `schedules_of`.
    """

    title: str
    recipes: Mapping[str, str]
    steps: Mapping[str, int]
    averaged: Mapping[str, str]
    schedules: Iterable[str]


FEWSHOT = Half(
    title="512 rows of each class",
    recipes={
        "dpzero": "minilm-fewshot-dpzero.yaml",
        "dp-adamw": "../methods/_minilm-dp-adamw.yaml",
    },
    steps={"dpzero": 200, "dp-adamw": 200},
    averaged={
        "dpzero": "clipping_config.groups: 256\nclip: 24.0\nlearning_rate: 5.0e-4",
        "dp-adamw": "clipping_config.groups: 32\nclip: 2.5",
    },
    schedules=("exp", "exp_constant_rate", "momentum", "learning_rate", "subsampled"),
)
ALL_ROWS = Half(
    title="all 65,349 rows",
    recipes={"dpzero": "minilm-dpzero.yaml", "dp-adamw": "minilm-dp-adamw.yaml"},
    steps={"dpzero": 1000, "dp-adamw": 500},
    averaged={},
    schedules=("exp", "subsampled"),
)
HALVES = {"few-shot": FEWSHOT, "all-rows": ALL_ROWS}


def schedules_of(steps: int) -> dict[str, str]:
    """The settings of each schedule for T steps: lines of YAML."""
    kappa = max(2.0, steps / 4)
    return {
        "exp": f"schedules.noise: exp(kappa={kappa:g})",
        "exp_constant_rate": f"schedules.noise: exp(kappa={kappa:g})\nlr_scheduler_type: constant",
        "momentum": f"schedules.noise: momentum(kappa={kappa:g}, beta=0.9)",
        "learning_rate": f"schedules.noise: learning_rate(kappa={kappa:g})",
        "subsampled": f"schedules.noise: subsampled(kappa={kappa:g}, order=3)",
    }


def write_arms(half: Half, folder: Path) -> list[str]:
    """Writes the recipe of each arm; returns their paths, uniform first."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for method, recipe in half.recipes.items():
        steps = half.steps[method]
        own = schedules_of(steps)
        arms = {"uniform": "", **{name: own[name] for name in half.schedules}}
        if method in half.averaged:
            arms["averaged"] = f"clipping: averaged\n{half.averaged[method]}"
        bases = [RECIPES / recipe]
        if bases[0].parent.name == "methods":  # settings alone: the data is the other recipe's
            bases = [RECIPES / "_minilm.yaml", *bases, bases[0].parent / "_fewshot.yaml"]
        for arm, settings in arms.items():
            path = folder / f"{method}-{arm}.yaml"
            extends = ", ".join(str(base.resolve()) for base in bases)
            lines = (f"extends: [{extends}]", f"max_steps: {steps}", "save_strategy: 'no'")
            path.write_text("\n".join((*lines, "eval_strategy: 'no'", settings, "")))
            written.append(str(path))
    return written


def run(half: Half, folder: Path, arguments: argparse.Namespace) -> Record:
    """Runs what this half's comparison still lacks."""
    arms = write_arms(half, folder / "arms")
    files = [f"--{split}_file={arguments.data / split}.jsonl" for split in ("train", "validation")]
    overrides = [*files, *(QUICK if arguments.quick else ())]
    runs = build_grid(
        arms[0],
        methods=arms,
        epsilons=arguments.epsilons,
        seeds=arguments.seeds,
        overrides=overrides,
    )
    return compare(
        folder,
        runs,
        recipe=arms[0],
        overrides=overrides,
        jobs=arguments.jobs,
        keep_weights=False,
        start=HereAndNow if arguments.quick else None,
    )


class HereAndNow:
    """An attempt that has been run in this process; `runner.Process` says what the methods do."""

    def __init__(self, attempt: Attempt) -> None:
        from hf_dpzero.cli.main import main

        since = time.monotonic()
        self._exit = Exit(main(list(attempt.words)), time.monotonic() - since)

    def poll(self) -> Exit:
        return self._exit

    def stop(self) -> None:
        """Nothing runs any more."""


def half_table(record: Record, title: str) -> str:
    """Arms against methods and epsilons: accuracy in %, mean and standard error."""
    names = [cell.method.rpartition("-")[::2] for cell in record.cells]  # "dp-adamw-exp"
    columns = [
        (m, e) for m in dict.fromkeys(method for method, _ in names) for e in record.epsilons
    ]
    lines = []
    for arm in dict.fromkeys(arm for _, arm in names):
        entries = []
        for method, epsilon in columns:
            cell = record.cell(f"{method}-{arm}", epsilon)
            spread = cell and cell.standard_error
            error = "" if spread is None else f" ± {100 * spread:.2f}"
            known = cell is not None and cell.mean is not None
            entries.append(f"{100 * cell.mean:.2f}{error}" if known else "")
        lines.append([arm.replace("_", " "), *entries])
    head = ["", *(f"{method}, ε = {epsilon:g}" for method, epsilon in columns)]
    return f"### {title}\n\n{table(head, lines)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of SST-2's JSON lines")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--half", nargs="+", choices=HALVES, default=list(HALVES))
    parser.add_argument("--epsilons", type=float, nargs="+", help="default 0.5 2; quick 2")
    parser.add_argument("--seeds", type=int, nargs="+", help="default 42 13 21; quick 42")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--quick", action="store_true", help="32 rows of each class, 4 steps")
    arguments = parser.parse_args()
    arguments.data = arguments.data.resolve()
    arguments.epsilons = arguments.epsilons or ([2.0] if arguments.quick else [0.5, 2.0])
    arguments.seeds = arguments.seeds or ([42] if arguments.quick else [42, 13, 21])
    tables = []
    try:
        for name in arguments.half:
            record = run(HALVES[name], arguments.output_dir / name, arguments)
            tables.append(half_table(record, HALVES[name].title))
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues from {arguments.output_dir}", file=sys.stderr)
        return 130
    text = "\n".join(tables)
    (arguments.output_dir / "schedules.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
