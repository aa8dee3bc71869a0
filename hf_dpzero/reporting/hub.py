"""What leaves the machine: the model card, the folder that may be shipped, and the push.

`build_hub_folder` copies by an allow list. Whatever it does not name (the `_private` folder,
checkpoints, optimizer and generator states, pickled arguments, logs) never reaches the folder, and
recipe and results are reduced to what is public (`redaction`). A run is not shipped if its report is
missing, disagrees with the trajectory, or says NOT PRIVATE and that was not allowed.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.privacy.private_selection import total_epsilon
from hf_dpzero.reporting.model_card import model_card, task_of
from hf_dpzero.reporting.plots import PLOT_FILE
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport, noise_name, plan_facts
from hf_dpzero.reporting.redaction import (
    RECIPE_FILE,
    public_recipe,
    public_results,
    recipe_settings,
)
from hf_dpzero.reporting.wording import EXAMPLE, needs_secret_batches, why_not_private

if TYPE_CHECKING:
    from hf_dpzero.ledger.trajectory import Trajectory

TRAJECTORY_FILE = "trajectory.safetensors"
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

_STALE = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def write_model_card(output_dir: str | os.PathLike[str], *, repo_id: str | None = None) -> Path:
    """Writes the card of the run in `output_dir` as its README.md, private or not.

    Args:
      output_dir: the run's folder; its trajectory may not be there yet.
      repo_id: Hub id for the card's examples.

    Returns:
      The card's path.

    Raises:
      FileNotFoundError: there is no privacy report; says what makes it.
      ValueError: the report disagrees with the trajectory, where there is one.
    """
    folder = Path(output_dir)
    report = _read_report(folder)
    has_trajectory = (folder / TRAJECTORY_FILE).exists()
    trajectory = _read_trajectory(folder, report) if has_trajectory else None
    _write_card(folder, report, trajectory, repo_id)
    return folder / CARD_FILE


def build_hub_folder(
    output_dir: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    allow_not_private: bool = False,
    repo_id: str | None = None,
) -> Path:
    """Makes `folder` hold exactly what may be shipped of the run in `output_dir`.

    Guarantee: only files named by `COPIED` and `WRITTEN` are in the folder; no file of `_private/`,
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
    if not report.private and not allow_not_private:
        raise ValueError(
            f"{report.statement} To publish it all the same, pass --allow_not_private "
            "(allow_not_private=True); the card will say so first."
        )
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
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo_id)
    token = None if dry_run else _require_token(token)
    folder = build_hub_folder(
        output_dir,
        Path(output_dir) / FOLDER_NAME,
        allow_not_private=allow_not_private,
        repo_id=repo_id,
    )
    return str(folder) if dry_run else _upload(folder, repo_id, private, token)


def _read_report(source: Path) -> PrivacyReport:
    try:
        return PrivacyReport.load(source / REPORT_FILE)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{source / REPORT_FILE} is missing, so nothing can be said about privacy: "
            "`hf-dpzero train RECIPE` writes it, and so does "
            "`trainer.privacy_report().save(output_dir)`."
        ) from None


def _read_trajectory(source: Path, report: PrivacyReport) -> Trajectory:
    from hf_dpzero.ledger.trajectory import Trajectory

    path = source / TRAJECTORY_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing, so the report cannot be checked: training writes it at its end, "
            "and `Trajectory.load(ledger).to_safetensors(path)` makes it from the run's ledger."
        )
    trajectory = Trajectory.load(path)
    _check_agreement(report, trajectory)
    return trajectory


def _check_agreement(report: PrivacyReport, trajectory: Trajectory) -> None:
    """Recomputes from the public plan and the releases all that the report takes from them."""
    from hf_dpzero.privacy.plan import PrivacyPlan

    header, steps = trajectory.header, trajectory.next_step
    plan = PrivacyPlan.from_dict(header["plan"])
    source = str(header["noise_source"])
    why_not = why_not_private(
        method=plan.mechanism.name,
        epsilon=0.0 if plan.private else math.inf,
        noise_source=source,
        log_private_diagnostics=bool(header["log_private_diagnostics"]),
        batches_secret=bool(header["sampler_key_is_secret"]) or not needs_secret_batches(plan),
    )
    facts = plan_facts(plan, report.delta, min(steps, plan.steps)) | {
        "steps": steps,
        "direction": header["direction"],
        "log_private_diagnostics": header["log_private_diagnostics"],
        "privacy_unit": header.get("privacy_unit", EXAMPLE),
        "noise_source": noise_name(plan, source),
        "private": why_not is None,
    }
    if isinstance(report.tuning, dict):
        if report.steps != report.planned_steps:
            raise ValueError(
                f"{REPORT_FILE} accounts for tuning over whole runs, and this one stopped after "
                f"{report.steps} of {report.planned_steps} steps; finish it with `hf-dpzero sweep`."
            )
        # A report may state more than this run's own plan costs (trials of other settings, with
        # more discrete noise), never less.
        total = total_epsilon(plan, report.tuning, report.delta)
        facts["epsilon"] = max(report.epsilon, total)
    wrong = [name for name, value in facts.items() if not _same(getattr(report, name), value)]
    if wrong:
        stated = ", ".join(f"{name}: {getattr(report, name)} / {facts[name]}" for name in wrong)
        raise ValueError(
            f"{REPORT_FILE} and {TRAJECTORY_FILE} are not of the same run (report / trajectory): "
            f"{stated}. Write the report again from the run that made the weights."
        )


def _same(stated: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(stated, int | float):
        return math.isclose(stated, expected, rel_tol=1e-6)
    return bool(stated == expected)


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
    _write_card(staged, report, trajectory, repo_id)


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


def _write_card(
    folder: Path, report: PrivacyReport, trajectory: Trajectory | None, repo_id: str | None
) -> None:
    """The card of the run whose files `folder` holds, from what of them is public."""
    recipe = public_recipe(_read_text(folder / RECIPE_FILE))
    settings = recipe_settings(recipe)
    adapter, config = _read_json(folder / ADAPTER_FILE), _read_json(folder / "config.json")
    dataset, task = settings.get("dataset_name"), settings.get("task")
    if not dataset or settings.get("train_file"):  # rows of one's own: the task, or its file's name
        dataset = Path(task).stem if task else None
    card = model_card(
        report,
        base_model=(
            settings.get("model_name_or_path")
            or adapter.get("base_model_name_or_path")
            or config.get("_name_or_path")
        ),
        task=task_of(config, adapter, settings.get("prompt")),
        dataset=None if dataset is None else str(dataset),
        metrics=public_results(_read_json(folder / RESULTS_FILE)),
        recipe=recipe,
        peft=bool(adapter),
        trajectory=trajectory,
        repo_id=repo_id,
        model_type=config.get("model_type"),
        plot=(folder / PLOT_FILE).is_file(),
    )
    write_atomically(folder / CARD_FILE, card.content)


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

    api = HfApi(token=token)
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.repo_info(url.repo_id).private:
            raise PermissionError(
                f"{url.repo_id} exists and is public, but a private repository was asked for: make "
                "it private, choose another repo_id, or pass private=False (--no-private)."
            )
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            commit_message="Add model, privacy report and trajectory",
            delete_patterns=list(_STALE),
        )
    except HfHubHTTPError as error:
        raise PermissionError(
            f"The Hub refused {repo_id!r}: {error}. Check that the token may write there; the "
            f"folder stays at {folder}."
        ) from error
    except HTTPError as error:
        raise ConnectionError(
            f"The Hub cannot be reached ({error}); the folder stays at {folder}, push it later."
        ) from error
    return str(url)
