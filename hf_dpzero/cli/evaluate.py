"""`hf-dpzero evaluate RECIPE`: a recipe's model on its validation rows, untrained or trained."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dpzero.cli.options import Evaluate
from hf_dpzero.recipes.build import (
    check_context,
    load_trained,
    output_dir,
    refuse_rows_of,
    refuse_training_texts,
    with_kept_column,
)
from hf_dpzero.recipes.checkpoints import ADAPTER_FILE
from hf_dpzero.recipes.recipe import (
    Recipe,
    coerce_fields,
    load_recipe,
    parse_overrides,
    read_recipe,
)
from hf_dpzero.reporting.hub import RECIPE_FILE
from hf_dpzero.reporting.privacy_report import REPORT_FILE
from hf_dpzero.reporting.provenance import Origin, trained_as

if TYPE_CHECKING:
    from hf_dpzero.tasks import AnyTask
    from hf_dpzero.tasks.arguments import DataArguments


def run(arguments: Evaluate) -> None:
    """Evaluates and prints; with --output_dir also writes eval_results.json there.

    Without --model_name_or_path this is the zero-shot figure of the recipe's base model, which
    --zero_shot insists on. `privacy` in the results says what the figure has seen of the training rows.
    """
    from hf_dpzero.tasks import build_task

    overrides = parse_overrides(arguments.overrides)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(arguments.recipe, {"output_dir": scratch, **overrides})
        keys = ("model_name_or_path", "model_revision")
        written = {k: v for k, v in read_recipe(arguments.recipe).items() if k in keys}
        named = coerce_fields(written, str(arguments.recipe))  # whatever the command line says
        base = named.get("model_name_or_path", "")
        own = Origin.of(base, named.get("model_revision"))
        if arguments.zero_shot:
            _check_zero_shot(recipe, own)
        statement = privacy_statement(recipe, own)
        task = build_task(recipe.data)
        refuse_training_texts(task)
        for other in _other_data(recipe, arguments.recipe, scratch):
            refuse_rows_of(other, task)
        metrics = _evaluate(recipe, task, base, quiet=arguments.json)
    results = {**metrics, "privacy": statement}
    if "output_dir" in overrides:
        output_dir(recipe).mkdir(parents=True, exist_ok=True)
        path = output_dir(recipe) / "eval_results.json"
        path.write_text(json.dumps(results, indent=4, sort_keys=True), encoding="utf-8")
    print(json.dumps(results, indent=2, sort_keys=True) if arguments.json else statement)


def _check_zero_shot(recipe: Recipe, own: Origin) -> None:
    """Refuses what would not be zero-shot."""
    shown, model = recipe.data.num_demonstrations, recipe.model.model_name_or_path
    used = Origin.of(model, recipe.model.model_revision)
    if shown:
        problem = f"num_demonstrations={shown} says otherwise; leave one out."
    elif (training := trained_as(used)) is not None:
        problem = f"model_name_or_path={model} was trained: {training}"
    elif used.path != own.path:
        problem = f"model_name_or_path={model} says otherwise; leave one out."
    elif used != own:
        revision = recipe.model.model_revision
        problem = f"model_revision={revision} says otherwise; leave one out."
    else:
        return
    raise ValueError(
        f"--zero_shot evaluates the recipe's base model without training rows, and {problem}"
    )


def privacy_statement(recipe: Recipe, own: Origin) -> str:
    """What an evaluation's figures have seen of training rows, in words.

    Claims that no row was used only of the recipe's own model and revision, and only where nothing
    beside it tells of a training. An adapter, or a model trained on the recipe's base, says what is
    known of the base too.

    Args:
      recipe: with what the command line changed.
      own: the model that the recipe's file names.

    Returns:
      One or two sentences.
    """
    if recipe.data.num_demonstrations:
        return (
            f"NOT PRIVATE: {recipe.data.num_demonstrations} training rows stand in every prompt; what "
            "the model then says depends on them without any noise"
        )
    used = Origin.of(recipe.model.model_name_or_path, recipe.model.model_revision)
    training = trained_as(used)
    if training is None:
        return _untrained(used, own)
    base = own
    if (Path(used.path) / ADAPTER_FILE).is_file():  # its base is loaded at the revision asked for
        base = Origin(own.path, used.revision)
    of_base = trained_as(base) if base != used else None
    if of_base is None and base != own:
        of_base = _untrained(base, own)
    return training if of_base is None else f"{training} And of its base model: {of_base}"


def _untrained(used: Origin, own: Origin) -> str:
    """What is said of a model that comes without any trace of a training."""
    if used.path != own.path:
        return (
            f"NOT KNOWN: {used.path} is not the recipe's base model and has no {REPORT_FILE}, so "
            "nothing says what it was trained on"
        )
    if used.revision != own.revision:
        return (
            f"NOT KNOWN: the recipe names the revision {own.revision!r} of {used.path}, and nothing "
            f"says what {used.revision!r} was trained on"
        )
    return "zero-shot: no training row was used"


def _other_data(recipe: Recipe, path: str, scratch: str) -> list[DataArguments]:
    """Data of the recipe's file, and of the recipe beside the model, where they are other rows."""
    found = []
    for file in (Path(path), Path(recipe.model.model_name_or_path) / RECIPE_FILE):
        with contextlib.suppress(OSError, ValueError):  # a recipe of rows that are not here
            found.append(load_recipe(file, {"output_dir": scratch}).data)
    names = ("task", "dataset_name", "dataset_config_name", "train_file", "validation_file")
    rows = [[getattr(data, name) for name in names] for data in (recipe.data, *found)]
    return [data for data, own in zip(found, rows[1:], strict=True) if own != rows[0]]


def _evaluate(recipe: Recipe, task: AnyTask, base: str, quiet: bool) -> dict[str, float]:
    """Metrics of the recipe's model (`base` with an adapter on it) on its validation rows."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from hf_dpzero.training.prediction import PredictingTrainer

    model, tokenizer = load_trained(recipe.model, task, base)
    check_context(model, recipe)
    encoded = task.tokenize(tokenizer, recipe.model.pair_features, only="validation")
    rows = with_kept_column(encoded, task, recipe.data.keep_column)["validation"]
    trainer = PredictingTrainer(
        model=model,
        args=recipe.training,
        eval_dataset=rows,
        processing_class=tokenizer,
        data_collator=task.collator(tokenizer),
        compute_metrics=task.metrics(tokenizer),
    )
    trainer.per_example_loss = task.objective(tokenizer)
    trainer.remove_callback(PrinterCallback)  # log_metrics below prints the same, once
    if quiet:
        trainer.remove_callback(ProgressCallback)
    metrics = {**trainer.evaluate(), "eval_samples": len(rows)}
    if not quiet:
        trainer.log_metrics("eval", metrics)
    return metrics
