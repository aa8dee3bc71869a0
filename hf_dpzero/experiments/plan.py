"""What `hf-dpzero plan --recipe` says: rows, privacy plan, model and memory, before any download."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_dpzero.checks.data import num_units
from hf_dpzero.experiments import memory
from hf_dpzero.experiments.memory import GIB, MetaModel, find_config
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.recipes.recipe import Recipe
from hf_dpzero.settings.defaults import resolve
from hf_dpzero.tasks import build_task, description_of
from hf_dpzero.tasks.rows import read_rows

_PHASES = {
    "weights": "weights",
    "inference": "inference, one microbatch",
    "evaluation": "evaluation",
    "training": "a training step",
    "peak": "the run",
}

Section = dict[str, Any]
"""Facts by name, as `--json` prints them."""


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
    plan: PrivacyPlan | None  # calibrated; None if n is not known
    sections: Mapping[str, Section]  # "model" and "memory"


def overview(recipe: Recipe, num_examples: int | None) -> Overview:
    """Plans a recipe without a download.

    Raises:
      OSError: nothing says which shape the model has.
      ValueError: what training would refuse too: settings, data, layers, budgets.
    """
    rows = count_rows(recipe, num_examples)
    meta, source = shape_of(recipe, rows.labels)
    model = meta.build(meta.own_dtype)
    # K is chosen by what follows the first trained parameter, as training will choose it.
    recipe = dataclasses.replace(recipe, training=resolve(recipe.training, model))
    parameters = list(model.parameters())  # tied ones once
    trained = [p for p in parameters if p.requires_grad]
    count, trained_count = (sum(p.numel() for p in some) for some in (parameters, trained))
    shape = {
        "name": recipe.model.model_name_or_path,
        "config": source,
        "head": meta.head,
        "num_layers": meta.num_layers,
        "parameters": count,
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "trained_parameters": trained_count,
        "trained_bytes": sum(p.nbytes for p in trained),
        "trained_by": recipe.model.peft_method or recipe.training.trainable or "all parameters",
        "torch_dtype": meta.own_dtype,
    }
    n = rows.train
    plan = None if n is None else recipe.training.plan(n, trained_count)
    return Overview(rows, plan, {"model": shape, "memory": _memory_section(meta, recipe)})


def shape_of(recipe: Recipe, labels: int | None) -> tuple[MetaModel, str]:
    """Finds the recipe's model without weights, and in words where its shape comes from.

    `labels` is its number of classes; None if it is not known, and two are taken.
    """
    config, source = find_config(recipe.model)
    head = recipe.data.prompt or "sequence_classification"
    classes = 2 if labels is None else labels
    return MetaModel(recipe.model, config, head, classes, recipe.training.trainable), source


def choose_directions(recipe: Recipe, labels: int | None) -> Recipe:
    """Returns the recipe with the `num_directions` that training would choose, unless it says one."""
    if "num_directions" not in recipe.training.chosen:
        return recipe
    meta, _ = shape_of(recipe, labels)
    training = resolve(recipe.training, meta.build(meta.own_dtype))
    return dataclasses.replace(recipe, training=training)


# ---- rows


def count_rows(recipe: Recipe, given: int | None = None) -> RowCounts:
    """Counts the rows if they are here, else takes `given`, else derives n from the recipe.

    With `unit_column` n is the number of units.

    Rows that are here are those of local files, of the data sets cache and of the quickstart, after
    the recipe's own choice of rows.

    Raises:
      ValueError, OSError: what the task refuses; `given` is not what is here.
    """
    data = recipe.data
    description = description_of(data.task)
    names = description.label_names if description else data.class_names
    labels = None if names is None else len(names)
    here = _rows_that_are_here(recipe, labels)
    if here is not None and data.holdout:  # which rows is drawn when a run begins
        kept = round((here.train or 0) * (1 - data.holdout))
        source = f"{here.source}; holdout={data.holdout}, about"
        here = dataclasses.replace(here, train=kept, source=source)
    if here is not None:
        if given is not None and given != here.train:
            raise ValueError(
                f"num_examples={given}, but the recipe's data is here and has {here.train} training "
                "rows: leave --num_examples out, or change the data settings."
            )
        return here
    per_class, most = data.num_examples_per_class, data.max_train_samples
    train, source = None, "the data is not here: give --num_examples N, its number of training rows"
    if given is not None:
        train, source = given, "--num_examples"
    elif recipe.training.unit_column is not None and most is None:
        source = "the data is not here: give --num_examples N, its number of units"
    elif per_class is not None and labels:
        train = per_class * labels
        source = f"num_examples_per_class={per_class} x {labels} classes, if each has so many"
        if most is not None and most < train:
            train, source = most, f"max_train_samples={most}"
    elif per_class is None and most is not None:
        train, source = most, f"max_train_samples={most}, if the data has so many"
    return RowCounts(train=train, labels=labels, source=source)


def _rows_that_are_here(recipe: Recipe, labels: int | None) -> RowCounts | None:
    """Counts rows that nobody has to download; None of others. `labels` as far as the recipe says."""
    data = recipe.data
    public = Path(data.validation_file or "")
    if data.train_file and not public.is_file() and data.num_examples_per_class is None:
        # As a starter has it, whose public rows are yet to be written.
        found = num_units(read_rows(Path(data.train_file)), recipe.training)
        rows, source = min(found, data.max_train_samples or math.inf), data.train_file
        source += "; validation_file is not there yet" if data.validation_file else ""
        return RowCounts(train=int(rows), labels=labels, source=source)
    try:
        with offline():
            task = build_task(data)
    except OSError:  # not in a cache; of local files it is the user's mistake
        if data.train_file or data.validation_file:
            raise
        return None
    source = f"the training rows of task {task.name}, which are here"
    found = num_units(task.splits["train"], recipe.training)
    return RowCounts(train=found, labels=len(task.label_names), source=source)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Inside, Hugging Face's libraries read their caches and call nobody."""
    import datasets.config
    import huggingface_hub.constants

    # The libraries read the environment when they are imported, so these flags are what counts.
    hub, data = huggingface_hub.constants, datasets.config
    flags = ((hub, "HF_HUB_OFFLINE"), (data, "HF_HUB_OFFLINE"), (data, "HF_DATASETS_OFFLINE"))
    saved = [getattr(module, name, None) for module, name in flags]
    try:
        for module, name in flags:
            setattr(module, name, True)
        yield
    finally:
        for (module, name), value in zip(flags, saved, strict=True):
            setattr(module, name, value)


# ---- memory


def _memory_section(meta: MetaModel, recipe: Recipe) -> Section:
    """Returns expected peaks by precision, and which devices a run fits on."""
    args, bits = recipe.training, recipe.model.quantised
    length = meta.longest_row(recipe.data.max_seq_length)
    rows, machine = args.physical_batch_size, memory.devices()
    rooms = {**machine, **{f"{size} GiB": size * GIB for size in memory.CARDS}}
    by_precision = {}
    for run in memory.all_peaks(meta, recipe):
        fits = {name: run.fits(size) for name, size in rooms.items()}
        row = {**asdict(run), "peak": run.peak, "fits": fits}
        by_precision[row.pop("precision")] = row
    precision = f"{bits}-bit" if bits else meta.own_dtype
    low, several = precision != "float32" or args.bf16, memory.several_words(meta, recipe.data)
    private = not args.not_private and args.noise_multiplier != 0
    notes = {
        f"rows of {length} tokens, as long as max_seq_length allows: shorter texts take less": True,
        "libraries and a GPU's context, about 0.5 GB each, come on top; a device fits if a tenth of "
        "it is left": True,
        "label words are taken to be one token each; several make as many rows": (
            meta.head == "causal_lm" and meta.num_labels and not several
        ),
        "bf16: autocast holds one layer's weights in bfloat16 as well": args.bf16,
        # What `checks.precision.check_precision` will say, as far as a recipe tells.
        f"training will be refused: microbatch_size={rows} in low precision with method={args.method}, "
        "whose gradients are not taken in fixed shapes; set microbatch_size: 1": (
            low and private and args.first_order and rows > 1
        ),
        "8-bit layers that look for outliers (llm_int8_threshold) make a private run evaluate every "
        "example by itself; 4-bit ones do not": bits == 8 and rows > 1,
    }
    return {
        "method": args.method,
        "microbatch_size": rows,
        "eval_batch_size": args.per_device_eval_batch_size,
        "sequence_length": length,
        "own_precision": precision,
        "devices": machine,
        "by_precision": by_precision,
        "notes": [note for note, holds in notes.items() if holds],
    }


# ---- for people


def print_sections(sections: Mapping[str, Section]) -> None:
    """Prints the tables of the model and its memory."""
    from rich.console import Console
    from rich.table import Table

    console, model, found = Console(), sections["model"], sections["memory"]
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
    rows = f"{found['microbatch_size']} x {found['sequence_length']} tokens"
    table = Table(title=f"expected peak memory in GiB ({found['method']}, {rows})")
    table.add_column("weights in", style="bold")
    for precision in found["by_precision"]:
        own = " (the recipe's)" if precision == found["own_precision"] else ""
        table.add_column(precision + own, justify="right")
    columns = list(found["by_precision"].values())
    for phase, title in _PHASES.items():
        table.add_row(title, *(gib(column[phase]) for column in columns))
    table.add_row("the step is", *(column["how"] for column in columns))
    cards = [[f"{s} GiB" for s in memory.CARDS if c["fits"][f"{s} GiB"]] for c in columns]
    table.add_row("smallest card", *((c or [f"above {memory.CARDS[-1]} GiB"])[0] for c in cards))
    for name, size in found["devices"].items():
        fits = ("fits" if column["fits"][name] else "no" for column in columns)
        table.add_row(f"{name}, {gib(size)} here", *fits)
    console.print(table)
    for note in found["notes"]:
        console.print(f"  {note}", markup=False, highlight=False)


def gib(size: int | None) -> str:
    """Returns bytes in GiB; "-" for None.

    >>> gib(3 << 29)
    '1.50'
    """
    return "-" if size is None else f"{size / GIB:.2f}"
