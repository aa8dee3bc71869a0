"""`hf-dpzero train RECIPE`: evaluate the untrained model, train, evaluate, save, report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dpzero.cli.options import Train
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME
from hf_dpzero.privacy.words import schedule_curves
from hf_dpzero.recipes.build import build_trainer, output_dir
from hf_dpzero.recipes.recipe import Recipe, load_recipe
from hf_dpzero.recipes.unused import unused_settings
from hf_dpzero.reporting.plots import PLOT_FILE, optional_plot, plot_run
from hf_dpzero.reporting.redaction import RECIPE_FILE

if TYPE_CHECKING:
    from hf_dpzero.training.dpzero_trainer import DPZeroTrainer


def run(arguments: Train) -> None:
    """Trains as the recipe and the overrides say and leaves everything in its output_dir."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    resume = _checkpoint(recipe.training.resume_from_checkpoint)
    folder = output_dir(recipe)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"output_dir={str(folder)!r} is a file; give a folder.")
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise FileNotFoundError(
            f"resume_from_checkpoint={resume!r} is no folder; give a checkpoint's, or nothing behind "
            "--resume_from_checkpoint for the last one."
        )
    if resume is None and (folder / LEDGER_NAME).exists():
        # The trainer refuses this too; here it is said before the model and the data are loaded.
        raise LedgerError(
            f"{folder} holds the ledger of an earlier run: continue it with "
            "--resume_from_checkpoint, or train into another --output_dir. Its privacy budget "
            "stays spent either way."
        )
    if (unused := unused_settings(recipe)) and recipe.training.should_log:
        from transformers.utils import logging

        logging.get_logger(__name__).warning(unused)
    trainer = build_trainer(recipe)
    _train(trainer, recipe, resume)
    if trainer.is_world_process_zero():
        print(trainer.privacy_report())
    trainer.accelerator.end_training()


def _train(trainer: DPZeroTrainer, recipe: Recipe, resume: str | bool | None) -> None:
    """Writes {train,eval,zero_shot,all}_results.json, model, report, recipe and training curve.

    `zero_shot_accuracy` is the untrained model's, on the rows that `eval_accuracy` is taken on;
    `seconds_per_step` and `peak_memory_bytes` are those of training steps alone (`StepMeter`). All
    files are written after training, so a run that is refused or interrupted leaves no results.
    """
    from hf_dpzero.training.callbacks import StepMeter
    from hf_dpzero.training.termination import heeding

    zero_shot = trainer.evaluate(metric_key_prefix="zero_shot")
    _check_metric(recipe.training.metric_for_best_model, zero_shot)
    meter = StepMeter()
    trainer.add_callback(meter)
    with heeding():  # until the model is saved: its weights may be nowhere else
        output = trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
    trainer.save_state()
    evaluated = trainer.evaluate()
    samples = {"train_samples": trainer.plan.sampler.num_examples}
    trained = {**output.metrics, **meter.metrics(), **samples}
    for split, metrics in (("zero_shot", zero_shot), ("train", trained), ("eval", evaluated)):
        trainer.log_metrics(split, metrics)
        trainer.save_metrics(split, metrics)
    if trainer.is_world_process_zero():
        (output_dir(recipe) / RECIPE_FILE).write_text(recipe.to_yaml(), encoding="utf-8")
        try:
            with optional_plot(PLOT_FILE):
                curves = schedule_curves(trainer.plan)
                plot_run(trainer.state.log_history, output_dir(recipe), curves)
        except Exception as error:  # the weights and their report are there: a plot is an extra
            print(f"no training curve was drawn: {error}", file=sys.stderr)
    trainer.create_model_card()  # in place of PEFT's empty template
    if recipe.training.push_to_hub:
        trainer.push_to_hub()


def _check_metric(name: str | None, measured: Mapping[str, float]) -> None:
    """Refuses a metric_for_best_model that evaluation does not give, before any budget is spent.

    >>> _check_metric("eval_accuracy", {"zero_shot_accuracy": 0.5})
    """
    known = [key.removeprefix("zero_shot_") for key in measured]
    if name is not None and name.removeprefix("eval_") not in known:
        raise ValueError(
            f"metric_for_best_model={name!r} is none of the metrics of evaluation: {', '.join(known)}."
        )


def _checkpoint(setting: str | None) -> str | bool | None:
    """What `--resume_from_checkpoint` means: a folder, or (alone, or "true") the last checkpoint.

    >>> [_checkpoint(word) for word in ("true", "out/checkpoint-50", None, "false")]
    [True, 'out/checkpoint-50', None, None]
    """
    if setting is None or setting.lower() == "false":
        return None
    return True if setting.lower() == "true" else setting
