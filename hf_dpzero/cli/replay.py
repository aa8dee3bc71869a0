"""`hf-dpzero replay`: rebuild trained weights from the base model and the public trajectory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_dpzero.cli.options import Replay
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.recipes.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from hf_dpzero.tasks.task import Task

RECIPE_SUFFIXES = (".yaml", ".yml")
WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors")


def run(arguments: Replay) -> None:
    """Loads base and trajectory, checks the base's digest, replays, saves, compares.

    The rebuilt weights are compared bit for bit with those of `--expect`, or, where the whole
    trajectory is replayed, with those that lie beside it.
    """
    output, beside = Path(arguments.output_dir), Path(arguments.trajectory).resolve().parent
    if output.resolve() == beside:
        raise ValueError(f"output_dir={output} is the trajectory's own folder; give another one.")
    trajectory = Trajectory.load(arguments.trajectory)
    model, tokenizer = load_base(arguments.base, arguments.overrides, beside)
    replay(model, trajectory, arguments.upto)
    model.save_pretrained(output)
    if tokenizer is not None:
        tokenizer.save_pretrained(output)
    steps = sum(arguments.upto is None or r.step < arguments.upto for r in trajectory.releases)
    print(f"replayed {steps} of {len(trajectory.releases)} steps into {output}")
    expected = None
    if arguments.expect is not None:
        expected = Path(arguments.expect)
    elif arguments.upto is None and weight_files(beside):
        expected = beside
    if expected is not None:
        count = compare(output, expected)
        print(f"all {count} tensors equal those in {expected}, bit for bit")


def load_base(base: str, overrides: Sequence[str], beside: Path) -> tuple[Any, Any]:
    """The untrained model and its tokenizer (or None), from a recipe or a saved model.

    Args:
      base: a recipe (.yaml), or a model's folder or Hub id.
      overrides: settings laid over the recipe; refused for a model.
      beside: the run's folder; its config.json names the labels, so that the data is not needed.

    Returns:
      The model, and its tokenizer or None.
    """
    if base.endswith(RECIPE_SUFFIXES):
        from hf_dpzero.recipes.models import load_model

        recipe = load_recipe(base, overrides)
        return load_model(recipe.model, labels_of(recipe, beside))
    if overrides:
        raise ValueError(f"{overrides[0]}: settings go with a recipe as --base, not with a model.")
    return _load_checkpoint(base)


def labels_of(recipe: Recipe, beside: Path) -> Task:
    """The recipe's task, with its rows only where nothing else says what the labels are.

    Whoever verifies a release has the published model but not the private data: the names come from
    config.json beside the trajectory, else from the task, else one is made for each label text.

    Args:
      recipe: of the run.
      beside: the run's folder.

    Returns:
      The task.
    """
    from hf_dpzero.tasks import build_task

    if recipe.data.prompt is not None:  # a language model's head has no labels
        return _without_rows(recipe, ())
    config = beside / "config.json"
    if config.is_file():
        names = json.loads(config.read_text(encoding="utf-8")).get("id2label") or {}
        if names:
            return _without_rows(recipe, [names[key] for key in sorted(names, key=int)])
    try:
        return build_task(recipe.data)  # type: ignore[return-value]
    except (OSError, ValueError):
        if not recipe.model.label_texts:
            raise
        count = len(recipe.model.label_texts)
        return _without_rows(recipe, [f"LABEL_{index}" for index in range(count)])


def _without_rows(recipe: Recipe, label_names: Sequence[str]) -> Task:
    import datasets

    from hf_dpzero.tasks.task import Task

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
    from hf_dpzero.reporting.provenance import resolve_path

    path = resolve_path(name_or_path)
    config = transformers.AutoConfig.from_pretrained(path)
    names = config.architectures or ["(none)"]
    kind = getattr(transformers, names[0], None) or getattr(sentence_classifier, names[0], None)
    if kind is None:
        raise ValueError(
            f"{name_or_path} is a {names[0]}, which transformers does not have; give the run's "
            "recipe.yaml as --base."
        )
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    try:
        return model, transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return model, None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a saved model or adapter."""
    return sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))


def compare(rebuilt: Path, expected: Path) -> int:
    """Checks that two folders hold the same tensors, bit for bit.

    Args:
      rebuilt: folder of a saved model or adapter.
      expected: another one.

    Returns:
      The number of tensors.

    Raises:
      FileNotFoundError: a folder without weights.
      ValueError: other tensors, or a tensor that differs; names the first.
    """
    ours, theirs = read_weights(rebuilt), read_weights(expected)
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(f"{rebuilt} and {expected} hold other tensors: {', '.join(odd[:3])}.")
    for name, tensor in ours.items():
        other = theirs[name]
        same_kind = tensor.dtype == other.dtype and tensor.shape == other.shape
        if not same_kind or not torch.equal(_bytes(tensor), _bytes(other)):
            raise ValueError(
                f"tensor {name} of {expected} is not what the trajectory gives (see {rebuilt}): "
                "these weights were not made by these releases alone."
            )
    return len(ours)


def read_weights(folder: Path) -> Mapping[str, Tensor]:
    """All tensors of a saved model or adapter, by name."""
    from safetensors.torch import load_file

    files = weight_files(folder)
    if not files:
        raise FileNotFoundError(
            f"{folder} has no model*.safetensors or adapter_model*.safetensors."
        )
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
