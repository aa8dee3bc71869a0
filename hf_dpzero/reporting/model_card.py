"""The model card: what a run did and what its privacy means, in words and in a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.reporting.privacy_report import PLOT_FILE, REPORT_FILE, PrivacyReport, round_up

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from hf_dpzero.ledger.trajectory import Trajectory

RECIPE_FILE, TRAJECTORY_FILE = "recipe.yaml", "trajectory.safetensors"
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


def model_card(
    report: PrivacyReport,
    *,
    base_model: str | None = None,
    task: str | None = None,
    dataset: str | None = None,
    metrics: Mapping[str, float] | None = None,
    recipe: str | None = None,
    library: str = "transformers",
    peft: bool = False,
    trajectory: Trajectory | None = None,
    repo_id: str | None = None,
    model_type: str | None = None,
    plot: bool = False,
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
      library: library that loads the weights; "peft" is implied by `peft`.
      peft: the weights are an adapter on `base_model`.
      trajectory: adds how to rebuild the weights, where it can be replayed.
      repo_id: Hub id that the loading example names.
      model_type: of the configuration; "sentence_classifier" needs this package for loading.
      plot: embed the training curve that lies beside the card.
    """
    from huggingface_hub import ModelCard

    name = repo_id or "path/to/this/folder"
    sections = [
        f"# {_title(repo_id, base_model)}\n\n> {report.statement}",
        _privacy_section(report),
        _results_section(metrics or {}, dataset, plot),
        _use_section(name, base_model, task, peft, model_type),
        _verify_section(RECIPE_FILE if recipe else _shown(base_model), trajectory, report),
        "## Limitations\n\n" + "\n".join(f"- {caveat}" for caveat in report.caveats),
        f"## Settings\n\n```yaml\n{recipe.rstrip()}\n```" if recipe else "",
    ]
    library = "peft" if peft else library
    data = _metadata(report, repo_id, base_model, task, dataset, metrics or {}, library)
    body = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{data}\n---\n\n{body}\n")


def task_of(
    config: Mapping[str, Any], adapter: Mapping[str, Any], prompt: str | None = None
) -> str | None:
    """The Hub's name for what the weights do, from the class that was trained.

    Args:
      prompt: the recipe's; PEFT has no name for adapters of masked language models.
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
    repo_id: str | None,
    base_model: str | None,
    task: str | None,
    dataset: str | None,
    metrics: Mapping[str, float],
    library: str,
) -> str:
    from huggingface_hub import ModelCardData

    scores = _scores(metrics)
    tags = ["differential-privacy"] if report.private else []
    results = _eval_results(task, dataset, scores)
    return ModelCardData(
        library_name=library,
        base_model=base_model if _is_hub_id(base_model) else None,
        datasets=[dataset] if dataset and "/" in dataset and _is_hub_id(dataset) else None,
        pipeline_tag=task,
        tags=[*tags, "dpzero", "zeroth-order"],
        metrics=sorted(scores) or None,
        model_name=(_title(repo_id, base_model) if results else None),
        eval_results=results or None,
    ).to_yaml()


def _scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metric name -> value for what `evaluate` computed, without speed and loss."""
    skipped = ("loss", "runtime", "samples", "per_second", "time")
    named = {k.removeprefix("eval_"): v for k, v in metrics.items() if k.startswith("eval_")}
    return {k: v for k, v in named.items() if not k.endswith(skipped)}


def _eval_results(task: str | None, dataset: str | None, scores: Mapping[str, float]) -> list[Any]:
    from huggingface_hub import EvalResult

    if not task or not dataset:
        return []
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split="validation",
            metric_type=name,
            metric_value=value,
        )
        for name, value in scores.items()
    ]


def _is_hub_id(name: str | None) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _title(repo_id: str | None, base_model: str | None) -> str:
    if repo_id:
        return repo_id.split("/")[-1]
    return f"{Path(base_model).name} fine-tuned with DPZero" if base_model else "DPZero fine-tune"


def _privacy_section(report: PrivacyReport) -> str:
    epsilon = round_up(report.epsilon) if report.private else "not claimed"
    rows = [("epsilon (spent)", epsilon), ("delta", f"{report.delta:g}"), *report.rows()]
    notes = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    rows += [("private", "yes" if report.private else "NO"), ("versions", notes)]
    scalars_only = _SCALARS_ONLY if report.method == "dpzero" else ""
    meaning = _MEANING + scalars_only if report.private else ""
    return f"## Privacy\n\n{_table(('', ''), rows)}\n\n{meaning}All numbers: `{REPORT_FILE}`."


_MEANING = (
    "Read it as: for two training sets that differ as stated under *neighbours*, the probability "
    "of any outcome of training differs by a factor of at most exp(epsilon), except with "
    "probability delta. "
)
_SCALARS_ONLY = (
    "Training released one noised number per direction and step, and the weights are a function "
    "of the base model and these numbers alone. "
)


def _results_section(metrics: Mapping[str, float], dataset: str | None, plot: bool) -> str:
    shown = {
        name: value
        for name, value in metrics.items()
        if not name.endswith(("runtime", "per_second", "time")) and "_" in name
    }
    if not shown:
        return ""
    rows = [(f"`{name}`", f"{value:.4g}") for name, value in shown.items()]
    on = (
        f"Data: {Path(dataset).name if not _is_hub_id(dataset) else dataset}.\n\n"
        if dataset
        else ""
    )
    image = f"\n\n![training curve]({PLOT_FILE})" if plot else ""
    return f"## Results\n\n{on}{_table(('metric', 'value'), rows)}{image}"


def _use_section(
    name: str, base_model: str | None, task: str | None, peft: bool, model_type: str | None
) -> str:
    known = _AUTO_CLASSES if not peft or task in _PEFT_TASKS.values() else {}
    auto = known.get(task or "", "AutoModel")
    imports = f"from transformers import {auto}, AutoTokenizer"
    load = f'model = {auto}.from_pretrained("{name}")\n'
    if peft and task == "fill-mask":  # PEFT has no auto class for it
        auto = _AUTO_CLASSES[task]
        imports = f"from peft import PeftModel\nfrom transformers import {auto}, AutoTokenizer"
        load = (
            f'base = {auto}.from_pretrained("{_shown(base_model)}")\n'
            f'model = PeftModel.from_pretrained(base, "{name}")\n'
        )
    elif peft:
        auto = auto.replace("AutoModel", "AutoPeftModel")
        imports = f"from peft import {auto}\nfrom transformers import AutoTokenizer"
        load = f'model = {auto}.from_pretrained("{name}")\n'
    if model_type == _OWN_MODEL:
        imports += f"\n\nimport hf_dpzero.recipes.{_OWN_MODEL}  # registers the model class"
    on = f"\n\nThe weights are an adapter on `{_shown(base_model)}`." if peft and base_model else ""
    return (
        "## How to use\n\n```python\n"
        f"{imports}\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
        f"{load}```{on}"
    )


def _shown(base_model: str | None) -> str:
    if base_model is None:
        return "BASE_MODEL"
    return Path(base_model).name if Path(base_model).is_absolute() else base_model


def _verify_section(base: str, trajectory: Trajectory | None, report: PrivacyReport) -> str:
    if trajectory is None or not trajectory.header["replayable"]:
        return ""
    tuned = isinstance(report.tuning, dict)
    tuning = f", with the tuning entry of `{REPORT_FILE}`," if tuned else ""
    return (
        "## How to verify\n\n"
        f"`{TRAJECTORY_FILE}` holds the {len(trajectory.releases)} noised releases of the run. "
        "Replaying them on the base model rebuilds these weights bit for bit:\n\n"
        "```bash\n"
        f"hf-dpzero replay --base {base} \\\n"
        f"  --trajectory {TRAJECTORY_FILE} --output_dir rebuilt\n"
        "```\n\n"
        f"Base model digest (SHA-256): `{trajectory.header['base_model_digest']}`. This shows that "
        f"nothing but the listed releases went into the weights, and the plan in the header{tuning} "
        "gives the epsilon. It cannot show that the noise was drawn as stated: that rests on the "
        "software listed above."
    )


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |" for left, right in (head, ("---", "---"), *rows)]
    return "\n".join(lines)
