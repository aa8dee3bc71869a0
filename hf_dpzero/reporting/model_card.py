"""The model card: what a run did and what its privacy means. Its text is `model_card_template.md`."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.private_evaluations import PrivateEvaluation, together
from hf_dpzero.reporting.wording import delta_words, round_up

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

    from hf_dpzero.ledger.trajectory import Trajectory

TEMPLATE = Path(__file__).with_name("model_card_template.md")
_AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
    "fill-mask": "AutoModelForMaskedLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
}
_OWN_MODEL = "sentence_classifier"
_PEFT_TASKS = {
    "SEQ_CLS": "text-classification",
    "CAUSAL_LM": "text-generation",
    "SEQ_2_SEQ_LM": "text2text-generation",
}
_PROMPT_TASKS = {"masked_lm": "fill-mask", "causal_lm": "text-generation"}
_NO_SCORE = ("loss", "runtime", "samples", "per_second", "time")


def model_card(
    report: PrivacyReport,
    *,
    base_model: str | None = None,
    task: str | None = None,
    dataset: str | None = None,
    metrics: Mapping[str, float] | None = None,
    recipe: str | None = None,
    peft: bool = False,
    trajectory: Trajectory | None = None,
    repo_id: str | None = None,
    model_type: str | None = None,
    template: str | None = None,
    plot: bool = False,
    evaluations: Sequence[PrivateEvaluation] = (),
) -> ModelCard:
    """The card of a trained model: the statement in words and numbers, results, use, limits.

    Only a private run is tagged `differential-privacy`. Metadata names the base model and the data
    set only where they are Hub ids; a local path is reduced to its last component.

    Args:
      report: of the run; its `statement` is quoted word for word.
      base_model: Hub id or path of the model that was fine-tuned.
      task: Hub pipeline tag, such as "text-classification".
      dataset: Hub id or name of the training data.
      metrics: `eval_*` and `zero_shot_*` numbers, shown in a table.
      recipe: YAML text of the settings, shown as it is.
      peft: the weights are an adapter on `base_model`.
      trajectory: adds how to rebuild the weights, where it can be replayed.
      repo_id: Hub id that the loading example names.
      model_type: of the configuration; "sentence_classifier" needs this package for loading.
      template: the recipe's, that a text must be put into before the model reads it.
      plot: embed the training curve that lies beside the card.
      evaluations: of private rows, released with noise.
    """
    from huggingface_hub import ModelCard

    metrics = metrics or {}
    base = base_model or "BASE_MODEL"
    title = f"{Path(base).name} fine-tuned with DPZero" if base_model else "DPZero fine-tune"
    title = repo_id.split("/")[-1] if repo_id else title
    packages = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    masked = task == "fill-mask"  # PEFT has no auto class for it
    auto = "AutoModel"
    if not peft or masked or task in _PEFT_TASKS.values():
        auto = _AUTO_CLASSES.get(task or "", auto)
    return ModelCard.from_template(
        _metadata(report, title, base_model, task, dataset, metrics, peft, evaluations),
        template_path=str(TEMPLATE),
        report=report,
        title=title,
        privacy=[
            ("epsilon (spent)", round_up(report.epsilon) if report.private else "not claimed"),
            ("delta", delta_words(report.delta)),
            *report.rows(),
            ("private", "yes" if report.private else "NO"),
            ("versions", packages),
        ],
        results=[
            (name, f"{value:.4g}")
            for name, value in metrics.items()
            if not name.endswith(("runtime", "per_second", "time")) and "_" in name  # not "epoch"
        ],
        dataset_name=dataset if _is_hub_id(dataset) else Path(dataset or "").name,
        plot=PLOT_FILE if plot else None,
        evaluations=evaluations,
        together=together(report, evaluations) if evaluations else "",
        name=repo_id or "path/to/this/folder",
        base=Path(base).name if Path(base).is_absolute() else base,
        peft=peft,
        masked=masked,
        auto=auto.replace("AutoModel", "AutoPeftModel") if peft and not masked else auto,
        own_model=f"hf_dpzero.recipes.{_OWN_MODEL}" if model_type == _OWN_MODEL else None,
        template=template,
        trajectory=trajectory if trajectory and trajectory.header["replayable"] else None,
        recipe=recipe,
    )


def task_of(
    config: Mapping[str, Any], adapter: Mapping[str, Any], prompt: str | None = None
) -> str | None:
    """The Hub's name for what the weights do, from the class that was trained.

    Args:
      config: of the model, {} if there is none.
      adapter: PEFT's configuration, {} for whole models.
      prompt: the recipe's; PEFT has no name for adapters of masked language models.

    Returns:
      A pipeline tag, or None if unknown.
    """
    if adapter:
        names = _PROMPT_TASKS if prompt else _PEFT_TASKS
        return names.get(str(prompt or adapter.get("task_type")))
    if config.get("model_type") == _OWN_MODEL:
        return "text-classification"
    name = "".join(config.get("architectures") or [])
    for task, auto in _AUTO_CLASSES.items():
        if name.endswith(auto.removeprefix("AutoModel")):
            return task
    return "text2text-generation" if name.endswith("ForConditionalGeneration") else None


def _metadata(
    report: PrivacyReport,
    title: str,
    base_model: str | None,
    task: str | None,
    dataset: str | None,
    metrics: Mapping[str, float],
    peft: bool,
    evaluations: Sequence[PrivateEvaluation],
) -> ModelCardData:
    """Tags, base, data and scores (without speed and loss; of private rows as they were released)."""
    from huggingface_hub import EvalResult, ModelCardData

    scores = {
        name.removeprefix("eval_"): value
        for name, value in metrics.items()
        if name.startswith("eval_") and not name.endswith(_NO_SCORE)
    }
    found = [(dataset, "validation", name, score) for name, score in scores.items() if dataset]
    found += [(made.rows, "private", made.metric, made.value) for made in evaluations]
    results = [
        EvalResult(task, data, data, name, score, dataset_split=split)
        for data, split, name, score in found
        if task
    ]
    return ModelCardData(
        library_name="peft" if peft else "transformers",
        base_model=base_model if _is_hub_id(base_model) else None,
        datasets=[dataset] if dataset and "/" in dataset and _is_hub_id(dataset) else None,
        pipeline_tag=task,
        tags=[*(["differential-privacy"] if report.private else []), "dpzero", "zeroth-order"],
        metrics=sorted({*scores, *(made.metric for made in evaluations)}) or None,
        model_name=title if results else None,
        eval_results=results or None,
    )


def _is_hub_id(name: str | None) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not name or Path(name).exists():  # a folder goes before the Hub, as in from_pretrained
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


PLOT_FILE = "training_curve.png"

_CURVES = {
    "eval_accuracy": "evaluation accuracy",
    "eval_macro_f1": "evaluation macro-F1",
    "eval_f1": "evaluation F1",
    "eval_loss": "evaluation loss",
    "epsilon": "spent epsilon (upper bound)",
}


def plot_run(
    log_history: Sequence[Mapping[str, Any]],
    output_dir: str | os.PathLike[str],
    schedules: Mapping[str, Sequence[float]] | None = None,
) -> Path | None:
    """Draws evaluation metrics, the spent epsilon and what is scheduled against steps.

    Args:
      log_history: the trainer's; entries without `step`, absent metrics and values that are not
        finite are left out.
      output_dir: folder for `training_curve.png`.
      schedules: values of each step, from step 1, by name (`privacy.words.schedule_curves`).

    Returns:
      The file, or None if there is nothing to draw.
    """
    curves = []
    for key, label in _CURVES.items():
        rows = [row for row in log_history if row.get(key) is not None and "step" in row]
        points = {row["step"]: row[key] for row in rows if math.isfinite(row[key])}
        if points:
            curves.append((label, sorted(points.items())))
    curves += [(name, list(enumerate(sizes, 1))) for name, sizes in (schedules or {}).items()]
    if not curves:
        return None
    figure = new_figure(len(curves), 4.0, 3.0)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (label, curve) in zip(panels, curves, strict=True):
        axes.plot(*zip(*curve, strict=True), marker="." if len(curve) < 100 else None)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
    target = Path(output_dir) / PLOT_FILE
    figure.savefig(target, dpi=120)
    return target


@contextlib.contextmanager
def optional_plot(name: str) -> Iterator[None]:
    """Inside, a missing matplotlib costs the plot and not the run; standard error says so."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print(f"{name} was not drawn: it needs pip install matplotlib", file=sys.stderr)


def new_figure(panels: int, width: float = 5.0, height: float = 4.0) -> Any:
    """A matplotlib figure on the Agg canvas: no display, no global state.

    Args:
      panels: side by side.
      width: of each, in inches.
      height: in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
