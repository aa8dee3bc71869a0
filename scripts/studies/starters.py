"""Does more budget give more? Accuracy of what `hf-dpzero init` writes, nothing chosen, by epsilon.

    python -m scripts.studies.starters --data FOLDER --output_dir out/starters
    python -m scripts.studies.starters --output_dir out/starters-quick --quick

FOLDER holds trec, sst5 and sst2, each with train.jsonl and validation.jsonl (a text, an integer label);
the generated messages of the quickstart need none. Every run draws its own directions, batches and
noise. Accuracy is taken on the same validation rows at every epsilon, so the error of a difference is
that of its rows, and of the runs. Encoding takes a minute or two a data set (SST-2: ten), once; a run a
quarter of a minute on an idle core. Writes rows.jsonl and table.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from scripts.markdown import table
from scripts.studies import harness
from scripts.studies.harness import Row, seed_by_seed

MESSAGES = "messages"
TASKS = ("trec", "sst5", "sst2", MESSAGES)
MEASURED: dict[str, Any] = {"eval_strategy": "no", "report_to": "none"}


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run.

    Attributes:
      data: folder of the data sets.
      rows: of each data set, at most; None takes all.
      given: settings that are given to every run all the same; a starter's own else.
    """

    fields: ClassVar = ("task", "epsilon", "seed")

    data: str = ""
    tasks: tuple[str, ...] = TASKS
    epsilons: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    seeds: tuple[int, ...] = (1, 2, 3)
    rows: int | None = None
    given: dict[str, Any] = field(default_factory=dict)

    def points(self) -> list[tuple[str, float, int]]:
        """(task, epsilon, seed)."""
        return seed_by_seed(self.tasks, self.epsilons, self.seeds)

    def measure(self, task: str, epsilon: float, seed: int) -> list[Row]:
        """Which validation rows a run gets right, and the rate that it took."""
        from hf_dpzero.recipes.build import build_trainer
        from hf_dpzero.recipes.recipe import load_recipe

        train, validation = self.files(task)
        with tempfile.TemporaryDirectory() as folder:
            recipe = starter(train, validation, epsilon, Path(folder) / "starter.yaml")
            own = MEASURED | {"seed": seed, "output_dir": str(Path(folder) / "out")}
            own |= {} if self.rows is None else {"max_train_samples": self.rows}
            trainer = build_trainer(load_recipe(recipe, own | self.given))
            trainer.train()
            predicted = trainer.predict(trainer.eval_dataset)  # type: ignore[arg-type]
            report = trainer.privacy_report()
        scores = predicted.predictions
        right = (np.argmax(scores, axis=-1) == predicted.label_ids).astype(int)
        rates = [release.learning_rate for release in trainer.trajectory.releases]
        row = {"task": task, "epsilon": epsilon, "seed": seed, "spent": report.epsilon}
        row |= {"rate": rates[0], "largest": max(rates), "right": "".join(map(str, right))}
        return [row]

    def files(self, task: str) -> tuple[Path, Path]:
        """Training and validation rows."""
        folder = Path(self.data) / task if task != MESSAGES else Path(self._messages.name)
        return folder / "train.jsonl", folder / "validation.jsonl"

    @functools.cached_property
    def _messages(self) -> tempfile.TemporaryDirectory[str]:
        """The generated messages, as files."""
        from hf_dpzero.tasks.quickstart import generate

        folder = tempfile.TemporaryDirectory()
        for split, rows in generate().items():
            rows.to_json(Path(folder.name) / f"{split}.jsonl")
        return folder


QUICK = Study(
    tasks=(MESSAGES,),
    epsilons=(1.0, 8.0),
    seeds=(1,),
    rows=64,
    given={"max_eval_samples": 32, "max_steps": 4, "expected_batch_size": 8},
)


def starter(train: Path, validation: Path, epsilon: float, target: Path) -> str:
    """Writes a starter recipe by the command that users give; its path."""
    from hf_dpzero.cli.main import main

    files = ["--train_file", str(train), "--validation_file", str(validation)]
    with contextlib.redirect_stdout(sys.stderr):
        status = main(["init", *files, "--target_epsilon", str(epsilon), "--output", str(target)])
    assert status in (0, None), status
    return str(target)


def write(study: Study, rows: Sequence[Row], folder: Path) -> str:
    """Writes table.md: accuracy by epsilon, and what each doubling of the budget adds."""
    head = ["data", *(f"epsilon = {e:g}" for e in study.epsilons)]
    head += [f"{b:g} over {a:g}" for a, b in itertools.pairwise(study.epsilons)]
    lines = []
    for task in study.tasks:
        at = {
            e: [r for r in rows if r["task"] == task and r["epsilon"] == e] for e in study.epsilons
        }
        if not all(at.values()):
            continue
        own = {e: _right(found) for e, found in at.items()}
        cells = [f"{mean:.1f} ± {error:.1f}" for mean, error in map(_of_runs, own.values())]
        for a, b in itertools.pairwise(study.epsilons):
            mean, error = _with_error(own[b].mean(axis=0) - own[a].mean(axis=0))
            error = math.hypot(error, _of_runs(own[a])[1], _of_runs(own[b])[1])
            cells.append(f"{mean:+.1f} ± {error:.1f}")
        lines.append([task, *cells])
    return harness.save(folder, table(tuple(head), lines))


def _right(rows: Sequence[Row]) -> np.ndarray:
    """Which rows were right, [runs, rows]."""
    return np.array([[bit == "1" for bit in row["right"]] for row in rows], dtype=float)


def _of_runs(right: np.ndarray) -> tuple[float, float]:
    """Accuracy over runs, with its standard error."""
    return _with_error(right.mean(axis=1))


def _with_error(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error over the values, in %."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return 100 * float(np.mean(values)), 100 * error


if __name__ == "__main__":
    sys.exit(
        harness.main(
            __doc__,
            Study(),
            QUICK,
            write,
            harness.first_seeds,
            data={"help": "folder with a folder for each data set"},
            tasks={"nargs": "+", "choices": TASKS},
            epsilons={"nargs": "+", "type": float},
            rows={"type": int, "help": "training rows of each data set, at most"},
        )
    )
