"""`hf-dpzero train RECIPE` and `hf-dpzero evaluate RECIPE`."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.cli.options import Evaluate, Train
from hf_dpzero.privacy.words import schedule_curves
from hf_dpzero.recipes import build
from hf_dpzero.recipes.adapters import ADAPTER_FILE
from hf_dpzero.recipes.holdout import held_out
from hf_dpzero.recipes.recipe import (
    Recipe,
    coerce_fields,
    load_recipe,
    parse_overrides,
    read_recipe,
    unused_settings,
)
from hf_dpzero.reporting.hub import CARD_FILE, write_model_card
from hf_dpzero.reporting.model_card import PLOT_FILE, optional_plot, plot_run
from hf_dpzero.reporting.privacy_report import REPORT_FILE
from hf_dpzero.reporting.provenance import Origin, trained_as
from hf_dpzero.reporting.public import RECIPE_FILE
from hf_dpzero.reporting.verification import report_of
from hf_dpzero.run_folder.earlier import refuse_interrupted
from hf_dpzero.run_folder.folder import checkpoint_of
from hf_dpzero.run_folder.left_on_disk import said

if TYPE_CHECKING:
    from hf_dpzero.tasks import AnyTask
    from hf_dpzero.training.dpzero_trainer import DPZeroTrainer
    from hf_dpzero.training.publishing import PublishingTrainer


ZERO_SHOT = "zero-shot: no training row was used"


def run_train(arguments: Train) -> None:
    """Trains as the recipe and the overrides say and leaves everything in its output_dir."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    named = recipe.training.resume_from_checkpoint or "false"
    # Alone on a command line it is "true": the last checkpoint.
    resume = {"true": True, "false": None}.get(named.lower(), named)
    folder = recipe.output_dir
    # The trainer refuses this too; here it is said before the model and the data are loaded.
    checkpoint_of(folder, resume)
    if resume is None:
        refuse_interrupted(folder)
    if (unused := unused_settings(recipe)) and recipe.training.should_log:
        from transformers.utils import logging

        logging.get_logger(__name__).warning(unused)
    trainer = build.build_trainer(recipe)
    _train(trainer, recipe, resume)
    if trainer.is_world_process_zero():
        print(trainer.privacy_report())
        if left := said(recipe.output_dir):
            print(left)
    trainer.accelerator.end_training()


def _train(trainer: DPZeroTrainer, recipe: Recipe, resume: str | bool | None) -> None:
    """Writes {train,eval,zero_shot,all}_results.json, model, report, recipe and training curve.

    `zero_shot_accuracy` is the untrained model's, on the rows that `eval_accuracy` is taken on;
    `seconds_per_step` and `peak_memory_bytes` are those of training steps alone (`StepMeter`). All
    files are written after training, so a run that is refused or interrupted leaves no results.
    """
    from hf_dpzero.training.step_meter import StepMeter
    from hf_dpzero.training.termination import heeding

    public = trainer.eval_dataset is not None
    zero_shot = trainer.evaluate(metric_key_prefix="zero_shot") if public else {}
    best = recipe.training.metric_for_best_model
    known = [key.removeprefix("zero_shot_") for key in zero_shot]
    if best is not None and best.removeprefix("eval_") not in known:  # before any budget is spent
        raise ValueError(
            f"metric_for_best_model={best!r} is none of the metrics of evaluation: {', '.join(known)}."
        )
    meter = StepMeter()
    trainer.add_callback(meter)
    with heeding():  # until the model is saved: its weights may be nowhere else
        output = trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
    trainer.save_state()
    evaluated = trainer.evaluate() if public else {}
    trained = {**output.metrics, **meter.metrics()}
    trained["train_samples"] = trainer.plan.sampler.num_examples
    for split, metrics in (("zero_shot", zero_shot), ("train", trained), ("eval", evaluated)):
        if not metrics:
            continue
        trainer.log_metrics(split, metrics)
        trainer.save_metrics(split, metrics)
    if trainer.is_world_process_zero():
        (recipe.output_dir / RECIPE_FILE).write_text(recipe.to_yaml(), encoding="utf-8")
        try:
            with optional_plot(PLOT_FILE):
                curves = schedule_curves(trainer.plan)
                plot_run(trainer.state.log_history, recipe.output_dir, curves)
        except Exception as error:  # the weights and their report are there: a plot is an extra
            print(f"no training curve was drawn: {error}", file=sys.stderr)
    trainer.create_model_card()  # in place of PEFT's empty template
    if recipe.training.push_to_hub:
        trainer.push_to_hub()


# ---- evaluation


def run_evaluate(arguments: Evaluate) -> None:
    """Evaluates and prints; with --output_dir also writes eval_results.json there.

    Without --model_name_or_path this is the zero-shot figure of the recipe's base model, which
    --zero_shot insists on. `privacy` in the results says what the figure has seen of the training rows.
    With --private_file it is a release (`evaluate_privately`), on record in --output_dir, or beside the
    trained model.
    """
    from hf_dpzero.tasks import build_task

    private = arguments.epsilon is not None
    if arguments.private_file is not None and not private:
        raise ValueError(
            "--private_file names private rows: --epsilon says what one release may spend."
        )
    overrides = parse_overrides(arguments.overrides)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(arguments.recipe, {"output_dir": scratch, **overrides})
        # The base is what the file names: the command line may name a trained model instead.
        written = coerce_fields(dict(read_recipe(arguments.recipe)), arguments.recipe)
        base = written.get("model_name_or_path", "")
        own = Origin.of(base, written.get("model_revision"))
        statement = privacy_statement(recipe, own)
        if arguments.zero_shot and statement != ZERO_SHOT:
            raise ValueError(
                "--zero_shot evaluates the recipe's base model without training rows, and this is none: "
                f"{statement}"
            )
        folder = Path(str(overrides.get("output_dir", recipe.model.model_name_or_path)))
        kept = "output_dir" in overrides or (folder / REPORT_FILE).is_file()
        if private and (recipe.data.num_demonstrations or not kept):
            raise ValueError(
                "--epsilon is for a trained model's folder, which keeps the record of what was "
                "released, or the same --output_dir for each evaluation of these rows; and not for "
                "num_demonstrations, training rows that change every answer."
            )
        task = build_task(recipe.data, arguments.private_file)
        held = private and arguments.private_file is None
        if held:
            model = Path(recipe.model.model_name_or_path)
            held_out(task.splits, model, recipe.training.unit_column)
        trained_on, units = arguments.trained_on or held, recipe.training.unit_column
        build.refuse_training_texts(task, trained_on, unit_column=units)
        # of another model nothing is fitted
        public = recipe.model.public_file if statement == ZERO_SHOT else None
        build.digest_of_public_texts(public, recipe.data, task)
        # The private rows may be others: those of the recipe's file, or of the recipe beside the model.
        rows = attrgetter(
            *("task", "dataset_name", "dataset_config_name", "train_file", "validation_file"),
            *("max_train_samples", "num_examples_per_class", "subset_seed"),
        )
        for file in (Path(arguments.recipe), Path(recipe.model.model_name_or_path) / RECIPE_FILE):
            other = None
            with contextlib.suppress(OSError, ValueError):  # a recipe of rows that are not here
                other = load_recipe(file, {"output_dir": scratch}).data
            if other is not None and rows(other) != rows(recipe.data):
                build.refuse_rows_of(other, task, public, trained_on, units)
        if private:
            found, shown = _evaluate_privately(recipe, task, base, folder, arguments)
        else:
            found, shown = _evaluate(recipe, task, base, quiet=arguments.json), statement
    results = {**found, "privacy": statement}
    if "output_dir" in overrides and not private:
        recipe.output_dir.mkdir(parents=True, exist_ok=True)
        path = recipe.output_dir / "eval_results.json"
        path.write_text(json.dumps(results, indent=4, sort_keys=True), encoding="utf-8")
    print(json.dumps(results, indent=2, sort_keys=True) if arguments.json else shown)


def privacy_statement(recipe: Recipe, own: Origin) -> str:
    """Returns in words what an evaluation's figures have seen of training rows.

    Claims that no row was used only of the recipe's own model and revision, and only where nothing
    beside it tells of a training. An adapter, or a model trained on the recipe's base, says what is
    known of the base too.

    Args:
      recipe: with what the command line changed.
      own: the model that the recipe's file names.
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
    """Returns what is said of a model that comes without any trace of a training."""
    if used != own:
        return (
            f"NOT KNOWN: {used.path} at {used.revision} is not the recipe's base model, {own.path} at "
            f"{own.revision}, and has no {REPORT_FILE}, so nothing says what it was trained on"
        )
    return ZERO_SHOT


def _evaluate_privately(
    recipe: Recipe, task: AnyTask, base: str, folder: Path, arguments: Evaluate
) -> tuple[dict[str, Any], str]:
    """Releases the count of right answers; in numbers and words, with what all on record cost."""
    from hf_dpzero.reporting.budget_file import read
    from hf_dpzero.reporting.private_evaluations import evaluations_in, together

    report, step, model = None, None, Path(recipe.model.model_name_or_path)
    with contextlib.suppress(OSError):  # no report; one of other weights says nothing of a budget
        report = report_of(model)
        step = report.steps if report.shipped_step is None else report.shipped_step
    same_data = arguments.private_file is None or arguments.trained_on
    if report is not None and report.budget and same_data:
        if (paying := recipe.training.budget_file) is None:
            raise ValueError(
                f"{model} was paid for by a budget file, and these rows are of the same data: name the "
                "file (--budget_file), so that all releases are added up."
            )
        read(paying).check_holds(report.budget["entry"], f"the run that made {model}")
    trainer = evaluator(recipe, task, base, "private")
    rows, trainer.eval_dataset, trainer.args.output_dir = trainer.eval_dataset, None, str(folder)
    made = trainer.evaluate_privately(
        rows,
        float(arguments.epsilon or 0),
        rows=Path(arguments.private_file or "held-out training rows").name,
        trained_on=arguments.trained_on,
        step=step,
    )
    if report is not None and folder.samefile(model) and (folder / CARD_FILE).is_file():
        write_model_card(folder)
    spent, said = together(report, evaluations_in(folder)), ""
    if (file := trainer.args.budget_file) is not None:
        said = f"\n  {'budget':<12}{str(read(file)).splitlines()[0]}"
    return {**made.results(), "together": spent}, f"{made}\n  {'together':<12}{spent}{said}"


def _evaluate(recipe: Recipe, task: AnyTask, base: str, quiet: bool) -> dict[str, Any]:
    """Returns metrics of the recipe's model (`base` with an adapter on it) on its validation rows."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    trainer = evaluator(recipe, task, base, "validation")
    rows: Any = trainer.eval_dataset
    trainer.remove_callback(PrinterCallback)  # log_metrics below prints the same, once
    if quiet:
        trainer.remove_callback(ProgressCallback)
    metrics = {**trainer.evaluate(), "eval_samples": len(rows)}
    if not quiet:
        trainer.log_metrics("eval", metrics)
    return metrics


def evaluator(
    recipe: Recipe, task: AnyTask, base: str, split: str, rows: AnyTask | None = None
) -> PublishingTrainer:
    """Returns what evaluates the recipe's model; a split, of `rows` where given, is its eval_dataset."""
    from hf_dpzero.training.publishing import PublishingTrainer

    model, tokenizer = build.load_trained(recipe.model, task, base)
    build.check_context(model, recipe)
    encoded = (rows or task).tokenize(tokenizer, recipe.model.pair_features, only=split)
    trainer = PublishingTrainer(
        model=model,
        args=recipe.training,
        eval_dataset=build.with_kept_column(encoded, rows or task, recipe.data.keep_column)[split],
        processing_class=tokenizer,
        data_collator=task.collator(tokenizer),
        compute_metrics=task.metrics(tokenizer),
    )
    trainer.per_example_loss = task.objective(tokenizer)
    return trainer
