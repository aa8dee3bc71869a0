"""`hf-dpzero replay`: rebuild trained weights from the base model and the public trajectory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_dpzero.cli.options import Replay
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.recipes.recipe import Recipe, load_recipe
from hf_dpzero.reporting.hub import INITIAL_VALUES_FILE
from hf_dpzero.reporting.privacy_report import REPORT_FILE
from hf_dpzero.reporting.provenance import resolve_path
from hf_dpzero.reporting.weights import read_weights, weight_files
from hf_dpzero.run_folder.initial_values import load_initial_model
from hf_dpzero.shipped import shipped_file

if TYPE_CHECKING:
    from hf_dpzero.tasks.classification import Task


def run(arguments: Replay) -> None:
    """Loads base and trajectory, checks the base's digest, replays, saves, compares.

    The rebuilt weights are compared bit for bit with those of `--expect`, or, where the whole
    trajectory is replayed, with those that lie beside it. The trajectory is copied beside them, and
    the report where there is one: it holds for them, unless only a part was replayed.
    """
    output, beside = Path(arguments.output_dir), Path(arguments.trajectory).resolve().parent
    if output.resolve() == beside:
        raise ValueError(f"output_dir={output} is the trajectory's own folder; give another one.")
    trajectory = Trajectory.load(arguments.trajectory)
    model, tokenizer = _load_base(arguments.base, arguments.overrides, beside)
    replay(model, trajectory, arguments.upto)
    model.save_pretrained(output)
    if tokenizer is not None:
        tokenizer.save_pretrained(output)
    trajectory.to_safetensors(output / SHIPPING_NAME)  # what was trained once is known by these two
    if (beside / REPORT_FILE).is_file():
        shutil.copyfile(beside / REPORT_FILE, output / REPORT_FILE)
    steps = sum(arguments.upto is None or r.step < arguments.upto for r in trajectory.releases)
    print(f"replayed {steps} of {len(trajectory.releases)} steps into {output}")
    expected = None if arguments.expect is None else Path(arguments.expect)
    if expected is None and arguments.upto is None and weight_files(beside):
        expected = beside
    if expected is not None:
        count = _compare(output, expected)
        print(f"all {count} tensors equal those in {expected}, bit for bit")


def _load_base(base: str, overrides: Sequence[str], beside: Path) -> tuple[Any, Any]:
    """The untrained model and its tokenizer (or None), from a recipe, a model's folder or a Hub id."""
    shipped = None if Path(base).exists() else shipped_file(base, "recipes")
    base = str(shipped or base)
    if base.endswith((".yaml", ".yml")):
        from hf_dpzero.recipes.models import load_model

        recipe = load_recipe(base, overrides)
        return load_model(recipe.model, _task_of(recipe, beside))
    if overrides:
        raise ValueError(f"{overrides[0]}: settings go with a recipe as --base, not with a model.")
    if (beside / INITIAL_VALUES_FILE).is_file():
        return load_initial_model(beside / INITIAL_VALUES_FILE, base), _tokenizer(
            resolve_path(base)
        )
    return _load_checkpoint(base)


def _task_of(recipe: Recipe, beside: Path) -> Task:
    """The recipe's task, with its rows only where nothing else says what the labels are.

    Whoever verifies a release has the published model but not the private data: the names come from
    config.json beside the trajectory, else from the task, else one is made for each label text.
    """
    from hf_dpzero.tasks import build_task

    if recipe.data.prompt is not None:  # a language model's head has no labels
        return _without_rows(recipe, ())
    config = beside / "config.json"
    names = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if names := names.get("id2label"):
        return _without_rows(recipe, [names[key] for key in sorted(names, key=int)])
    try:
        return build_task(recipe.data)  # type: ignore[return-value]
    except (OSError, ValueError):
        if not recipe.model.label_texts:
            raise
        indices = range(len(recipe.model.label_texts))
        return _without_rows(recipe, [f"LABEL_{index}" for index in indices])


def _without_rows(recipe: Recipe, label_names: Sequence[str]) -> Task:
    import datasets

    from hf_dpzero.tasks.classification import Task

    return Task(
        name=recipe.data.task,
        label_names=tuple(label_names),
        text_columns=(),
        splits=datasets.DatasetDict(),
        head=recipe.data.prompt or "sequence_classification",
    )


def _load_checkpoint(name_or_path: str) -> tuple[Any, Any]:
    """A saved model in float32, in the class that its configuration names; and its tokenizer."""
    import transformers

    from hf_dpzero.recipes import sentence_classifier

    path = resolve_path(name_or_path)
    config = transformers.AutoConfig.from_pretrained(path)
    names = config.architectures or ["(none)"]
    kind = getattr(transformers, names[0], None) or getattr(sentence_classifier, names[0], None)
    if kind is None:
        raise ValueError(
            f"{name_or_path} is a {names[0]}, which transformers does not have; give the run's "
            "recipe.yaml as --base."
        )
    return kind.from_pretrained(path, dtype=torch.float32).eval(), _tokenizer(path)


def _tokenizer(path: str) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return None


def _compare(rebuilt: Path, expected: Path) -> int:
    """Checks that two folders hold the same tensors, bit for bit; returns how many."""
    ours, theirs = read_weights(rebuilt), read_weights(expected)
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(f"{rebuilt} and {expected} hold other tensors: {', '.join(odd[:3])}.")
    for name, tensor in ours.items():
        a, b = tensor.contiguous(), theirs[name].contiguous()
        alike = (a.dtype, a.shape) == (b.dtype, b.shape)
        if not alike or not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
            raise ValueError(
                f"tensor {name} of {expected} is not what the trajectory gives (see {rebuilt}): "
                "these weights were not made by these releases alone."
            )
    return len(ours)
