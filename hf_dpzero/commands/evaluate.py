"""`hf-dpzero evaluate RECIPE`: a recipe's model on its validation rows, untrained or trained."""

from __future__ import annotations

import argparse
import json
import tempfile

from hf_dpzero.commands.assemble import check_context, load_trained, output_dir
from hf_dpzero.recipe import Recipe, load_recipe, parse_overrides, read_recipe

NO_TRAINING_DATA = "zero-shot: no training row was used"
DEMONSTRATIONS = (
    "NOT PRIVATE: {count} training rows stand in every prompt; what the model then says depends on them "
    "without any noise"
)
TRAINED = "as private as the training of {model}: its privacy_report.json says what was spent"


def run(arguments: argparse.Namespace) -> None:
    """Evaluates and prints; with --output_dir also writes eval_results.json there.

    Without --model_name_or_path this is the zero-shot figure of the recipe's base model, which
    --zero_shot insists on. `privacy` in the results says what the figure has seen of the training rows.

    Raises:
      ValueError: --zero_shot with demonstrations or another model.
    """
    overrides = parse_overrides(arguments.overrides)
    base = str(read_recipe(arguments.recipe).get("model_name_or_path", ""))
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(arguments.recipe, {"output_dir": scratch, **overrides})
        if arguments.zero_shot:
            _check_zero_shot(recipe, base)
        statement = privacy_statement(recipe, base)
        metrics = evaluate(recipe, base, quiet=arguments.json)
    found = {**metrics, "privacy": statement}
    if "output_dir" in overrides:
        output_dir(recipe).mkdir(parents=True, exist_ok=True)
        path = output_dir(recipe) / "eval_results.json"
        path.write_text(json.dumps(found, indent=4, sort_keys=True), encoding="utf-8")
    print(json.dumps(found, indent=2, sort_keys=True) if arguments.json else statement)


def _check_zero_shot(recipe: Recipe, base: str) -> None:
    """Refuses what would not be zero-shot."""
    shown, model = recipe.data.num_demonstrations, recipe.model.model_name_or_path
    if shown or model != base:
        other = f"num_demonstrations={shown}" if shown else f"model_name_or_path={model}"
        raise ValueError(
            f"--zero_shot evaluates the recipe's base model without training rows, and {other} says "
            "otherwise; leave one out."
        )


def privacy_statement(recipe: Recipe, base: str) -> str:
    """What an evaluation's figures have seen of the training rows, in a sentence."""
    if recipe.data.num_demonstrations:
        return DEMONSTRATIONS.format(count=recipe.data.num_demonstrations)
    if recipe.model.model_name_or_path == base:
        return NO_TRAINING_DATA
    return TRAINED.format(model=recipe.model.model_name_or_path)


def evaluate(recipe: Recipe, base: str, quiet: bool = False) -> dict[str, float]:
    """Metrics (`eval_loss`, `eval_accuracy`, ...) of the recipe's model on its validation rows.

    Args:
      recipe: names the model; its training data is looked at only for `num_demonstrations`.
      base: the model under an adapter; see `assemble.load_trained`.
      quiet: print nothing to standard output.
    """
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from hf_dpzero.prediction import PredictingTrainer
    from hf_dpzero.tasks import build_task

    task = build_task(recipe.data)
    model, tokenizer = load_trained(recipe.model, task, base)
    check_context(model, recipe)
    rows = task.tokenize(tokenizer, recipe.model.pair_features, only="validation")["validation"]
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
