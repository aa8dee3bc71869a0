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
Writes rows.json and table.md, and continues where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

NAMES = ("negative", "positive")
ROWS = 6000
GROUPS: dict[str, Any] = {"group_column": "group"}
FIXED = {**GROUPS, "sampling": "fixed_batches"}
FIRST_ORDER = {"method": "dp-adamw", "clip": 16.0, "learning_rate": 1e-2}
ARMS: dict[str, dict[str, Any]] = {
    "zero-shot": {},  # before training: the same for all arms, so it runs once
    "plain": {},
    "balanced": {**GROUPS, "group_weights": "balanced"},
    "per_step": {**GROUPS, "group_weights": "per_step"},
    "plain, fixed batches": {"sampling": "fixed_batches"},
    "prefix_sum": {**FIXED, "group_weights": "prefix_sum"},
    "vertex": {**FIXED, "group_weights": "vertex", "group_draws": 8},
    "dp-adamw, plain": FIRST_ORDER,
    "dp-adamw, per_step": {**FIRST_ORDER, **GROUPS, "group_weights": "per_step"},
}
COMMON: dict[str, Any] = {
    "max_steps": 200,
    "expected_batch_size": 500,
    "learning_rate": 2.5e-3,
    "eval_strategy": "no",
    "logging_steps": 50,
    "report_to": "none",
    "use_cpu": True,
}
QUICK: dict[str, Any] = {"max_steps": 4, "expected_batch_size": 16}
QUICK_ROWS = 192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, required=True, help="SST-2's training rows, .jsonl")
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument(
        "--negative", type=float, default=0.1, help="their share of the training rows"
    )
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, help="runs of each arm (default 3; quick 1)")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROWS} rows, 4 steps: that everything works"
    )
    parser.add_argument("overrides", nargs="*", help="settings of all arms: --max_steps=100")
    arguments, further = parser.parse_known_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    shares = {"negative": arguments.negative, "positive": 1 - arguments.negative}
    count, fast = (QUICK_ROWS, QUICK) if arguments.quick else (ROWS, {})
    files = prepared(arguments.train, arguments.validation, shares, count, arguments.output_dir)
    GROUPS["group_shares"] = json.dumps(shares)
    for settings in ARMS.values():
        settings |= GROUPS if "group_column" in settings else {}
    results = arguments.output_dir / "rows.json"
    rows = json.loads(results.read_text()) if results.exists() else []
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in range(arguments.seeds or (1 if arguments.quick else 3)):
        for arm in arguments.arms:
            if arm == "zero-shot" and seed:
                continue  # the head comes from label texts: every run would measure the same
            if (arm, seed) not in done:
                settings = {**files, **fast, "target_epsilon": arguments.epsilon}
                settings |= dict(word.removeprefix("--").split("=", 1) for word in further)
                rows.append(
                    {"arm": arm, "seed": seed, **run(arm, seed, settings, arguments.output_dir)}
                )
                results.write_text(json.dumps(rows, indent=1))
    text = table(rows)
    (arguments.output_dir / "table.md").write_text(text)
    print(text)
    return 0


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


def run(arm: str, seed: int, settings: dict[str, Any], folder: Path) -> dict[str, float]:
    """One run's metrics on the validation rows, with the epsilon that it spent."""
    import shutil

    from hf_dpzero.recipes.build import build_trainer
    from hf_dpzero.recipes.recipe import load_recipe

    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    own = {**COMMON, "keep_column": "group", **settings, **ARMS[arm], "seed": seed}
    trainer = build_trainer(load_recipe("sst2/minilm-dpzero", {**own, "output_dir": str(out)}))
    if arm != "zero-shot":
        trainer.train()
    for name, value in GROUPS.items():  # the metrics of groups, also of arms that train without
        setattr(trainer.args, name, value)
    metrics = trainer.evaluate()
    report = trainer.privacy_report()
    names = [name for name in metrics if "accuracy" in name]
    logged = [entry for entry in trainer.state.log_history if "group_weight_negative" in entry]
    weight = {"weight": logged[-1]["group_weight_negative"]} if logged else {}
    return {
        **{n.removeprefix("eval_"): metrics[n] for n in names},
        "epsilon": report.epsilon,
        **weight,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean and standard deviation of each arm."""
    import statistics

    lines = [
        "| arm | worst group | negative | positive | all | y of negative at the end | epsilon | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        cells = []
        for name in (
            "worst_group_accuracy",
            "accuracy_of_negative",
            "accuracy_of_positive",
            "accuracy",
        ):
            values = [100 * row[name] for row in own]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}")
        weights = [row["weight"] for row in own if "weight" in row]
        cells.append(f"{statistics.mean(weights):.2f}" if weights else "")
        cells.append(f"{max(row['epsilon'] for row in own):.3f}")
        lines.append(f"| {arm} | {' | '.join(cells)} | {len(own)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
