"""What leaves the machine: the model card, the folder that may be shipped, and the push.

`build_hub_folder` copies by an allow list. Whatever it does not name (the `_private` folder,
checkpoints, optimizer and generator states, pickled arguments, logs) never reaches the folder, and
recipe and results are reduced to what is public (`public_recipe`, `public_results`). A run is not
shipped if its report is
missing, disagrees with the trajectory, was written for other weights, or says NOT PRIVATE and that was
not allowed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.reporting.model_card import PLOT_FILE, model_card, task_of
from hf_dpzero.reporting.page import PAGE_FILE, report_page
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.private_evaluations import EVALUATIONS_FILE, evaluations_in
from hf_dpzero.reporting.public import RECIPE_FILE, public_recipe, public_results, recipe_settings
from hf_dpzero.reporting.verification import TRAJECTORY_FILE, agreeing, check_weights
from hf_dpzero.reporting.weights import SHARDS, WEIGHTS, weight_files

if TYPE_CHECKING:
    from hf_dpzero.ledger.trajectory import Trajectory

logger = logging.getLogger(__name__)

CARD_FILE, RESULTS_FILE = "README.md", "all_results.json"
ADAPTER_FILE = "adapter_config.json"
INITIAL_VALUES_FILE = "initial_values.safetensors"
FOLDER_NAME = "hub"

_INDEX, _TRAINER_STATE = "model.safetensors.index.json", "trainer_state.json"
_MESSAGE = "Add model, privacy report and trajectory"

COPIED = (
    *WEIGHTS,
    _INDEX,
    SHARDS,
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
    TRAJECTORY_FILE,
    INITIAL_VALUES_FILE,
    EVALUATIONS_FILE,
    PLOT_FILE,
)
"""Names, or patterns of names, at the top of `output_dir` that are copied unchanged."""

WRITTEN = (CARD_FILE, RESULTS_FILE, RECIPE_FILE, REPORT_FILE, PAGE_FILE)
"""Files that are written anew, from what is public and, in words, from the numbers."""


def write_model_card(output_dir: str | os.PathLike[str], *, repo_id: str | None = None) -> Path:
    """Writes the card of the run in `output_dir` as its README.md, private or not, and `report.html`.

    Words of the report that do not follow from its numbers are written anew, with a warning.

    Raises:
      FileNotFoundError: report or trajectory are missing; says what makes them.
      ValueError: the report disagrees with the trajectory, or with the weights where there are any.
    """
    folder = Path(output_dir)
    report, trajectory = _read_run(folder)
    if weight_files(folder):
        check_weights(report, folder)
    report.save(folder)
    _write_card(folder, report, trajectory, repo_id)
    write_page(folder, report, trajectory)
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
    no checkpoint, no optimizer or generator state. The weights are those that the report was written
    for, and its words follow from its numbers. An older folder made by this function is
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
      ValueError: the report says NOT PRIVATE, or disagrees with the trajectory or the weights, or
        `folder` holds other files.
    """
    source, target = Path(output_dir), Path(folder)
    report, trajectory = _read_run(source)
    if not report.private and not allow_not_private:
        raise ValueError(
            f"{report.statement} To publish it all the same, pass --allow_not_private "
            "(allow_not_private=True); the card will say so first."
        )
    check_files(source)
    check_weights(report, source)
    _check_target(source, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: on one file system the last step is a single rename.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".hub-") as temporary:
        staged = Path(temporary) / FOLDER_NAME
        staged.mkdir()
        _fill(source, staged, report, trajectory, repo_id)
        # Only now, when the new folder is whole: a refusal above leaves the older one alone.
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
    commit_message: str | None = None,
    revision: str | None = None,
) -> str:
    """Ships the run in `output_dir` to the Hub; leaves the exact folder at `output_dir/hub`.

    All other files of the repository are deleted in the same commit, so that nothing of an earlier push
    lies beside this run's report. Its history still holds them.

    Args:
      output_dir: a finished run.
      repo_id: "name" or "namespace/name".
      private: visibility of the repository. An existing public one is refused if this is True.
      dry_run: only make the folder; no network.
      token: Hub token; None takes the one that `hf auth login` or HF_TOKEN left.
      allow_not_private: ship a run whose report says NOT PRIVATE.
      commit_message: default says what the files are.
      revision: an existing branch; default the main one.

    Returns:
      The repository's address; with `dry_run` the folder's path.

    Raises:
      ValueError: a bad `repo_id`, or a reason of `build_hub_folder`.
      FileNotFoundError: see `build_hub_folder`.
      PermissionError: no token, a token that may not write, or a public repository.
      ConnectionError: offline mode, or the Hub cannot be reached.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo_id)  # before minutes go into digests of weights
    if not dry_run and constants.HF_HUB_OFFLINE:
        raise ConnectionError(
            "HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or make the "
            "folder by `hf-dpzero push FOLDER --dry_run` and upload it later."
        )
    token = None if dry_run else token or get_token()
    if not dry_run and not token:
        raise PermissionError(
            "There is no Hub token: run `hf auth login`, set HF_TOKEN, or pass token=...; "
            "`hf-dpzero push FOLDER --dry_run` needs none."
        )
    folder = build_hub_folder(
        output_dir,
        Path(output_dir) / FOLDER_NAME,
        allow_not_private=allow_not_private,
        repo_id=repo_id,
    )
    if token is None:
        return str(folder)
    commit = {"commit_message": commit_message or _MESSAGE, "revision": revision}
    return _upload(folder, repo_id, private, token, commit)


def _read_run(source: Path) -> tuple[PrivacyReport, Trajectory]:
    """Reads report and trajectory, compares them, and derives the report's words from its numbers."""
    from hf_dpzero.ledger.trajectory import LEDGER_NAME

    for name in (REPORT_FILE, RESULTS_FILE, RECIPE_FILE):  # written anew from what they say
        if os.path.lexists(source / name):
            _check_plain(source / name)
    unsaved = [name for name in (REPORT_FILE, TRAJECTORY_FILE) if not (source / name).exists()]
    if unsaved and (source / LEDGER_NAME).exists():
        raise FileNotFoundError(
            f"{source / unsaved[0]} is missing: the run there ended before its model was saved. Resume "
            "it first (--resume_from_checkpoint, or train(resume_from_checkpoint=True) and "
            "save_model()), or push one of its checkpoints."
        )
    if not (source / REPORT_FILE).exists():
        raise FileNotFoundError(
            f"{source / REPORT_FILE} is missing, so nothing can be said about privacy: "
            "`hf-dpzero train RECIPE` writes it, and so does "
            "`trainer.privacy_report().save(output_dir)`."
        )
    if not (source / TRAJECTORY_FILE).exists():
        raise FileNotFoundError(
            f"{source / TRAJECTORY_FILE} is missing, so the report cannot be checked: training writes "
            "it at its end, and `Trajectory.load(ledger).to_safetensors(path)` makes it from the run's "
            "ledger."
        )
    stated = PrivacyReport.load(source / REPORT_FILE)
    report, trajectory = agreeing(stated, source)
    if report != stated:
        logger.warning(
            "%s did not say in words what its numbers mean: it was edited, or written by another "
            "version of this package. Its statement and caveats are written anew from the numbers.",
            source / REPORT_FILE,
        )
    return report, trajectory


def check_files(source: Path) -> None:
    """Refuses a folder without weights, and an index of shards that `digest_weights` does not cover."""
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
        raise ValueError(f"{_INDEX} names {strange[0]!r}, which is no shard's name.")


def _check_target(source: Path, target: Path) -> None:
    """Refuses a target that holds anything but an older hub folder, which is replaced."""
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
    for path in sorted(source.iterdir()):
        if not _named(path.name, COPIED):
            continue
        _check_plain(path)
        shutil.copyfile(path, staged / path.name)
    report.save(staged)
    # A base that is a local folder goes by its name, as in the recipe.
    for file in (ADAPTER_FILE, "config.json"):
        if (shown := _without_folders(given := _read_json(staged / file))) != given:
            (staged / file).write_text(json.dumps(shown, indent=2) + "\n", encoding="utf-8")
    metrics = public_results(_read_json(source / RESULTS_FILE))
    if metrics:
        text = json.dumps(metrics, indent=4, allow_nan=False)
        (staged / RESULTS_FILE).write_text(text + "\n", encoding="utf-8")
    recipe = public_recipe(_read_text(source / RECIPE_FILE))
    if recipe:
        (staged / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    _write_card(staged, report, trajectory, repo_id)
    write_page(staged, report, trajectory, _history(source))


def _without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, and those in it of parts, in which a local base has its folder's name alone."""

    def shown(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _without_folders(value)
        if not (isinstance(value, str) and value and key.endswith("_name_or_path")):
            return value
        return Path(value).name if Path(value).is_absolute() or Path(value).is_dir() else value

    return {key: shown(key, value) for key, value in config.items()}


def _check_plain(path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        raise ValueError(
            f"{path} is a link or a folder, not a plain file: it could point at something "
            "private. Replace it by the file itself."
        )


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(_read_text(path) or "{}"))


def _write_card(
    folder: Path, report: PrivacyReport, trajectory: Trajectory, repo_id: str | None
) -> None:
    """Writes the card of the run whose files `folder` holds, from what of them is public."""
    recipe = public_recipe(_read_text(folder / RECIPE_FILE))
    settings = recipe_settings(recipe)
    adapter, config = _read_json(folder / ADAPTER_FILE), _read_json(folder / "config.json")
    base_of_replay = replay_base(folder, trajectory)
    dataset, task = settings.get("dataset_name"), settings.get("task")
    if not dataset or settings.get("train_file"):  # rows of one's own: the task, or its file's name
        dataset = Path(task).stem if task else None
    card = model_card(
        report,
        base_model=(
            settings.get("model_name_or_path")
            or adapter.get("base_model_name_or_path")
            or config.get("_name_or_path")
            or base_of_replay
        ),
        task=task_of(config, adapter, settings.get("prompt")),
        dataset=None if dataset is None else str(dataset),
        metrics=public_results(_read_json(folder / RESULTS_FILE)),
        recipe=recipe,
        peft=bool(adapter),
        trajectory=trajectory if recipe or base_of_replay else None,
        repo_id=repo_id,
        model_type=config.get("model_type"),
        template=settings.get("template"),
        plot=(folder / PLOT_FILE).is_file(),
        evaluations=evaluations_in(folder),
    )
    write_atomically(folder / CARD_FILE, card.content)


def write_page(
    folder: Path,
    report: PrivacyReport,
    trajectory: Trajectory,
    history: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Writes `report.html` of the run whose files `folder` holds.

    `history` is the trainer's log; None takes the one that `save_state` left in the folder.
    """
    history = _history(folder) if history is None else history
    write_atomically(folder / PAGE_FILE, page_of(folder, report, trajectory, history))


def page_of(
    folder: Path,
    report: PrivacyReport,
    trajectory: Trajectory,
    history: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page of the run whose files `folder` holds, from what of them is public."""
    return report_page(
        report,
        trajectory,
        history=history,
        results=_read_json(folder / RESULTS_FILE),
        evaluations=evaluations_in(folder),
        recipe=public_recipe(_read_text(folder / RECIPE_FILE)),
    )


def _history(folder: Path) -> Sequence[Mapping[str, Any]]:
    """The trainer's log in `folder`; nothing where there is no whole one: a curve is an extra."""
    path = folder / _TRAINER_STATE
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return () if path.is_symlink() else list(_read_json(path)["log_history"])
    return ()


def replay_base(folder: Path, trajectory: Trajectory) -> str | None:
    """The base model that initial values beside a trajectory go with; None without those of its run."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / INITIAL_VALUES_FILE, framework="pt") as file:
            values = file.metadata() or {}
    except (OSError, SafetensorError):
        return None
    own = values.get("base_model_digest") == trajectory.header["base_model_digest"]
    return values.get("base_model") if own else None


def _upload(
    folder: Path, repo_id: str, private: bool, token: str | None, commit: Mapping[str, Any]
) -> str:
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
            delete_patterns=["*"],  # of what is there, but for .gitattributes
            **commit,
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
