"""The table of a folder of recipes: what each one runs, and what the DPZero paper reports for it.

`recipes/README.md` is written by `python -m scripts.recipe_table recipes`. What a recipe runs is read
from its YAML file, the hardware it needs from the line `Hardware: ...` of its header. The papers'
numbers (Zhang et al. 2024, arXiv:2310.09639, Tables 2, 4 and 5; Bao et al. 2025, K = 64) stand in
`paper_results.csv` beside the recipes and nowhere else; `reported` makes the sentence of them that
headers quote.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.recipes.catalogue import (
    Reported,
    arm_of,
    budget_of,
    model_of,
    read_reported,
    reported,
    trained_of,
)
from hf_dpzero.recipes.recipe import read_recipe
from scripts.markdown import table as markdown_table

README = "README.md"
NOTHING = "–"

ROWS_OF_CLASSES: dict[str, tuple[int, ...]] = {
    "sst2": (29_780, 37_569),
    "sst5": (1_092, 2_218, 1_624, 2_322, 1_288),
    "trec": (86, 1_250, 1_162, 1_223, 835, 896),
    "rte": (1_249, 1_241),
    "snli": (183_416, 182_764, 183_187),
    "mnli": (130_899, 130_900, 130_903),
    "boolq": (3_553, 5_874),
    "squad": (87_599,),
    "drop": (77_400,),
    "quickstart": (8_192,),
}
"""Training rows of each class in the published data sets (all rows where there are no classes)."""

NAMES = {
    "sst2": "SST-2", "sst5": "SST-5", "trec": "TREC", "rte": "RTE", "snli": "SNLI", "mnli": "MNLI",
    "boolq": "BoolQ", "squad": "SQuAD", "drop": "DROP", "quickstart": "quickstart",
}  # fmt: skip
_SECTIONS = {
    "Quickstart": ("quickstart",),
    "RoBERTa-large, prompted (the paper's Table 2)": ("roberta-large",),
    "OPT, prompted (the paper's Tables 4 and 5)": ("opt-",),
    "all-MiniLM-L6-v2, a linear head (measured or simulated: [docs/results.md](../docs/results.md))": (
        "minilm",
    ),
    "SmolLM2-135M-Instruct, prompted ([how to](../docs/how_to/small_decoder.md))": (
        "smollm2-dpzero",
    ),
    "SmolLM2-135M-Instruct, a head on frozen features ([how to](../docs/how_to/small_decoder.md))": (
        "smollm2-features",
    ),
}
_COLUMNS = (
    *("recipe", "task", "model", "method", "trained", "(ε, δ)"),
    *("n / B / T", "the paper reports", "hardware", "command"),
)
_INTRODUCTION = """\
# Recipes

Written by `python -m scripts.recipe_table recipes`; change the recipes, not this file.

A recipe is a YAML file with the fields of `ModelArguments`, `DataArguments` and `DPZeroConfig`. Its
header says what to download, what to expect and what differs from the paper. Any field can be
overridden: `--target_epsilon 6`, `--train_file mine.jsonl --validation_file theirs.jsonl`. Files whose
name starts with an underscore are parts that recipes share (`extends`); they do not run alone.

Most recipes with all-MiniLM-L6-v2 are written for DPZero. Other methods run on the same task and model
with the settings in `methods/_minilm-METHOD.yaml`:

```bash
hf-dpzero compare recipes/trec/minilm-dpzero.yaml --methods dpzero,dp-sgd,dp-adamw,mezo,adamw
```

n is the number of training rows, which the accounting uses; B the expected batch; T the steps. What the
paper reports (Zhang et al. 2024, arXiv:2310.09639) is what its own code reached, mean ± standard error
of three seeds, from [`paper_results.csv`](paper_results.csv). Figures with K = 64 directions are those
of DP-AggZO (Bao et al. 2025, USENIX Security), one seed each.
"""


# ---------------------------------------------------------------- what a recipe runs


def num_examples(recipe: Mapping[str, Any]) -> int:
    """n: the rows that a recipe trains on, from the published sizes of its task.

    >>> num_examples({"task": "trec", "num_examples_per_class": 512})  # 86 + 5 x 512
    2646
    """
    per_class = recipe.get("num_examples_per_class")
    sizes = ROWS_OF_CLASSES[recipe["task"]]
    rows = sum(sizes) if per_class is None else sum(min(size, per_class) for size in sizes)
    return min(rows, recipe.get("max_train_samples") or rows)


def hardware_of(path: Path, recipe: Mapping[str, Any]) -> str:
    """What the header's line "Hardware: ..." says, up to its first semicolon.

    Raises:
      ValueError: a recipe whose weights do not come with a package says nothing about hardware.
    """
    stated = re.search(r"^# Hardware: ([^;\n]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if stated is not None:
        return stated.group(1).strip().rstrip(".")
    if str(recipe["model_name_or_path"]).startswith("package:"):
        return "2 CPU cores"
    raise ValueError(f"{path}: the header has no line `# Hardware: ...`; say what it needs.")


# ---------------------------------------------------------------- the table


def recipes_in(folder: Path) -> list[Path]:
    """Every recipe below a folder, bases left out, sorted."""
    return sorted(folder.rglob("[!_]*.yaml"))


def table(folder: Path) -> str:
    """The Markdown of `README.md`, ending in a new line: the same for the same recipes."""
    return "\n".join([_INTRODUCTION, *_sections(folder)])


def _sections(folder: Path) -> Iterator[str]:
    numbers, known = read_reported(folder), recipes_in(folder)
    for title, prefixes in _SECTIONS.items():
        paths = [path for path in known if path.stem.startswith(prefixes)]
        if paths:
            lines = [_cells(path, folder, numbers) for path in paths]
            shown = ([cell.replace("|", r"\|") for cell in line] for line in lines)
            yield f"## {title}\n\n{markdown_table(_COLUMNS, shown)}"


def _cells(path: Path, folder: Path, numbers: Sequence[Reported]) -> list[str]:
    recipe, name = read_recipe(path), path.relative_to(folder).as_posix()
    return [
        f"[`{name}`]({name})",
        NAMES[recipe["task"]],
        model_of(recipe),
        arm_of(recipe),
        trained_of(recipe),
        budget_of(recipe),
        f"{num_examples(recipe):,} / {recipe['expected_batch_size']:,} / {recipe['max_steps']:,}",
        reported(numbers, recipe) or NOTHING,
        hardware_of(path, recipe),
        f"`hf-dpzero train recipes/{name}`",
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Writes README.md into the folder of recipes that the command line names."""
    parser = argparse.ArgumentParser(description="write the table of a folder of recipes")
    parser.add_argument("folder", type=Path, help="the folder, e.g. recipes")
    folder = parser.parse_args(words).folder
    (folder / README).write_text(table(folder), encoding="utf-8")


if __name__ == "__main__":
    main()
