"""What `hf-dpzero plan --recipe` says: rows, privacy plan, model and memory, before any download."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_dpzero.experiments import memory
from hf_dpzero.experiments.blank_slots import blank_slots, in_words
from hf_dpzero.experiments.memory import GIB
from hf_dpzero.experiments.model_on_meta import MetaModel, find_config, offline
from hf_dpzero.recipes.recipe import Recipe
from hf_dpzero.settings.defaults import resolve
from hf_dpzero.tasks import build_task, description_of
from hf_dpzero.tasks.arguments import DataArguments


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """What a plan needs to know of the data."""

    train: int | None  # n, rows of training data; None if nobody knows
    labels: int | None  # number of classes; 0 where answers are generated; None if it is not known
    source: str  # where `train` comes from, in words; or what to give if it is None


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
    rows = count_rows(recipe.data, num_examples)
    meta, source = shape_of(recipe, rows.labels)
    model = meta.build(memory.own_dtype(meta))
    recipe = dataclasses.replace(recipe, training=resolve(recipe.training, model))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    plan = None if rows.train is None else recipe.training.plan(rows.train, trained)
    sections = _model_section(meta, source, recipe), _memory_section(meta, recipe)
    if plan is not None:
        _add_blank_slots(sections[1], plan, recipe, sum(p.numel() for p in model.parameters()))
    return Overview(rows, plan, dict(zip(("model", "memory"), sections, strict=True)))


def shape_of(recipe: Recipe, labels: int | None) -> tuple[MetaModel, str]:
    """The recipe's model without weights, and where its shape comes from.

    Args:
      recipe: as loaded.
      labels: number of classes; None if it is not known, and two are taken.

    Returns:
      The model and words.

    Raises:
      OSError: nothing says which shape the model has.
    """
    config, source = find_config(recipe.model)
    head = recipe.data.prompt or "sequence_classification"
    classes = 2 if labels is None else labels
    return MetaModel(recipe.model, config, head, classes, recipe.training.trainable), source


def choose_directions(recipe: Recipe, labels: int | None) -> Recipe:
    """The recipe with the `num_directions` that training would choose; as it is where it says one.

    Args:
      recipe: as loaded.
      labels: number of classes; None if it is not known.

    Raises:
      OSError: nothing says which shape the model has.
    """
    if "num_directions" not in recipe.training.chosen:
        return recipe
    meta, _ = shape_of(recipe, labels)
    training = resolve(recipe.training, meta.build(memory.own_dtype(meta)))
    return dataclasses.replace(recipe, training=training)


def count_rows(data: DataArguments, given: int | None = None) -> RowCounts:
    """Counts the rows if they are here, else takes `given`, else derives n from the recipe.

    Rows that are here are those of local files, of the data sets cache and of the quickstart, after
    the recipe's own choice of rows.

    Args:
      data: the recipe's.
      given: n as the user says, for data that is not here.

    Returns:
      The counts.

    Raises:
      ValueError, OSError: what the task refuses; `given` is not what is here.
    """
    task = _task_that_is_here(data)
    if task is None:
        description = description_of(data.task)
        labels = None if description is None else len(description.label_names)
        train, source = (given, "--num_examples") if given is not None else _derived(data, labels)
        return RowCounts(train=train, labels=labels, source=source)
    here = len(task.splits["train"])
    if given is not None and given != here:
        raise ValueError(
            f"num_examples={given}, but the recipe's data is here and has {here} training rows: "
            "leave --num_examples out, or change the data settings."
        )
    source = f"the training rows of task {task.name}, which are here"
    return RowCounts(train=here, labels=len(task.label_names), source=source)


def _task_that_is_here(data: DataArguments) -> Any:
    """The task with its rows, or None if they would have to be downloaded."""
    try:
        with offline():
            return build_task(data)
    except OSError:
        if data.train_file or data.validation_file:
            raise
        return None


def _derived(data: DataArguments, labels: int | None) -> tuple[int | None, str]:
    """n from the recipe's choice of rows, and where it comes from."""
    per_class, most = data.num_examples_per_class, data.max_train_samples
    if per_class is not None and labels:
        count = per_class * labels
        if most is not None and most < count:
            return most, f"max_train_samples={most}"
        return count, f"num_examples_per_class={per_class} x {labels} classes, if each has so many"
    if per_class is None and most is not None:
        return most, f"max_train_samples={most}, if the data has so many"
    return None, "the data is not here: give --num_examples N, its number of training rows"


def _model_section(meta: MetaModel, source: str, recipe: Recipe) -> dict[str, Any]:
    """The model's size and what of it trains; tied parameters count once."""
    dtype = memory.own_dtype(meta)
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


def _memory_section(meta: MetaModel, recipe: Recipe) -> dict[str, Any]:
    """Expected peaks by precision, and which devices a run fits on."""
    length = meta.longest_row(recipe.data.max_seq_length)
    machine, by_precision = memory.devices(), {}
    rooms = {**machine, **{f"{size} GiB": size * GIB for size in memory.CARDS}}
    for run in memory.all_peaks(meta, recipe):
        row = asdict(run) | {"peak": run.peak}
        precision = row.pop("precision")
        row["fits"] = {name: run.fits(size) for name, size in rooms.items()}
        by_precision[precision] = row
    bits = recipe.model.quantised
    notes = [
        f"rows of {length} tokens, as long as max_seq_length allows: shorter texts take less",
        "libraries and a GPU's context, about 0.5 GB each, come on top; a device fits if a tenth of "
        "it is left",
    ]
    if meta.head == "causal_lm" and meta.num_labels and not memory.several_words(meta, recipe.data):
        notes.append("label words are taken to be one token each; several make as many rows")
    if recipe.training.bf16:
        notes.append("bf16: autocast holds one layer's weights in bfloat16 as well")
    precision = f"{bits}-bit" if bits else memory.own_dtype(meta)
    if _couples_examples(recipe, precision):
        notes.append(
            f"training will be refused: microbatch_size={recipe.training.physical_batch_size} in low "
            f"precision with method={recipe.training.method}, whose gradients are not taken in fixed "
            "shapes; set microbatch_size: 1"
        )
    if bits == 8 and recipe.training.physical_batch_size > 1:
        notes.append(
            "8-bit layers that look for outliers (llm_int8_threshold) make a private run evaluate every "
            "example by itself; 4-bit ones do not"
        )
    return {
        "method": recipe.training.method,
        "microbatch_size": recipe.training.physical_batch_size,
        "eval_batch_size": recipe.training.per_device_eval_batch_size,
        "sequence_length": length,
        "own_precision": precision,
        "devices": machine,
        "by_precision": by_precision,
        "notes": notes,
    }


def _add_blank_slots(found: dict[str, Any], plan: Any, recipe: Recipe, parameters: int) -> None:
    longest = None if recipe.model.precompute_features else recipe.data.max_seq_length
    low = found["own_precision"] != "float32" or recipe.training.bf16
    found |= blank_slots(plan, recipe.training, longest, parameters, low)
    if words := in_words(found):
        found["notes"].append(words)


def _couples_examples(recipe: Recipe, precision: str) -> bool:
    """Whether `checks.precision.check_precision` will refuse the run, as far as a recipe tells."""
    args = recipe.training
    low = precision != "float32" or args.bf16
    private = not args.not_private and args.noise_multiplier != 0
    return low and private and args.first_order and args.physical_batch_size > 1


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


def _memory_table(found: Mapping[str, Any]) -> Any:
    from rich.table import Table

    sizes = f"{found['microbatch_size']} x {found['sequence_length']} tokens"
    table = Table(title=f"expected peak memory in GiB ({found['method']}, {sizes})")
    table.add_column("weights in", style="bold")
    for precision in found["by_precision"]:
        own = " (the recipe's)" if precision == found["own_precision"] else ""
        table.add_column(precision + own, justify="right")
    columns = list(found["by_precision"].values())
    for phase, title in {
        "weights": "weights",
        "inference": "inference, one microbatch",
        "evaluation": "evaluation",
        "training": "a training step",
        "peak": "the run",
    }.items():
        table.add_row(title, *(gib(column[phase]) for column in columns))
    table.add_row("the step is", *(column["how"] for column in columns))
    cards = [[f"{s} GiB" for s in memory.CARDS if c["fits"][f"{s} GiB"]] for c in columns]
    table.add_row("smallest card", *((c or [f"above {memory.CARDS[-1]} GiB"])[0] for c in cards))
    for name, size in found["devices"].items():
        fits = ("fits" if column["fits"][name] else "no" for column in columns)
        table.add_row(f"{name}, {gib(size)} here", *fits)
    return table


def gib(size: int | None) -> str:
    """Bytes in GiB; "-" for None.

    >>> gib(3 << 29)
    '1.50'
    """
    return "-" if size is None else f"{size / GIB:.2f}"
