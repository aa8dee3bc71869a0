"""Does the mean of the last N steps' weights beat the last weights? It costs no epsilon and no data.

    python -m scripts.studies.average_last --data DATA --output_dir out/average_last

DATA holds folders sst2 and trec with train.jsonl and validation.jsonl. The recipes
`minilm-dpzero.yaml` train a linear head on all-MiniLM-L6-v2 (the `demo` extra) for `--steps`, at a rate
that stays and one that falls to zero; every mean is made by a replay of the run's ledger, as
`hf-dpzero replay --average_last N` does, and evaluated on the validation rows. Writes results.jsonl,
which an interrupted study goes on with, and average_last.md. `--quick` is one run of 8 steps a task.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from hf_dpzero import Trajectory, replay
from hf_dpzero.ledger.trajectory import LEDGER_NAME
from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.training.dpzero_trainer import DPZeroTrainer
from scripts.markdown import table

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SHARES = (0.03, 0.1, 0.3, 0.6)
"""Of the steps, those that a mean covers."""


def run(made: DPZeroTrainer, base: Any, settings: Any) -> dict[str, float]:
    """Trains one head anew on the rows of `made`; N -> accuracy in % of the mean of the last N."""
    trainer = DPZeroTrainer(
        model=copy.deepcopy(base),
        args=settings,
        train_dataset=made.train_dataset,
        eval_dataset=made.eval_dataset,
        processing_class=made.processing_class,
        data_collator=made.data_collator,
        compute_metrics=made.compute_metrics,
    )
    trainer.train()
    log = Trajectory.load(Path(settings.output_dir) / LEDGER_NAME)
    found = {}
    for last in (1, *(max(2, round(share * settings.max_steps)) for share in SHARES)):
        model = copy.deepcopy(base)
        replay(model, log, average_last=last)
        trainer.model.load_state_dict(model.state_dict())
        found[str(last)] = 100 * trainer.evaluate()["eval_accuracy"]
    return found


def study(
    data: Path, output: Path, more: list[str], seeds: int, cells: list[tuple[str, float, str]]
):
    """Runs what results.jsonl lacks, with more settings; returns all of it."""
    file = output / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["task"], row["epsilon"], row["rate"], row["seed"]) for row in rows}
    made: dict[str, tuple[DPZeroTrainer, Any]] = {}
    for seed, (task, epsilon, rate) in itertools.product(range(seeds), cells):
        if (task, epsilon, rate, seed) in done:
            continue
        folder = output / f"{task}-{epsilon}-{rate}-{seed}"
        words = ["--train_file", data / task / "train.jsonl", "--save_strategy", "no"]
        words += ["--validation_file", data / task / "validation.jsonl", "--eval_strategy", "no"]
        words += [*more, "--target_epsilon", epsilon, "--lr_scheduler_type", rate]
        words += ["--output_dir", folder, "--disable_tqdm", "true", "--report_to", "none"]
        recipe = load_recipe(RECIPES / task / "minilm-dpzero.yaml", [str(word) for word in words])
        if task not in made:
            trainer = build_trainer(recipe)
            made[task] = trainer, copy.deepcopy(trainer.model)
        trainer, base = made[task]
        found = run(trainer, base, recipe.training)
        row = {"task": task, "epsilon": epsilon, "rate": rate, "seed": seed, "accuracy": found}
        rows.append(row)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    """A row for each task, epsilon and rate: the last weights, and what each mean adds, in points."""
    lines = []
    key = lambda row: (row["task"], row["epsilon"], row["rate"])  # noqa: E731
    for cell, group in itertools.groupby(sorted(rows, key=key), key):
        runs = [row["accuracy"] for row in group]
        counts = sorted(runs[0], key=int)
        gains = [[each[n] - each["1"] for each in runs] for n in counts[1:]]
        lines.append([*map(str, cell), _mean([r["1"] for r in runs]), *map(_mean, gains)])
    heads = ["task", "epsilon", "rate", "last weights", *(f"mean of {n}" for n in counts[1:])]
    return table(heads, lines)


def _mean(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


def main() -> None:
    """Reads the command line, runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["sst2", "trec"])
    parser.add_argument("--rows", type=int, help="only so many training rows, drawn by subset_seed")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    given.output_dir.mkdir(parents=True, exist_ok=True)
    cells = list(itertools.product(given.tasks, (0.5, 2.0), ("constant", "linear")))
    steps, seeds = (8, 1) if given.quick else (given.steps, given.seeds)
    more = ["--max_steps", str(steps)]
    more += ["--max_train_samples", str(given.rows)] if given.rows else []
    rows = study(given.data, given.output_dir, more, seeds, cells[::4] if given.quick else cells)
    text = summary(rows)
    (given.output_dir / "average_last.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
