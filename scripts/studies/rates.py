"""How far is the chosen learning rate from the best? Four things trained, nothing else chosen.

    python -m scripts.studies.rates --data FOLDER --output_dir out/rates

FOLDER holds sst2, sst5, trec and snli, each with train.jsonl and validation.jsonl; the generated
messages need none. Recipes are those of `hf-dpzero init` at epsilon = 2. Each is run with its rate left
out, and then with a third and three times the largest rate that this run took, given by hand; the clip
adapts in all. The best of the three stands as tuned by hand: it was picked on the rows that score it,
which favours it. Writes rows.jsonl and table.md.
"""

from __future__ import annotations

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
from scripts.studies import harness, starters
from scripts.studies.harness import Row

TASKS = ("trec", "sst2", "sst5", "snli", starters.MESSAGES)
INSIDE = {
    "precompute_features": False,
    "max_steps": 200,
    "num_directions": 8,
    "expected_batch_size": 64,
}
LAST = r"layer\.[45]\."
TRAINED: dict[str, dict[str, Any]] = {
    "head": {},
    "LoRA": INSIDE
    | {
        "trainable": None,
        "peft_method": "lora",
        "lora_target_modules": [
            f"layer.{i}.attention.self.{n}" for i in (4, 5) for n in ("query", "value")
        ],
    },
    "last two layers": INSIDE | {"trainable": rf"{LAST}|^classifier"},
    "all": INSIDE | {"trainable": None, "max_steps": 100},  # nothing is frozen: twice the time
}
FACTORS = (1 / 3, 3.0)


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run.

    Attributes:
      data: folder of the data sets.
      rows: of each data set, at most.
      given: settings that are given to every run all the same.
    """

    fields: ClassVar = ("task", "trained")

    data: str = ""
    tasks: tuple[str, ...] = TASKS
    trained: tuple[str, ...] = tuple(TRAINED)
    rows: int = 17_000
    given: dict[str, Any] = field(default_factory=dict)

    def points(self) -> list[tuple[str, str]]:
        """(task, what is trained)."""
        return list(itertools.product(self.tasks, self.trained))

    def measure(self, task: str, trained: str) -> list[Row]:
        """Which validation rows are right before training, and after it with each rate."""
        given = TRAINED[trained] | {"max_train_samples": self.rows} | self.given
        first, largest = self._run(task, given)
        by_hand = [self._run(task, given | {"learning_rate": f * largest})[0] for f in FACTORS]
        row = {"task": task, "trained": trained, "rate": largest}
        return [row | {"right": first, "by_hand": by_hand}]

    def _run(self, task: str, given: Row) -> tuple[str, float]:
        """Which rows a run gets right, and its largest rate."""
        from hf_dpzero.recipes.build import build_trainer
        from hf_dpzero.recipes.recipe import load_recipe

        with tempfile.TemporaryDirectory() as folder:
            recipe = starters.starter(
                *self._starters.files(task), 2.0, Path(folder) / "starter.yaml"
            )
            own = starters.MEASURED | {"seed": 1, "output_dir": str(Path(folder) / "out")}
            trainer = build_trainer(load_recipe(recipe, own | given))
            trainer.train()
            predicted = trainer.predict(trainer.eval_dataset)  # type: ignore[arg-type]
        right = np.argmax(predicted.predictions, axis=-1) == predicted.label_ids
        rates = [release.learning_rate for release in trainer.trajectory.releases]
        return "".join(map(str, right.astype(int))), max(rates)

    @functools.cached_property
    def _starters(self) -> starters.Study:
        """Holds the files, the generated messages' as long as it is there."""
        return starters.Study(data=self.data)


QUICK = Study(
    tasks=(starters.MESSAGES,),
    trained=("head",),
    rows=64,
    given={"max_eval_samples": 32, "max_steps": 4, "expected_batch_size": 8},
)


def write(study: Study, rows: Sequence[Row], folder: Path) -> str:
    """Writes table.md: accuracy with the rate left out and with the best given one, in %."""
    head = (
        "data",
        "trained",
        "rate left out",
        "a third of it",
        "three times",
        "left out less best",
    )
    return harness.save(folder, table(head, [_line(row) for row in rows]))


def _line(row: Row) -> list[str]:
    """A point's accuracies, and by how much the chosen rate is behind with the error of the rows."""
    chosen, *given = (np.array(list(bits), dtype=float) for bits in (row["right"], *row["by_hand"]))
    best = max((chosen, *given), key=lambda right: right.mean())
    behind = chosen - best
    error = float(np.std(behind)) / math.sqrt(len(behind))
    cells = [f"{100 * right.mean():.1f}" for right in (chosen, *given)]
    cells[0] += f" ({row['rate']:.2g})"
    return [row["task"], row["trained"], *cells, f"{100 * behind.mean():+.1f} ± {100 * error:.1f}"]


if __name__ == "__main__":
    sys.exit(
        harness.main(
            __doc__,
            Study(),
            QUICK,
            write,
            lambda count: {},
            data={"help": "folder with a folder for each data set"},
            tasks={"nargs": "+", "choices": TASKS},
            trained={"nargs": "+", "choices": tuple(TRAINED)},
            rows={"type": int, "help": "training rows of each data set, at most"},
        )
    )
