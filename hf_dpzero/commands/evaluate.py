"""`hf-dpzero evaluate RECIPE`: a recipe's model on its validation rows, untrained or trained."""

from __future__ import annotations

import argparse
import json
import tempfile

from hf_dpzero.commands.assemble import load_trained, output_dir
from hf_dpzero.recipe import Recipe, load_recipe, parse_overrides, read_recipe


def run(arguments: argparse.Namespace) -> None:
    """Evaluates and prints; with --output_dir also writes eval_results.json there.

    Without --model_name_or_path this is the zero-shot figure of the recipe's base model.
    """
    overrides = parse_overrides(arguments.overrides)
    base = str(read_recipe(arguments.recipe).get("model_name_or_path", ""))
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(arguments.recipe, {"output_dir": scratch, **overrides})
        metrics = evaluate(recipe, base, quiet=arguments.json)
    if "output_dir" in overrides:
        path = output_dir(recipe) / "eval_results.json"
        path.write_text(json.dumps(metrics, indent=4, sort_keys=True), encoding="utf-8")
    if arguments.json:
        print(json.dumps(metrics, indent=2, sort_keys=True))


def evaluate(recipe: Recipe, base: str, quiet: bool = False) -> dict[str, float]:
    """Metrics (`eval_loss`, `eval_accuracy`, ...) of the recipe's model on its validation rows.

    Args:
      recipe: names the model; its training data is not looked at.
      base: the model under an adapter; see `assemble.load_trained`.
      quiet: print nothing to standard output.
    """
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from hf_dpzero.tasks import build_task

    task = build_task(recipe.data)
    model, tokenizer = load_trained(recipe.model, task, base)
    rows = task.tokenize(tokenizer, recipe.model.pair_features)["validation"]
    trainer = Trainer(
        model=model,
        args=recipe.training,
        eval_dataset=rows,
        processing_class=tokenizer,
        data_collator=task.collator(tokenizer),
        compute_metrics=task.compute_metrics,
    )
    trainer.remove_callback(PrinterCallback)  # log_metrics below prints the same, once
    if quiet:
        trainer.remove_callback(ProgressCallback)
    metrics = {**trainer.evaluate(), "eval_samples": len(rows)}
    if not quiet:
        trainer.log_metrics("eval", metrics)
    return metrics
