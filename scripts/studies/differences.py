"""Do one-sided differences learn what two-sided ones do? Accuracy at equal K, and at equal passes.

    python -m scripts.studies.differences --data FOLDER --output_dir out/differences
    python -m scripts.studies.differences --data FOLDER --output_dir out/differences-quick --quick

FOLDER holds sst2 and trec, each with train.jsonl and validation.jsonl. Three things are trained, at
epsilon 2, with the recipes' settings: the linear head of MiniLM on SST-2 and on TREC, and LoRA inside
MiniLM's last layer (with the head) on TREC. `central` takes 2 K passes a step, `forward` K + 1;
`forward, 2 K passes` has 2 K - 1 directions, with the clip times sqrt((2 K - 1) / K) and the rate times
K / (2 K - 1). A head takes one to three minutes a run on an idle core, LoRA ten. Writes rows.jsonl and
table.md.
"""

from __future__ import annotations

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

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ARMS = ("central", "forward", "forward, 2 K passes")
EVERY: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "use_cpu": True}
TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "SST-2, head": ("sst2", "minilm-dpzero", {"max_train_samples": 17_000, "max_steps": 1000}),
    "TREC, head": ("trec", "minilm-dpzero", {}),
    "TREC, LoRA": (
        "trec",
        "minilm-dpzero",
        {
            "precompute_features": False, "trainable": None, "peft_method": "lora", "lora_r": 8,
            "lora_target_modules": [f"layer.5.attention.self.{n}" for n in ("query", "value")],
            "num_directions": 16, "expected_batch_size": 256, "microbatch_size": 64,
            "max_seq_length": 32, "max_steps": 100, "smoothing": 1e-3, "clip": 16.0,
            "learning_rate": 2e-3,
        },
    ),
}  # fmt: skip
"""What is trained: folder of the data and of the recipe, the recipe, and what is given beside it."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run; `given`, and `smoothing` in place of the recipes', are given to every run."""

    fields: ClassVar = ("task", "arm", "seed")

    data: str = ""
    tasks: tuple[str, ...] = tuple(TASKS)
    arms: tuple[str, ...] = ARMS
    seeds: tuple[int, ...] = (1, 2, 3)
    smoothing: float | None = None
    given: dict[str, Any] = field(default_factory=dict)

    def points(self) -> list[tuple[str, str, int]]:
        """(task, arm, seed)."""
        return seed_by_seed(self.tasks, self.arms, self.seeds)

    def measure(self, task: str, arm: str, seed: int) -> list[Row]:
        """Which validation rows a run gets right, and how long its steps took."""
        from hf_dpzero.recipes.build import build_trainer
        from hf_dpzero.recipes.recipe import load_recipe

        folder, name, own = TASKS[task]
        path = str(RECIPES / folder / f"{name}.yaml")
        files = {f"{split}_file": f"{self.data}/{folder}/{split}.jsonl" for split in SPLITS}
        given = EVERY | own | files | self.given | {"seed": seed}
        given |= {} if self.smoothing is None else {"smoothing": self.smoothing}
        given |= _of_arm(arm, load_recipe(path, given).training)
        with tempfile.TemporaryDirectory() as out:
            trainer = build_trainer(load_recipe(path, given | {"output_dir": out}))
            seconds = trainer.train().metrics["train_runtime"]
            predicted = trainer.predict(trainer.eval_dataset)  # type: ignore[arg-type]
            epsilon = trainer.privacy_report().epsilon
        right = (np.argmax(predicted.predictions, axis=-1) == predicted.label_ids).mean()
        row = {"task": task, "arm": arm, "seed": seed, "accuracy": 100 * float(right)}
        return [row | {"epsilon": epsilon, "seconds": seconds}]


SPLITS = ("train", "validation")
QUICK = Study(
    tasks=("TREC, head",),
    seeds=(1,),
    given={"max_train_samples": 64, "max_eval_samples": 32, "max_steps": 4, "num_directions": 4}
    | {"expected_batch_size": 8},
)


def _of_arm(arm: str, config: Any) -> dict[str, Any]:
    """The settings of an arm, from those of the recipe."""
    kind, _, equal_passes = arm.partition(", ")
    if not equal_passes:
        return {"differences": kind}
    more = (2 * config.num_directions - 1) / config.num_directions
    return {
        "differences": kind,
        "num_directions": 2 * config.num_directions - 1,
        "clip": config.clip * math.sqrt(more),
        "learning_rate": config.learning_rate / more,
    }


def write(study: Study, rows: Sequence[Row], folder: Path) -> str:
    """Writes table.md: accuracy by arm, each run's, and the mean with its error."""
    lines = []
    for task in study.tasks:
        cells = []
        for arm in study.arms:
            found = [r["accuracy"] for r in rows if (r["task"], r["arm"]) == (task, arm)]
            cells.append(_of_runs(found) if found else "")
        lines.append([task, *cells])
    return harness.save(folder, table(("trained", *study.arms), lines))


def _of_runs(accuracies: Sequence[float]) -> str:
    error = np.std(accuracies, ddof=1) / math.sqrt(len(accuracies)) if len(accuracies) > 1 else 0.0
    each = " ".join(f"{a:.1f}" for a in accuracies)
    return f"{np.mean(accuracies):.2f} ± {error:.2f} ({each})"


if __name__ == "__main__":
    sys.exit(
        harness.main(
            __doc__,
            Study(),
            QUICK,
            write,
            harness.first_seeds,
            data={"help": "folder with sst2 and trec", "required": True},
            tasks={"nargs": "+", "choices": TASKS},
            arms={"nargs": "+", "choices": ARMS},
            smoothing={"type": float, "help": "in place of the recipes'"},
        )
    )
