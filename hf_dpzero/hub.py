"""What leaves the machine: the model card, the folder that may be shipped, and the push.

`build_hub_folder` copies by an allow list. Whatever it does not name (the `private` folder,
checkpoints, optimizer and generator states, pickled arguments, logs) never reaches the folder, and
what a run wrote about itself (recipe, results) is reduced to what is public. Nothing is shipped
whose report is missing, says NOT PRIVATE unasked, or disagrees with the trajectory.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.report import (
    PLOT_FILE,
    REPORT_FILE,
    PrivacyReport,
    plan_facts,
    round_up,
    write_atomically,
)

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from hf_dpzero.trajectory import Trajectory

CARD_FILE, RESULTS_FILE, RECIPE_FILE = "README.md", "all_results.json", "recipe.yaml"
TRAJECTORY_FILE = "trajectory.safetensors"
FOLDER_NAME = "hub"

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"
_SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"

COPIED = (
    *WEIGHTS,
    _INDEX,
    _SHARDS,
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    REPORT_FILE,
    TRAJECTORY_FILE,
    PLOT_FILE,
)
"""Names, or patterns of names, at the top of `output_dir` that are copied unchanged."""

WRITTEN = (CARD_FILE, RESULTS_FILE, RECIPE_FILE)
"""Files that are written anew, from what is public."""

_PUBLIC_RESULT = re.compile(r"(eval|test|predict|zero_shot)_\w+|epoch|train_samples")
_SECRET_SETTING = re.compile(
    r"(?!direction_key$)(.*_)?(token|key|secret|password|credentials?)", re.IGNORECASE
)
_MACHINE_SETTINGS = ("output_dir", "logging_dir", "resume_from_checkpoint", "hub_model_id")
_AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
    "fill-mask": "AutoModelForMaskedLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
}
_OWN_MODEL = "sentence_classifier"
_LOGGED = ("direction", "log_private_diagnostics")  # report entries that a header may hold too
_PEFT_TASKS = {
    "SEQ_CLS": "text-classification",
    "CAUSAL_LM": "text-generation",
    "SEQ_2_SEQ_LM": "text2text-generation",
}
_STALE = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


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
        _verify_section(RECIPE_FILE if recipe else _shown(base_model), trajectory),
        "## Limitations\n\n" + "\n".join(f"- {caveat}" for caveat in report.caveats),
        f"## Settings\n\n```yaml\n{recipe.rstrip()}\n```" if recipe else "",
    ]
    library = "peft" if peft else library
    data = _metadata(report, repo_id, base_model, task, dataset, metrics or {}, library)
    body = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{data}\n---\n\n{body}\n")


def write_model_card(output_dir: str | os.PathLike[str], *, repo_id: str | None = None) -> Path:
    """Writes the card of the run in `output_dir` as its README.md, private or not.

    Raises:
      FileNotFoundError: there is no privacy report; says what makes it.
      ValueError: the report disagrees with the trajectory, where there is one.
    """
    folder = Path(output_dir)
    report = _read_report(folder)
    has_trajectory = (folder / TRAJECTORY_FILE).exists()
    card = _card_of(
        folder,
        report,
        _read_trajectory(folder, report) if has_trajectory else None,
        public_results(_read_json(folder / RESULTS_FILE)),
        public_recipe(_read_text(folder / RECIPE_FILE)),
        repo_id,
    )
    write_atomically(folder / CARD_FILE, card.content)
    return folder / CARD_FILE


def build_hub_folder(
    output_dir: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    allow_not_private: bool = False,
    repo_id: str | None = None,
) -> Path:
    """Makes `folder` hold exactly what may be shipped of the run in `output_dir`.

    Guarantee: only files named by `COPIED` and `WRITTEN` are in the folder; no file of `private/`,
    no checkpoint, no optimizer or generator state. An older folder made by this function is
    replaced; the new one appears whole or not at all.

    Args:
      output_dir: a finished run: weights, tokenizer, report, trajectory.
      folder: where to put it; must not exist, or hold nothing but an older such folder.
      allow_not_private: ship a run whose report says NOT PRIVATE; the card says so first.
      repo_id: Hub id for the card's examples.

    Returns:
      `folder`, as a Path.

    Raises:
      FileNotFoundError: report, trajectory or weights are missing; says what makes them.
      ValueError: the report says NOT PRIVATE, or disagrees with the trajectory, or `folder` holds
        other files.
    """
    source, target = Path(output_dir), Path(folder)
    report = _read_report(source)
    _refuse_not_private(report, allow_not_private)
    trajectory = _read_trajectory(source, report)
    _check_weights(source)
    _check_target(source, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".hub-") as temporary:
        staged = Path(temporary) / FOLDER_NAME
        staged.mkdir()
        _fill(source, staged, report, trajectory, repo_id)
        if target.exists():
            shutil.rmtree(target)
        staged.replace(target)
    return target


def push(
    output_dir: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    dry_run: bool = False,
    token: str | None = None,
    allow_not_private: bool = False,
) -> str:
    """Ships the run in `output_dir` to the Hub; leaves the exact folder at `output_dir/hub`.

    Weights of an earlier push are deleted from the repository, so that they never lie beside this
    run's report.

    Args:
      output_dir: a finished run.
      repo_id: "name" or "namespace/name".
      private: visibility of the repository. An existing public one is refused if this is True.
      dry_run: only make the folder; no network.
      token: Hub token; None takes the one that `hf auth login` or HF_TOKEN left.
      allow_not_private: ship a run whose report says NOT PRIVATE.

    Returns:
      The repository's address; with `dry_run` the folder's path.

    Raises:
      ValueError: a bad `repo_id`, or a reason of `build_hub_folder`.
      FileNotFoundError: see `build_hub_folder`.
      PermissionError: no token, a token that may not write, or a public repository.
      ConnectionError: offline mode, or the Hub cannot be reached.
    """
    _check_repo_id(repo_id)
    token = None if dry_run else _require_token(token)
    folder = build_hub_folder(
        output_dir,
        Path(output_dir) / FOLDER_NAME,
        allow_not_private=allow_not_private,
        repo_id=repo_id,
    )
    return str(folder) if dry_run else _upload(folder, repo_id, private, token)


# ------------------------------------------------------------------ what is read, and refused


def _read_report(source: Path) -> PrivacyReport:
    try:
        return PrivacyReport.load(source / REPORT_FILE)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{source / REPORT_FILE} is missing, so nothing can be said about privacy: "
            "`hf-dpzero train RECIPE` writes it, and so does "
            "`trainer.privacy_report().save(output_dir)`."
        ) from None


def _refuse_not_private(report: PrivacyReport, allowed: bool) -> None:
    if not report.private and not allowed:
        raise ValueError(
            f"{report.statement} To publish it all the same, pass --allow_not_private "
            "(allow_not_private=True); the card will say so first."
        )


def _read_trajectory(source: Path, report: PrivacyReport) -> Trajectory:
    from hf_dpzero.trajectory import Trajectory

    path = source / TRAJECTORY_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing, so the report cannot be checked: training writes it at its end, "
            "and `Trajectory.load(ledger).to_safetensors(path)` makes it from the run's ledger."
        )
    trajectory = Trajectory.load(path)
    _refuse_disagreement(report, trajectory)
    return trajectory


def _refuse_disagreement(report: PrivacyReport, trajectory: Trajectory) -> None:
    """Recomputes from the public plan and the releases all that the report takes from them."""
    from hf_dpzero.plan import PrivacyPlan

    header, steps = trajectory.header, trajectory.next_step
    plan = PrivacyPlan.from_dict(header["plan"])
    facts = plan_facts(plan, report.delta, min(steps, plan.steps))
    facts["steps"] = steps
    facts.update({name: header[name] for name in _LOGGED if name in header})
    wrong = [name for name, value in facts.items() if not _same(getattr(report, name), value)]
    if wrong:
        stated = ", ".join(f"{name}: {getattr(report, name)} / {facts[name]}" for name in wrong)
        raise ValueError(
            f"{REPORT_FILE} and {TRAJECTORY_FILE} are not of the same run (report / trajectory): "
            f"{stated}. Write the report again from the run that made the weights."
        )


def _same(stated: Any, found: Any) -> bool:
    if isinstance(found, float) and isinstance(stated, int | float):
        return math.isclose(stated, found, rel_tol=1e-6)
    return bool(stated == found)


def _check_weights(source: Path) -> None:
    if (source / _INDEX).is_file():
        index = json.loads((source / _INDEX).read_text(encoding="utf-8"))
        needed = sorted(set(index["weight_map"].values()))
    else:
        needed = [name for name in WEIGHTS if (source / name).is_file()]
    missing = [name for name in needed if not (source / name).is_file()]
    if missing or not needed:
        raise FileNotFoundError(
            f"{source} lacks weights: {', '.join(missing) or ' or '.join(WEIGHTS)}. "
            "`trainer.save_model()` writes them; pickled .bin weights are not shipped."
        )
    strange = [name for name in needed if not _named(name, COPIED)]
    if strange:
        raise ValueError(f"{_INDEX} names {strange[0]!r}, which is no shard's name; not copied.")


def _check_target(source: Path, target: Path) -> None:
    """`target` may be replaced only if nothing but an older hub folder can be lost."""
    if target.resolve() == source.resolve():
        raise ValueError(f"folder={target} is the run's own folder; name another one.")
    if not target.exists():
        return
    names = [path.name for path in target.iterdir()] if target.is_dir() else [target.name]
    foreign = [name for name in names if not _named(name, (*COPIED, *WRITTEN))]
    if foreign or not target.is_dir():
        raise ValueError(
            f"folder={target} holds {foreign[0] if foreign else 'a file'!r}, which was not made "
            "by this command; move it away or name another folder."
        )


# ------------------------------------------------------------------ what is written


def _fill(
    source: Path, staged: Path, report: PrivacyReport, trajectory: Trajectory, repo_id: str | None
) -> None:
    for path in _copied_files(source):
        shutil.copyfile(path, staged / path.name)
    metrics = public_results(_read_json(source / RESULTS_FILE))
    if metrics:
        text = json.dumps(metrics, indent=4, allow_nan=False)
        (staged / RESULTS_FILE).write_text(text + "\n", encoding="utf-8")
    recipe = public_recipe(_read_text(source / RECIPE_FILE))
    if recipe:
        (staged / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    card = _card_of(staged, report, trajectory, metrics, recipe, repo_id)
    write_atomically(staged / CARD_FILE, card.content)


def _copied_files(source: Path) -> Iterable[Path]:
    for path in sorted(source.iterdir()):
        if not _named(path.name, COPIED):
            continue
        if path.is_symlink() or not path.is_file():
            raise ValueError(
                f"{path} is a link or a folder, not a plain file: it could point at something "
                "private. Replace it by the file itself."
            )
        yield path


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def public_results(results: Mapping[str, Any]) -> dict[str, float]:
    """Evaluation metrics and public counts; never a statistic of the training data, nor timing.

    >>> public_results({"eval_accuracy": 0.8, "train_loss": 0.3, "epoch": 1.0})
    {'eval_accuracy': 0.8, 'epoch': 1.0}
    """
    return {
        name: value
        for name, value in results.items()
        if _PUBLIC_RESULT.fullmatch(name)
        and isinstance(value, int | float)
        and math.isfinite(value)
    }


def public_recipe(text: str) -> str:
    """A recipe without secrets and machine-local settings; absolute paths keep their last part.

    The text is returned unchanged, comments included, where nothing had to go.

    >>> public_recipe("clip: 50.0\\nhub_token: hf_x\\ntrain_file: /home/me/rows.jsonl\\n")
    'clip: 50.0\\ntrain_file: rows.jsonl\\n'
    """
    import yaml

    settings = _settings(text)
    public = {name: _portable(value) for name, value in settings.items() if not _is_local(name)}
    return text if public == settings else yaml.safe_dump(public, sort_keys=False)


def _settings(recipe: str) -> dict[str, Any]:
    """The keys and values of a recipe's text; an empty text has none."""
    from hf_dpzero.recipe_values import parse_yaml

    settings = parse_yaml(recipe) if recipe.strip() else {}
    if not isinstance(settings, dict):
        raise ValueError(
            f"{RECIPE_FILE} is no mapping of settings to values; restore or delete it."
        )
    return settings


def _is_local(name: str) -> bool:
    return name in _MACHINE_SETTINGS or _SECRET_SETTING.fullmatch(name) is not None


def _portable(value: Any) -> Any:
    if isinstance(value, list):
        return [_portable(item) for item in value]
    is_path = isinstance(value, str) and (Path(value).is_absolute() or value.startswith("~"))
    return Path(value).name if is_path else value


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    return dict(json.loads(text)) if text else {}


# ------------------------------------------------------------------ the card


def _card_of(
    staged: Path,
    report: PrivacyReport,
    trajectory: Trajectory | None,
    metrics: Mapping[str, float],
    recipe: str,
    repo_id: str | None,
) -> ModelCard:
    settings = _settings(recipe)
    adapter = _read_json(staged / "adapter_config.json")
    config = _read_json(staged / "config.json")
    return model_card(
        report,
        base_model=(
            settings.get("model_name_or_path")
            or adapter.get("base_model_name_or_path")
            or config.get("_name_or_path")
        ),
        task=_task_of(config, adapter),
        dataset=settings.get("dataset_name") or settings.get("task"),
        metrics=metrics,
        recipe=recipe,
        peft=bool(adapter),
        trajectory=trajectory,
        repo_id=repo_id,
        model_type=config.get("model_type"),
        plot=(staged / PLOT_FILE).is_file(),
    )


def _task_of(config: Mapping[str, Any], adapter: Mapping[str, Any]) -> str | None:
    """The Hub's name for what the weights do, from the class that was trained."""
    if adapter:
        return _PEFT_TASKS.get(str(adapter.get("task_type")))
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
        datasets=[dataset] if dataset and _is_hub_id(dataset) else None,
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
    if peft:
        auto = auto.replace("AutoModel", "AutoPeftModel")
        imports = f"from peft import {auto}\nfrom transformers import AutoTokenizer"
    if model_type == _OWN_MODEL:
        imports += f"\n\nimport hf_dpzero.{_OWN_MODEL}  # registers the model class"
    on = f"\n\nThe weights are an adapter on `{_shown(base_model)}`." if peft and base_model else ""
    return (
        "## How to use\n\n```python\n"
        f"{imports}\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
        f'model = {auto}.from_pretrained("{name}")\n'
        f"```{on}"
    )


def _shown(base_model: str | None) -> str:
    if base_model is None:
        return "BASE_MODEL"
    return Path(base_model).name if Path(base_model).is_absolute() else base_model


def _verify_section(base: str, trajectory: Trajectory | None) -> str:
    if trajectory is None or not trajectory.header.get("replayable", True):
        return ""
    return (
        "## How to verify\n\n"
        f"`{TRAJECTORY_FILE}` holds the {len(trajectory.releases)} noised releases of the run. "
        "Replaying them on the base model rebuilds these weights bit for bit:\n\n"
        "```bash\n"
        f"hf-dpzero replay --base {base} \\\n"
        f"  --trajectory {TRAJECTORY_FILE} --output_dir rebuilt\n"
        "```\n\n"
        f"Base model digest (SHA-256): `{trajectory.header['base_model_digest']}`. This shows that "
        "nothing but the listed releases went into the weights, and the plan in the header gives "
        "the epsilon. It cannot show that the noise was drawn as stated: that rests on the "
        "software listed above."
    )


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |" for left, right in (head, ("---", "---"), *rows)]
    return "\n".join(lines)


# ------------------------------------------------------------------ the network


def _check_repo_id(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"repo_id={repo_id!r} is no Hub id such as 'me/my-model': {error}"
        ) from None


def _require_token(token: str | None) -> str:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError(
            "HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or use --dry_run "
            "(dry_run=True) and upload the folder later."
        )
    found = token or get_token()
    if not found:
        raise PermissionError(
            "There is no Hub token: run `hf auth login`, set HF_TOKEN, or pass token=...; "
            "--dry_run (dry_run=True) needs none."
        )
    return found


def _upload(folder: Path, repo_id: str, private: bool, token: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # the second: of its HTTP client

    try:
        return _upload_to(HfApi(token=token), folder, repo_id, private)
    except HfHubHTTPError as error:
        raise PermissionError(
            f"The Hub refused {repo_id!r}: {error}. Check that the token may write there; the "
            f"folder stays at {folder}."
        ) from error
    except HTTPError as error:
        raise ConnectionError(
            f"The Hub cannot be reached ({error}); the folder stays at {folder}, push it later."
        ) from error


def _upload_to(api: Any, folder: Path, repo_id: str, private: bool) -> str:
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.repo_info(url.repo_id).private:
        raise PermissionError(
            f"{url.repo_id} exists and is public, but a private repository was asked for: make it "
            "private, choose another repo_id, or pass private=False (--no-private)."
        )
    api.upload_folder(
        repo_id=url.repo_id,
        folder_path=folder,
        commit_message="Add model, privacy report and trajectory",
        delete_patterns=list(_STALE),
    )
    return str(url)
