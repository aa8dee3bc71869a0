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

from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.privacy.private_selection import total_epsilon
from hf_dpzero.reporting import model_card
from hf_dpzero.reporting.model_card import RECIPE_FILE, TRAJECTORY_FILE
from hf_dpzero.reporting.privacy_report import (
    PLOT_FILE,
    REPORT_FILE,
    PrivacyReport,
    plan_facts,
)

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from hf_dpzero.ledger.trajectory import Trajectory
    from hf_dpzero.privacy.plan import PrivacyPlan

CARD_FILE, RESULTS_FILE, ADAPTER_FILE = "README.md", "all_results.json", "adapter_config.json"
FOLDER_NAME = "hub"

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"
_SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"

COPIED = (
    *WEIGHTS,
    _INDEX,
    _SHARDS,
    "config.json",
    ADAPTER_FILE,
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
_PATH_SETTINGS = (
    *("train_file", "validation_file", "task", "dataset_name", "model_name_or_path", "extends"),
    *("deepspeed", "fsdp_config", "accelerator_config"),
)
_TEXT_SETTINGS = ("template", "label_words", "class_names")  # texts of a model: never a path
_LOGGED = ("direction", "log_private_diagnostics")  # report entries that a header may hold too
_STALE = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def write_model_card(output_dir: str | os.PathLike[str], *, repo_id: str | None = None) -> Path:
    """Writes the card of the run in `output_dir` as its README.md, private or not.

    Raises:
      FileNotFoundError: there is no privacy report; says what makes it.
      ValueError: the report disagrees with the trajectory, where there is one.
    """
    folder = Path(output_dir)
    report = _read_report(folder)
    has_trajectory = (folder / TRAJECTORY_FILE).exists()
    written = _card_of(
        folder,
        report,
        _read_trajectory(folder, report) if has_trajectory else None,
        public_results(_read_json(folder / RESULTS_FILE)),
        public_recipe(_read_text(folder / RECIPE_FILE)),
        repo_id,
    )
    write_atomically(folder / CARD_FILE, written.content)
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
    from hf_dpzero.ledger.trajectory import Trajectory

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
    from hf_dpzero.privacy.plan import PrivacyPlan

    header, steps = trajectory.header, trajectory.next_step
    plan = PrivacyPlan.from_dict(header["plan"])
    facts = plan_facts(plan, report.delta, min(steps, plan.steps))
    facts["steps"] = steps
    facts.update({name: header[name] for name in _LOGGED if name in header})
    facts.update(_promises(plan, header))
    if isinstance(report.tuning, dict):
        _refuse_unfinished(report)
        facts["epsilon"] = _tuned_epsilon(report, plan)
    wrong = [name for name, value in facts.items() if not _same(getattr(report, name), value)]
    if wrong:
        stated = ", ".join(f"{name}: {getattr(report, name)} / {facts[name]}" for name in wrong)
        raise ValueError(
            f"{REPORT_FILE} and {TRAJECTORY_FILE} are not of the same run (report / trajectory): "
            f"{stated}. Write the report again from the run that made the weights."
        )


def _promises(plan: PrivacyPlan, header: Mapping[str, Any]) -> dict[str, Any]:
    """The noise's name, and whether the run is private, from what its header says."""
    from hf_dpzero.reporting.privacy_report import noise_name
    from hf_dpzero.reporting.wording import needs_secret_batches, why_not_private

    if "noise_source" not in header:
        return {}
    source = str(header["noise_source"])
    broken = why_not_private(
        method=plan.mechanism.name,
        epsilon=0.0 if plan.private else math.inf,
        noise_secure=not source.lower().startswith("insecure"),
        log_private_diagnostics=bool(header.get("log_private_diagnostics")),
        batches_secret=bool(header.get("sampler_key_is_secret", True))
        or not needs_secret_batches(plan),
    )
    return {"noise_source": noise_name(plan, source), "private": broken is None}


def _refuse_unfinished(report: PrivacyReport) -> None:
    if report.steps != report.planned_steps:
        raise ValueError(
            f"{REPORT_FILE} accounts for tuning over whole runs, and this one stopped after "
            f"{report.steps} of {report.planned_steps} steps; finish it with `hf-dpzero sweep`."
        )


def _tuned_epsilon(report: PrivacyReport, plan: PrivacyPlan) -> float:
    """What run and tuning cost together, from the public plan; a report may state more, not less.

    The report's own number is returned where it is the larger one: a stricter claim about the
    sweep (trials of other settings, with more discrete noise) agrees with this run.
    """
    total = total_epsilon(plan, report.tuning, report.delta)
    return report.epsilon if report.epsilon >= total else total


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
    _reduce_base_path(staged / ADAPTER_FILE)
    metrics = public_results(_read_json(source / RESULTS_FILE))
    if metrics:
        text = json.dumps(metrics, indent=4, allow_nan=False)
        (staged / RESULTS_FILE).write_text(text + "\n", encoding="utf-8")
    recipe = public_recipe(_read_text(source / RECIPE_FILE))
    if recipe:
        (staged / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    written = _card_of(staged, report, trajectory, metrics, recipe, repo_id)
    write_atomically(staged / CARD_FILE, written.content)


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

    Templates and names and words of labels stay as they are, also where they start like a path.
    The text is returned unchanged, comments included, where nothing had to go.

    >>> public_recipe("clip: 50.0\\nhub_token: hf_x\\ntrain_file: /home/me/rows.jsonl\\n")
    'clip: 50.0\\ntrain_file: rows.jsonl\\n'
    """
    import yaml

    settings = _settings(text)
    public = {
        name: _portable(name, value) for name, value in settings.items() if not _is_local(name)
    }
    return text if public == settings else yaml.safe_dump(public, sort_keys=False)


def _settings(recipe: str) -> dict[str, Any]:
    """The keys and values of a recipe's text; an empty text has none."""
    from hf_dpzero.values import parse_yaml

    settings = parse_yaml(recipe) if recipe.strip() else {}
    if not isinstance(settings, dict):
        raise ValueError(
            f"{RECIPE_FILE} is no mapping of settings to values; restore or delete it."
        )
    return settings


def _is_local(name: str) -> bool:
    return name in _MACHINE_SETTINGS or _SECRET_SETTING.fullmatch(name) is not None


def _portable(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_portable(name, item) for item in value]
    return Path(value).name if isinstance(value, str) and _is_path(name, value) else value


def _is_path(name: str, value: str) -> bool:
    """Whether a setting's text is a place on this machine, and no text that starts like one.

    Settings that hold paths are taken at their word, and so is text for a model. Elsewhere a path is
    what exists, or has several parts and no white space or braces.
    """
    if name in _TEXT_SETTINGS or not (Path(value).is_absolute() or value.startswith("~")):
        return False
    if name in _PATH_SETTINGS:
        return True
    several = len(Path(value).parts) > 2 or value.startswith("~/")
    plain = re.search(r"[\s{}]", value) is None
    return several and (plain or os.path.exists(os.path.expanduser(value)))


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    return dict(json.loads(text)) if text else {}


def _reduce_base_path(adapter: Path) -> None:
    """An adapter's base model that is a local folder goes by the folder's name, as in the recipe."""
    values = _read_json(adapter)
    base = values.get("base_model_name_or_path")
    if not base or not (Path(base).is_absolute() or Path(base).is_dir()):
        return
    adapter.write_text(
        json.dumps({**values, "base_model_name_or_path": Path(base).name}, indent=2) + "\n",
        encoding="utf-8",
    )


def _dataset_of(settings: Mapping[str, Any]) -> str | None:
    """The data set that a recipe names, or its task (a task file's name) where rows are local."""
    if settings.get("dataset_name") and not settings.get("train_file"):
        return str(settings["dataset_name"])
    task = settings.get("task")
    return Path(task).stem if task else None


def _card_of(
    staged: Path,
    report: PrivacyReport,
    trajectory: Trajectory | None,
    metrics: Mapping[str, float],
    recipe: str,
    repo_id: str | None,
) -> ModelCard:
    settings = _settings(recipe)
    adapter = _read_json(staged / ADAPTER_FILE)
    config = _read_json(staged / "config.json")
    return model_card.model_card(
        report,
        base_model=(
            settings.get("model_name_or_path")
            or adapter.get("base_model_name_or_path")
            or config.get("_name_or_path")
        ),
        task=model_card.task_of(config, adapter, settings.get("prompt")),
        dataset=_dataset_of(settings),
        metrics=metrics,
        recipe=recipe,
        peft=bool(adapter),
        trajectory=trajectory,
        repo_id=repo_id,
        model_type=config.get("model_type"),
        plot=(staged / PLOT_FILE).is_file(),
    )


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
