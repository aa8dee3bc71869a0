"""What `hf-dpzero plan --recipe` says: rows, privacy plan, model and memory, before any download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_dpzero.experiments.memory import peaks
from hf_dpzero.experiments.memory.live_bytes import GIB
from hf_dpzero.experiments.memory.model_on_meta import MetaModel, find_config
from hf_dpzero.experiments.memory.objective_passes import ObjectivePass, SingleWords, objective_pass
from hf_dpzero.experiments.memory.row_counts import RowCounts, count_rows
from hf_dpzero.recipes.recipe import Recipe


@dataclass(frozen=True)
class Overview:
    """What is known of a recipe's run before it starts."""

    rows: RowCounts  # n and where it comes from
    plan: Any  # the privacy plan, calibrated; None if n is not known
    sections: Mapping[str, Any]  # "model" and "memory"


def overview(recipe: Recipe, num_examples: int | None) -> Overview:
    """Plans a recipe without a download.

    Args:
      recipe: as loaded.
      num_examples: n as the user says, for data that is not here.

    Returns:
      The overview.

    Raises:
      OSError: nothing says which shape the model has.
      ValueError: what training would refuse too: settings, data, layers, budgets.
    """
    config, source = find_config(recipe.model)
    rows = count_rows(recipe.data, num_examples)
    plan = None if rows.train is None else recipe.training.plan(rows.train)
    head = recipe.data.prompt or "sequence_classification"
    labels = 2 if rows.labels is None else rows.labels
    meta = MetaModel(recipe.model, config, head, labels, recipe.training.trainable)
    objective = objective_pass(meta, recipe.data, rows.task)
    sections = _model_section(meta, source, recipe), _memory_section(objective, recipe)
    return Overview(rows, plan, dict(zip(("model", "memory"), sections, strict=True)))


def _model_section(meta: MetaModel, source: str, recipe: Recipe) -> dict[str, Any]:
    """The model's size and what of it trains; tied parameters count once."""
    dtype = peaks.own_dtype(meta)
    parameters = list(meta.build(dtype).parameters())
    trained = [p for p in parameters if p.requires_grad]
    return {
        "name": recipe.model.model_name_or_path,
        "config": source,
        "head": meta.head,
        "num_layers": meta.num_layers,
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "trained_parameters": sum(p.numel() for p in trained),
        "trained_bytes": sum(p.numel() * p.element_size() for p in trained),
        "trained_by": recipe.model.peft_method or recipe.training.trainable or "all parameters",
        "torch_dtype": dtype,
    }


def _memory_section(objective: ObjectivePass, recipe: Recipe) -> dict[str, Any]:
    """Expected peaks by precision, and which devices a run fits on."""
    machine, by_precision = peaks.devices(), {}
    rooms = {**machine, **{f"{size} GiB": size * GIB for size in peaks.CARDS}}
    for run in peaks.all_peaks(objective, recipe):
        row = asdict(run) | {"peak": run.peak}
        precision = row.pop("precision")
        row["fits"] = {name: run.fits(size) for name, size in rooms.items()}
        by_precision[precision] = row
    bits = peaks.quantised_bits(recipe.model)
    notes = [
        f"rows of {objective.length} tokens, as long as max_seq_length allows: shorter texts take less",
        "libraries and a GPU's context, about 0.5 GB each, come on top; a device fits if a tenth of "
        "it is left",
    ]
    if (
        isinstance(objective, SingleWords)
        and objective.guessed
        and recipe.data.prompt == "causal_lm"
    ):
        notes.append("label words are taken to be one token each; several make as many rows")
    if recipe.training.bf16:
        notes.append("bf16: autocast holds one layer's weights in bfloat16 as well")
    return {
        "method": recipe.training.method,
        "microbatch_size": recipe.training.physical_batch_size,
        "eval_batch_size": recipe.training.per_device_eval_batch_size,
        "sequence_length": objective.length,
        "own_precision": f"{bits}-bit" if bits else peaks.own_dtype(objective.meta),
        "devices": machine,
        "by_precision": by_precision,
        "notes": notes,
    }


def print_sections(sections: Mapping[str, Any]) -> None:
    """Prints the tables of the model and its memory."""
    from rich.console import Console
    from rich.table import Table

    console, model = Console(), sections["model"]
    share = 100 * model["trained_parameters"] / model["parameters"]
    size = f"{gib(model['parameter_bytes'])} GiB in {model['torch_dtype']}"
    table = Table("", "", title="model", show_header=False)
    table.columns[0].style = "bold"
    table.add_row("model", f"{model['name']} ({model['head']}, {model['num_layers']} layers)")
    table.add_row("shape from", str(model["config"]))
    table.add_row("parameters", f"{model['parameters']:,} ({size})")
    trained = f"{model['trained_parameters']:,} ({share:.3g} %; {model['trained_by']})"
    table.add_row("trained", trained)
    console.print(table)
    console.print(_memory_table(sections["memory"]))
    for note in sections["memory"]["notes"]:
        console.print(f"  {note}", markup=False, highlight=False)


def _memory_table(memory: Mapping[str, Any]) -> Any:
    from rich.table import Table

    sizes = f"{memory['microbatch_size']} x {memory['sequence_length']} tokens"
    table = Table(title=f"expected peak memory in GiB ({memory['method']}, {sizes})")
    table.add_column("weights in", style="bold")
    for precision in memory["by_precision"]:
        own = " (the recipe's)" if precision == memory["own_precision"] else ""
        table.add_column(precision + own, justify="right")
    columns = list(memory["by_precision"].values())
    for phase, title in {
        "weights": "weights",
        "inference": "inference, one microbatch",
        "evaluation": "evaluation",
        "training": "a training step",
        "peak": "the run",
    }.items():
        table.add_row(title, *(gib(column[phase]) for column in columns))
    table.add_row("the step is", *(column["how"] for column in columns))
    cards = [[f"{s} GiB" for s in peaks.CARDS if c["fits"][f"{s} GiB"]] for c in columns]
    table.add_row("smallest card", *((c or [f"above {peaks.CARDS[-1]} GiB"])[0] for c in cards))
    for name, size in memory["devices"].items():
        fits = ("fits" if column["fits"][name] else "no" for column in columns)
        table.add_row(f"{name}, {gib(size)} here", *fits)
    return table


def gib(size: int | None) -> str:
    """Bytes in GiB; "-" for None.

    >>> gib(3 << 29)
    '1.50'
    """
    return "-" if size is None else f"{size / GIB:.2f}"
