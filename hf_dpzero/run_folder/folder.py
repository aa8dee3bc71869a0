"""The folder of a run: how training starts or resumes in it, its ledger and its report.

A run starts afresh on the base, goes on at a checkpoint, or makes its ledger's releases again on the
base. What lies in the folder must have been made by the ledger that lies there: budget that was spent
and of which the ledger does not know would be spent twice.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils import logging

from hf_dpzero.batches.shapes import forward_passes
from hf_dpzero.ledger.digests import checksums, digest_model, state_digest
from hf_dpzero.ledger.log_file import LedgerError, split_header
from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME, Trajectory
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.collectives import RankError, compare
from hf_dpzero.parallel.fsdp import on_first_of
from hf_dpzero.parallel.mesh import mesh_words
from hf_dpzero.perturbation.directions import new_key
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting import budget_file
from hf_dpzero.reporting.hub import FOLDER_NAME
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport, versions
from hf_dpzero.reporting.provenance import check_extended, header_entries, worst_tuning
from hf_dpzero.run import Run
from hf_dpzero.run_folder.base_model import (
    Comparison,
    check_start,
    digest_frozen,
)
from hf_dpzero.run_folder.checkpoints import (
    STATE_NAME,
    complete_checkpoints,
    file_digest,
    load_state,
    read_state,
    way_out,
)
from hf_dpzero.run_folder.earlier import refuse_interrupted, refuse_own_base, set_aside
from hf_dpzero.run_folder.initial_values import write_initial_values
from hf_dpzero.run_folder.keys import seeded_key

if TYPE_CHECKING:
    from hf_dpzero.settings.config import DPZeroConfig

logger = logging.get_logger(__name__)


class RunState(NamedTuple):
    """What a run goes on with.

    Attributes:
      trajectory: its ledger, held for this run.
      method_state: of the checkpoint, for the training method; None on base weights.
      started_from: `state_digest` of the base weights; "" where a checkpoint's weights are loaded later.
    """

    trajectory: Trajectory
    method_state: Mapping[str, Any] | None
    started_from: str


def checkpoint_of(output_dir: Path, resume: str | bool | None) -> str | None:
    """Returns the checkpoint that `resume_from_checkpoint` means.

    Args:
      output_dir: of the run.
      resume: as `train` takes it; True means the last checkpoint that was written to its end.

    Returns:
      Its folder; None for a run that starts, and where only a ledger is left to resume from.

    Raises:
      ValueError: no such folder, or there is neither a checkpoint nor a ledger.
    """
    if resume is not True:
        if resume and not (isinstance(resume, (str, os.PathLike)) and Path(resume).is_dir()):
            raise ValueError(
                f"Can't find a valid checkpoint at {resume}: resume_from_checkpoint is a checkpoint's "
                "folder, or True for the last one in output_dir."
            )
        return resume or None
    if complete := complete_checkpoints(output_dir):
        return str(complete[-1])
    if not (output_dir / LEDGER_NAME).is_file():
        raise ValueError(
            f"No valid checkpoint found in output directory ({output_dir}), and no {LEDGER_NAME} to "
            "resume from: a run that was killed before it had a ledger released nothing; start it "
            "without resume_from_checkpoint."
        )
    return None


def keep_batch_size(args: DPZeroConfig) -> None:
    """Puts back B of the ledger where it was made for another number of processes than these.

    Args:
      args: of a run that resumes; changed where gradient accumulation made its expected_batch_size.
    """
    path = Path(str(args.output_dir)) / LEDGER_NAME
    if not args.accumulated_rows or not path.is_file():
        return
    header, _ = split_header(path.read_bytes(), path)
    began = PrivacyPlan.from_dict(header["plan"]).sampler.expected_batch_size
    if began != args.expected_batch_size and began % args.accumulated_rows == 0:
        logger.warning_once(
            f"expected_batch_size stays {began:g}, as this run began, on "
            f"{began / args.accumulated_rows:g} processes."
        )
        args.expected_batch_size = began


def ledger_header(run: Run) -> dict[str, Any]:
    """Returns the ledger's header: everything public that the releases depend on."""
    args, plan = run.args, run.plan
    trainable = [n for n, p in run.model.named_parameters() if p.requires_grad]
    decayed = run.decayed() if args.weight_decay else []
    header = {
        **args.direction_settings(),
        "weight_decay": args.weight_decay,
        "trainable": trainable,
        "decayed": sorted(set(decayed) & set(trainable)),
        "replayable": plan.mechanism.replayable,
        "num_values": plan.values_per_release,
        "plan": plan.to_dict(),
        "learning_rate": run.rate_said if "learning_rate" in run.chosen and run.rate_said else None,
        "target_epsilon": args.target_epsilon if plan.private else None,
        "target_delta": run.delta,
        "tuning": args.tuning,
        "noise_source": run.noise.stated_name,
        "privacy_unit": args.privacy_unit,
        "sampler_key_is_secret": args.testing.sampler_key is None and not args.not_private,
        "log_private_diagnostics": args.testing.log_private_diagnostics,
        "versions": versions(),
    }
    if args.extends_run is not None:
        header["extends"] = header_entries(args.extends_run)
        header["tuning"] = worst_tuning(args.tuning, header["extends"])
    if (texts := getattr(getattr(run.model, "config", None), "public_texts", None)) is not None:
        header["public_texts"] = texts
    if args.testing.direction_key is not None:
        header["direction_key"] = f"{args.testing.direction_key:032x}"
    return header


def check_folder(run: Run, checkpoint: str | None, resumes: bool) -> None:
    """Refuses what lies in a run's folder, on rank 0 for all, before the model is tried.

    Raises:
      LedgerError: the ledger is missing, damaged or of another run, or a run there was interrupted; or
        something was made by releases that the ledger does not hold; or budget_file lacks its entry.
      ValueError: budget_file has not enough left for a run that starts.
    """
    folder = run.output_dir
    path = folder / LEDGER_NAME

    def on_main() -> None:
        if not resumes:
            refuse_interrupted(folder)
            refuse_own_base(run)
            refuse_lost_releases(folder, Trajectory.load(path) if path.exists() else None)
            _check_budget(run, None)
            return
        if not path.exists():
            own = folder if checkpoint is None else Path(checkpoint).resolve().parent
            advice = "put it back there, or start afresh in another output_dir."
            if (own / LEDGER_NAME).exists():
                advice = f"that of {checkpoint} is in {own}: set output_dir to it to go on with it."
            raise LedgerError(
                f"{path} is missing, and without it nobody knows how much budget was spent: {advice}"
            )
        header = ledger_header(run)
        for name in ("trainable", "decayed"):  # not chosen yet
            del header[name]
        with contextlib.closing(Trajectory.open(path, header)) as ledger:
            refuse_lost_releases(folder, ledger)
            _check_budget(run, ledger.header)

    collectives.on_main(on_main, lambda: None)


def _check_budget(run: Run, begun: Mapping[str, Any] | None) -> None:
    """Refuses a run that its budget file cannot pay, or did not pay where it began (its header)."""
    args = run.args
    if args.budget_file is None:
        return
    budget = budget_file.read(args.budget_file)
    folder = run.output_dir if begun is not None else args.extends_run
    if folder is not None:
        header = begun or Trajectory.load(Path(folder) / LEDGER_NAME).header
        budget.check_holds(header.get("budget", {}).get("entry", ""), f"the run in {folder}")
    if begun is None:
        budget.epsilon_with(_charge(run))


def _charge(run: Run) -> budget_file.Charge:
    """What a budget file is charged for a run: all planned steps; refuses one that nothing bounds."""
    report = report_of(run)
    if not report.private:
        raise ValueError(
            f"budget_file={run.args.budget_file!r}: {report.statement} No budget pays for that: leave "
            "budget_file out on rows that are public, or train privately."
        )
    return budget_file.Charge(
        what="train",
        name=run.output_dir.absolute().name,
        privacy_unit=run.args.privacy_unit,
        plan=replace(run.plan, after=()),  # which have entries of their own
    )


def start_or_resume(
    run: Run, header: dict[str, Any], checkpoint: str | None, resumes: bool
) -> RunState:
    """Opens the ledger of a run, and checks that the model fits it.

    Args:
      run: after the checks before training.
      header: of `ledger_header`, the same on all processes (`checks.processes`).
      checkpoint: of `checkpoint_of`.
      resumes: False for a run that starts.

    Raises:
      ValueError: the model is not a base that the run may start from.
      LedgerError: the ledger is missing, damaged, of another run, there already, or of a run that lost
        what it would go on with; or there is no checkpoint, and its releases cannot be made again on
        this model.
    """
    if not resumes:
        return _start(run, header)
    path = run.output_dir / LEDGER_NAME
    # The first process alone holds the file's lock and writes; the others have a copy in memory.
    ledger = collectives.on_main(
        lambda: Trajectory.open(path, header), lambda: Trajectory.load(path)
    )
    try:
        # Processes on several machines may see other disks under one path.
        compare({"releases": ledger.digest()})
        check_resumed(run.plan, ledger)
        if checkpoint is not None:
            return RunState(ledger, load_state(checkpoint, ledger), "")
        sums = checksums(run.model.named_parameters())
        _check_replayed(run, ledger, digest_model(run.model, sums))
    except (ValueError, RankError):
        ledger.close()  # others may open it once the user has corrected the settings
        raise
    return RunState(ledger, None, state_digest(run.model, sums))


def _start(run: Run, header: dict[str, Any]) -> RunState:
    """Writes a new ledger: on disk on rank 0, in memory on the others."""
    header["base_weights"], compared = _checked_start(run)
    # On all processes: parts of a parameter are gathered from all of them for its digest.
    sums = checksums(run.model.named_parameters())
    header |= {
        "base_model_digest": digest_model(run.model, sums),
        "frozen_digest": digest_frozen(run.model, sums),
        "earlier_runs": run.earlier_runs,
        "forward_passes": forward_passes(run.shapes),
        "processes": mesh_words(run.mesh, run.sharded),
    }
    folder = run.output_dir
    path = folder / LEDGER_NAME
    if aside := collectives.shared(collectives.on_main(lambda: set_aside(run), dict)):
        header["set_aside"] = aside
    # Directions are public, but two runs must not share them: each draws its own key.
    own = seeded_key(run.args.seed, "directions")[:16].hex() if run.args.not_private else None
    header.setdefault("direction_key", own or f"{new_key():032x}")
    header["direction_key"] = collectives.shared(header["direction_key"])
    if (budget := run.args.budget_file) is not None:
        # Before there is a ledger: a crash in between leaves an entry without a run, and no run without.
        header["budget"] = collectives.shared(
            collectives.on_main(lambda: budget_file.pay(budget, _charge(run)), dict)
        )
    ledger = collectives.on_main(
        lambda: Trajectory.create(path, header), lambda: Trajectory(header)
    )
    _keep_initial_values(run, compared, header["base_model_digest"])
    return RunState(ledger, None, state_digest(run.model, sums))


def _checked_start(run: Run) -> tuple[str, Comparison | None]:
    """Checks the base weights on rank 0, whose finding (and refusal) counts on all."""
    args = run.args
    if args.extends_run is not None:
        if not run.plan.private:
            raise ValueError(
                f"noise_multiplier={args.noise_multiplier} with extends_run={args.extends_run!r}: "
                "nothing bounds what this run would add; give it noise, or target_epsilon."
            )
        ledger = check_extended(args.extends_run, args.privacy_unit, run.plan.after)
        refuse_lost_releases(Path(args.extends_run), ledger)
    return on_first_of(
        run.model,
        lambda: check_start(
            run.model, args.base_is_public, args.extends_run, private=run.plan.private
        ),
    )


def _keep_initial_values(run: Run, compared: Comparison | None, digest: str) -> None:
    """Writes the fresh head's values; a run that a crash kept from it does so when it resumes."""

    def write() -> None:
        if run.plan.mechanism.replayable:
            write_initial_values(run.output_dir, run.model, compared, digest)

    on_first_of(run.model, write)


def check_resumed(plan: PrivacyPlan, ledger: Trajectory) -> None:
    """Refuses to go on with a run whose next step depends on what was in the interrupted process alone.

    Raises:
      LedgerError: steps were taken, and their un-noised sums of losses are lost.
    """
    groups = plan.groups
    hidden = groups is not None and groups.num_values and not groups.joint
    if groups is not None and hidden and 0 < ledger.next_step < plan.steps:
        raise LedgerError(
            f"{ledger.path} holds {ledger.next_step} of {plan.steps} steps, and the interrupted run "
            f"cannot go on: group_robust.weights={groups.name!r} needs un-noised sums of its losses, "
            "which were in its memory alone and must not be written down. Keep its last checkpoint as "
            "it is, or train in another output_dir (extends_run adds up the budgets of two runs that "
            "ended); group_robust.weights='per_step' can be resumed."
        )


def _check_replayed(run: Run, ledger: Trajectory, found: str) -> None:
    """Refuses to replay a ledger where that would not give the interrupted run's weights.

    `found` is the model's digest.
    """
    if ledger.releases and not ledger.header["replayable"]:
        raise LedgerError(
            f"{ledger.path} holds {ledger.next_step} steps of {run.args.method}, which released "
            "vectors that only the weights held, and there is no checkpoint with these: what they spent "
            "is lost. Train in another output_dir (both runs then count, where they are on the same "
            "data), and save checkpoints (save_strategy='steps')."
        )
    if found != ledger.header["base_model_digest"]:
        raise LedgerError(
            f"there is no checkpoint, so the {ledger.next_step} steps of {ledger.path} are replayed on "
            "the base, and this model is not the base that they began with (its digest differs): load "
            "it again, in the same dtype and with the same head and adapters (from the same seed, or by "
            "hf_dpzero.run_folder.initial_values.load_initial_model)."
        )
    _, compared = _checked_start(run)
    _keep_initial_values(run, compared, ledger.header["base_model_digest"])


def discard_unused(trajectory: Trajectory) -> None:
    """Removes the ledger of a run that is refused before its first release: it may start anew."""
    trajectory.close()
    if trajectory.path is not None and not trajectory.releases:
        trajectory.path.unlink()


def report_of(run: Run, in_other_terms: bool = False) -> PrivacyReport:
    """Returns the privacy that a run has spent, in numbers and words; what it began with counts."""
    begun = run.ledger.header if run.ledger else ledger_header(run)
    shipped = run.ledger.shipped_step if run.ledger else None
    return PrivacyReport.from_header(
        {"earlier_runs": run.earlier_runs, **begun},
        steps=run.ledger.next_step if run.ledger else 0,
        delta=run.delta,
        plan=run.plan,
        shipped_step=shipped,
        in_other_terms=in_other_terms,
    )


def refuse_lost_releases(output_dir: Path, ledger: Trajectory | None) -> None:
    """Refuses a folder where something was made by releases that its ledger does not hold.

    Args:
      output_dir: its trajectory, report, checkpoints and Hub folder are compared.
      ledger: None where there is none. A report alone is then no trace of a lost ledger: it may be
        the base model's.

    Raises:
      LedgerError: one of them knows of more steps, or of other releases, or cannot be read.
    """
    checkpoints = sorted(output_dir.glob("checkpoint-*"))
    # A crash may cut any of them short, and a copy of an older ledger be put back: all are asked.
    for folder in (output_dir, output_dir / FOLDER_NAME, *checkpoints):
        written: Mapping[str, str] = {}
        for name in (STATE_NAME, SHIPPING_NAME, REPORT_FILE):
            path = folder / name
            if not path.is_file() or (ledger is None and name == REPORT_FILE):
                continue
            try:
                if name == STATE_NAME:
                    written = read_state(folder)["files"]
                elif name in written and file_digest(path) != written[name]:
                    raise ValueError("not what the run wrote there")
                steps, digest = _releases_of(path)
            except (OSError, ValueError, LookupError, TypeError) as error:
                advice = "restore the file, or remove what a crash cut short."
                if ledger is not None and folder in checkpoints:
                    advice = way_out(folder, ledger)
                raise LedgerError(
                    f"{path} cannot be read ({error}), so it is unknown whether {LEDGER_NAME} holds all "
                    f"that was spent. {advice[0].upper()}{advice[1:]}"
                ) from error
            # Fewer steps are fine (an older checkpoint), if they are the ledger's own first ones.
            same = ledger is not None and digest in (None, ledger.digest(steps))
            if ledger is None or steps > ledger.next_step or not same:
                raise LedgerError(
                    f"{path} was made by {steps} steps that {LEDGER_NAME} does not hold: the ledger "
                    "was removed or rolled back, or is another run's. Restore it, or start afresh in "
                    "another output_dir; what those steps spent stays spent."
                )


def _releases_of(path: Path) -> tuple[int, str | None]:
    """Reads what a file says of the steps that made it: how many, and their digest where it has one."""
    if path.name == SHIPPING_NAME:
        shipped = Trajectory.load(path)
        return shipped.next_step, shipped.digest()
    if path.name == STATE_NAME:
        state = read_state(path.parent)
        return int(state["step"]), str(state["trajectory_digest"])
    return int(json.loads(path.read_text(encoding="utf-8"))["steps"]), None
