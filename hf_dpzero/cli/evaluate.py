"""`hf-dpzero evaluate RECIPE`: a recipe's model on its validation rows, untrained or trained."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hf_dpzero.cli.options import Evaluate
from hf_dpzero.recipes.build import check_context, load_trained, output_dir
from hf_dpzero.recipes.recipe import (
    Recipe,
    coerce_fields,
    load_recipe,
    parse_overrides,
    read_recipe,
)


@dataclass(frozen=True)
class Origin:
    """Where weights come from; two are equal where they are the same weights."""

    path: str  # a folder, with links and `package:` resolved, or a Hub id
    revision: str  # its branch, tag or commit; of no effect on a folder

    @classmethod
    def of(cls, name: str, revision: str | None) -> Origin:
        """What a recipe names; a package that is not installed stays a name."""
        from hf_dpzero.reporting.provenance import resolve_path

        with contextlib.suppress(ImportError, FileNotFoundError):
            name = resolve_path(name)
        folder = Path(name)
        return cls(str(folder.resolve()) if name and folder.is_dir() else name, revision or "main")


def run(arguments: Evaluate) -> None:
    """Evaluates and prints; with --output_dir also writes eval_results.json there.

    Without --model_name_or_path this is the zero-shot figure of the recipe's base model, which
    --zero_shot insists on. `privacy` in the results says what the figure has seen of the training rows.
    """
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
        metrics = _evaluate(recipe, base, quiet=arguments.json)
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
    if not shown and (training := _trained_as(used)) is not None:
        raise ValueError(
            "--zero_shot evaluates a model that has seen no training row, and "
            f"model_name_or_path={model} was trained: {training}"
        )
    if not shown and used == own:
        return
    other = f"model_revision={recipe.model.model_revision}"
    if shown:
        other = f"num_demonstrations={shown}"
    elif used.path != own.path:
        other = f"model_name_or_path={model}"
    raise ValueError(
        f"--zero_shot evaluates the recipe's base model without training rows, and {other} says "
        "otherwise; leave one out."
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
    from hf_dpzero.recipes.checkpoints import ADAPTER_FILE

    if recipe.data.num_demonstrations:
        return (
            f"NOT PRIVATE: {recipe.data.num_demonstrations} training rows stand in every prompt; what "
            "the model then says depends on them without any noise"
        )
    used = Origin.of(recipe.model.model_name_or_path, recipe.model.model_revision)
    training = _trained_as(used)
    if training is None:
        return _untrained(used, own)
    base = own
    if (Path(used.path) / ADAPTER_FILE).is_file():  # its base is loaded at the revision asked for
        base = Origin(own.path, used.revision)
    of_base = _trained_as(base) if base != used else None
    if of_base is None and base != own:
        of_base = _untrained(base, own)
    return training if of_base is None else f"{training} And of its base model: {of_base}"


def _untrained(used: Origin, own: Origin) -> str:
    """What is said of a model that comes without any trace of a training."""
    from hf_dpzero.reporting.privacy_report import REPORT_FILE

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


def _trained_as(origin: Origin) -> str | None:
    """What is on record of a model's training: its report's statement; None without a trace of one.

    Looks beside the weights; for a `checkpoint-N` also in its run's folder; for a Hub id in the cache
    and, where it can be reached, on the Hub.
    """
    from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME
    from hf_dpzero.reporting.privacy_report import REPORT_FILE

    folder = Path(origin.path)
    for name in (REPORT_FILE, LEDGER_NAME, SHIPPING_NAME):
        if not origin.path:
            paths = []
        elif folder.is_dir():
            of_run = [folder.parent] if re.fullmatch(r"checkpoint-\d+", folder.name) else []
            paths = [place / name for place in (folder, *of_run)]
        else:
            paths = _on_the_hub(origin, name)
        for path in paths:
            if path.is_file():
                statement = _stated(path) if name == REPORT_FILE else None
                return statement or (
                    f"NOT KNOWN: {origin.path} was trained ({path}), and no report that can be read "
                    "says what was spent"
                )
    return None


def _on_the_hub(origin: Origin, name: str) -> list[Path]:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        return [Path(huggingface_hub.hf_hub_download(origin.path, name, revision=origin.revision))]
    except (OSError, ValueError, HfHubHTTPError, HTTPError):  # no such file, id or network
        return []


def _stated(path: Path) -> str | None:
    """A report's own statement; None where it cannot be read, or contradicts itself."""
    from hf_dpzero.reporting.privacy_report import PrivacyReport

    try:
        report = PrivacyReport.load(path)
    except (ValueError, OSError):
        return None
    silent = not report.private and not report.statement.startswith("NOT PRIVATE")
    return f"{'NOT PRIVATE: ' if silent else ''}{report.statement} So says {path}."


def _evaluate(recipe: Recipe, base: str, quiet: bool) -> dict[str, float]:
    """Metrics of the recipe's model (`base` with an adapter on it) on its validation rows."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from hf_dpzero.tasks import build_task
    from hf_dpzero.training.prediction import PredictingTrainer

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
