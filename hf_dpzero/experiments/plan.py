"""Everything that `hf-dpzero plan --recipe` says, as one mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_dpzero.experiments.memory.configs import FoundConfig, find_config
from hf_dpzero.experiments.memory.model_on_meta import Blueprint, longest
from hf_dpzero.experiments.memory.objective_passes import Pass, SingleWords, pass_of, several_tokens
from hf_dpzero.experiments.memory.peaks import (
    Peaks,
    all_peaks,
    devices,
    own_dtype,
    quantised_bits,
    rooms,
)
from hf_dpzero.experiments.memory.row_counts import RowCounts, count_rows
from hf_dpzero.recipes.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Overview:
    """What is known of a recipe's run before it starts.

    Attributes:
      rows: n and where it comes from.
      plan: the privacy plan, calibrated; None if n is not known or the method is not private.
      sections: "model" and "memory".
    """

    rows: RowCounts
    plan: Any
    sections: Mapping[str, Any]


def overview(recipe: Recipe, num_examples: int | None) -> Overview:
    """Plans a recipe without a download.

    Args:
      num_examples: n as the user says, for data that is not here.

    Raises:
      OSError: nothing says which shape the model has.
      ValueError: what training would refuse too: settings, data, layers, budgets.
    """
    found = find_config(recipe.model)
    rows = count_rows(recipe.data, num_examples)
    plan = _plan(recipe, rows)
    labels = 2 if rows.labels is None else rows.labels
    blueprint = Blueprint.of(recipe, found.config, labels)
    length = longest(found.config, recipe.data.max_seq_length)
    several = several_tokens(rows.task, recipe.model)
    work = pass_of(blueprint, length, recipe.data, several)
    peaks = all_peaks(work, recipe)
    sections = {
        "model": model_section(blueprint, found, recipe),
        "memory": memory_section(work, recipe, peaks, devices(), several is None),
    }
    return Overview(rows, plan, sections)


def _plan(recipe: Recipe, rows: RowCounts) -> Any:
    if rows.train is None:
        return None
    return recipe.training.plan(rows.train)


def model_section(blueprint: Blueprint, found: FoundConfig, recipe: Recipe) -> dict[str, Any]:
    """The model's size and what of it trains."""
    dtype = own_dtype(blueprint)
    model = blueprint.whole(dtype)
    return {
        "name": recipe.model.model_name_or_path,
        "config": found.source,
        "head": blueprint.head,
        "num_layers": blueprint.num_layers,
        **parameter_counts(model),
        "trained_by": recipe.model.peft_method or recipe.training.trainable or "all parameters",
        "torch_dtype": dtype,
    }


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Parameters, tied ones once, and those that train: how many and their bytes."""
    everything = list(model.parameters())
    trained = [p for p in everything if p.requires_grad]
    return {
        "parameters": sum(p.numel() for p in everything),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in everything),
        "trained_parameters": sum(p.numel() for p in trained),
        "trained_bytes": sum(p.numel() * p.element_size() for p in trained),
    }


def memory_section(
    work: Pass, recipe: Recipe, peaks: list[Peaks], machine: Mapping[str, int], guessed: bool = True
) -> dict[str, Any]:
    """Expected peaks by precision, and which devices a run fits on.

    Args:
      machine: name -> bytes of this machine's devices.
      guessed: no tokenizer has said how many tokens label words are.
    """
    bits = quantised_bits(recipe.model)
    own = f"{bits}-bit" if bits else own_dtype(work.blueprint)
    return {
        "method": recipe.training.method,
        "microbatch_size": recipe.training.physical_batch_size,
        "eval_batch_size": recipe.training.per_device_eval_batch_size,
        "sequence_length": work.length,
        "own_precision": own,
        "devices": dict(machine),
        "by_precision": {p.precision: _row(p, rooms(machine)) for p in peaks},
        "notes": _notes(work, recipe, guessed),
    }


def _row(found: Peaks, sizes: Mapping[str, int]) -> dict[str, Any]:
    row = {k: v for k, v in dataclasses.asdict(found).items() if k != "precision"}
    fits = {name: found.fits(size) for name, size in sizes.items()}
    return {**row, "peak": found.peak, "fits": fits}


def _notes(work: Pass, recipe: Recipe, guessed: bool) -> list[str]:
    notes = [
        f"rows of {work.length} tokens, as long as max_seq_length allows: shorter texts take less",
        "libraries and a GPU's context, about 0.5 GB each, come on top; a device fits if a tenth of "
        "it is left",
    ]
    if guessed and isinstance(work, SingleWords) and work.blueprint.head == "causal_lm":
        notes.append("label words are taken to be one token each; several make as many rows")
    if recipe.training.bf16:
        notes.append("bf16: autocast holds one layer's weights in bfloat16 as well")
    return notes
