"""Group-robust training on SST-2 with few negative sentences: worst-group accuracy at one epsilon.

    python -m scripts.studies.group_robust --train train.jsonl --validation validation.jsonl \
      --output_dir out/groups
    python -m scripts.studies.group_robust --train train.jsonl --validation validation.jsonl \
      --output_dir out/groups-quick --quick

Takes SST-2 as JSON lines with sentence and label (0 negative, 1 positive), and the sentence encoder
of hf-dpzero[demo]. The training rows are unbalanced on purpose by a public rule: sentences are
ordered by the SHA-256 of their text, and the first 5,400 positive and 600 negative ones are kept
(--negative takes another share than 0.1), so that the groups' shares are known without counting. The
validation rows are all kept. Every arm is the recipe sst2/minilm-dpzero.yaml with 200 steps; what
differs is in ARMS. Encoding takes a minute or two, once; a run takes about half a minute on one core.
Writes rows.jsonl and table.md.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from scripts.markdown import table
from scripts.studies import harness
from scripts.studies.harness import Row

NAMES = ("negative", "positive")
FIXED = {"sampling": "fixed_batches"}
FIRST_ORDER = {"method": "dp-adamw", "clip": 16.0, "learning_rate": 1e-2}
ARMS: dict[str, dict[str, Any]] = {
    "zero-shot": {},  # before training: the same for all arms, so it runs once
    "plain": {},
    "balanced": {"group_robust": {"weights": "balanced"}},
    "per_step": {"group_robust": {"weights": "per_step"}},
    "plain, fixed batches": FIXED,
    "prefix_sum": {**FIXED, "group_robust": {"weights": "prefix_sum"}},
    "vertex": {**FIXED, "group_robust": {"weights": "vertex", "draws": 8}},
    "dp-adamw, plain": FIRST_ORDER,
    "dp-adamw, per_step": {**FIRST_ORDER, "group_robust": {"weights": "per_step"}},
}
COMMON: dict[str, Any] = {
    "max_steps": 200,
    "expected_batch_size": 500,
    "learning_rate": 2.5e-3,
    "eval_strategy": "no",
    "logging_steps": 50,
    "report_to": "none",
    "use_cpu": True,
    "keep_column": "group",
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run.

    Attributes:
      train, validation: SST-2's rows, .jsonl.
      negative: the share of negative sentences among the training rows.
      rows: how many training rows.
      common: settings of all arms.
    """

    fields: ClassVar = ("arm", "seed")

    train: str = ""
    validation: str = ""
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: int = 3
    epsilon: float = 2.0
    negative: float = 0.1
    rows: int = 6000
    common: dict[str, Any] = field(default_factory=lambda: COMMON)

    @property
    def shares(self) -> dict[str, float]:
        """Of the groups, public."""
        return {"negative": self.negative, "positive": 1 - self.negative}

    def points(self) -> list[tuple[str, int]]:
        """Arms and seeds; the zero-shot head comes from label texts, alike for every seed."""
        pairs = [(arm, seed) for seed in range(self.seeds) for arm in self.arms]
        return [(arm, seed) for arm, seed in pairs if not (arm == "zero-shot" and seed)]

    def measure(self, arm: str, seed: int) -> list[Row]:
        """One run's metrics on the validation rows, with the epsilon that it spent."""
        from hf_dpzero.recipes.build import build_trainer
        from hf_dpzero.recipes.recipe import load_recipe

        groups = {"column": "group", "shares": self.shares}
        settings = {**self.common, **self.files, "target_epsilon": self.epsilon}
        if "group_robust" in ARMS[arm]:
            settings |= {"group_robust": groups | ARMS[arm]["group_robust"]}
        settings |= {name: v for name, v in ARMS[arm].items() if name != "group_robust"}
        with tempfile.TemporaryDirectory() as folder:
            own = {**settings, "seed": seed, "output_dir": folder}
            trainer = build_trainer(load_recipe("sst2/minilm-dpzero", own))
            if arm != "zero-shot":
                trainer.train()
            for name, value in groups.items():  # metrics of groups, also of arms without
                setattr(trainer.args.group_robust, name, value)
            metrics, report = trainer.evaluate(), trainer.privacy_report()
        row = {"arm": arm, "seed": seed, "epsilon": report.epsilon}
        row |= {n.removeprefix("eval_"): v for n, v in metrics.items() if "accuracy" in n}
        logged = [e for e in trainer.state.log_history if "group_weight_negative" in e]
        return [row | ({"weight": logged[-1]["group_weight_negative"]} if logged else {})]

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """The unbalanced training rows and the validation rows, each with its group."""
        folder = Path(self._folder.name)
        return prepared(Path(self.train), Path(self.validation), self.shares, self.rows, folder)

    @functools.cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory()


QUICK = Study(seeds=1, rows=192, common={**COMMON, "max_steps": 4, "expected_batch_size": 16})


def prepared(
    train: Path, validation: Path, shares: dict[str, float], count: int, folder: Path
) -> dict[str, str]:
    """Writes the unbalanced training rows and the validation rows with their groups; their paths."""
    kept, left = [], {name: round(count * share) for name, share in shares.items()}
    for row in sorted(
        _rows(train), key=lambda row: hashlib.sha256(row["sentence"].encode()).digest()
    ):
        if left[row["group"]]:
            left[row["group"]] -= 1
            kept.append(row)
    paths = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    for path, rows in zip(paths.values(), (kept, _rows(validation)), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(path) for name, path in paths.items()}


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [{**row, "group": NAMES[int(row["label"])]} for row in rows]


MEASURES = ("worst_group_accuracy", "accuracy_of_negative", "accuracy_of_positive", "accuracy")
HEAD = (
    *("arm", "worst group", "negative", "positive", "all"),
    *("y of negative at the end", "epsilon", "runs"),
)


def write(study: Study, rows: Sequence[Row], folder: Path) -> str:
    """Writes table.md: mean and standard deviation of each arm."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        cells = []
        for name in MEASURES:
            values = [100 * row[name] for row in own]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}")
        weights = [row["weight"] for row in own if "weight" in row]
        cells.append(f"{statistics.mean(weights):.2f}" if weights else "")
        lines.append([arm, *cells, f"{max(row['epsilon'] for row in own):.3f}", len(own)])
    return harness.save(folder, table(HEAD, lines))


if __name__ == "__main__":
    sys.exit(
        harness.main(
            __doc__,
            Study(),
            QUICK,
            write,
            lambda count: {"seeds": count},
            train={"required": True, "help": "SST-2's training rows, .jsonl"},
            validation={"required": True},
            arms={"nargs": "+", "choices": list(ARMS)},
            negative={"type": float, "help": "their share of the training rows"},
            epsilon={"type": float},
        )
    )
