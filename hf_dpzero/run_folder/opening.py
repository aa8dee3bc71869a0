"""How a run begins: afresh on the base, at a checkpoint, or by its ledger's releases on the base."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hf_dpzero.batches.shapes import forward_passes
from hf_dpzero.ledger.digests import digest_model, state_digest
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.parallel import distributed
from hf_dpzero.parallel.rank_agreement import check_agreement, compare
from hf_dpzero.parallel.rank_failures import RankError
from hf_dpzero.parallel.sharded_runs import is_split, on_first_of
from hf_dpzero.parallel.split import mesh_words
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FixedBatchesSampler
from hf_dpzero.reporting.extension import check_extended
from hf_dpzero.run_folder import run_files
from hf_dpzero.run_folder.base_model import check_start, digest_frozen
from hf_dpzero.run_folder.checkpoint_state import load_state, whole_checkpoints
from hf_dpzero.run_folder.initial_values import write_initial_values
from hf_dpzero.run_folder.row_order import steady_parts


class Opened(NamedTuple):
    """What a run goes on with.

    Attributes:
      trajectory: its ledger, held for this run.
      method_state: of the checkpoint, for the training method; None on base weights.
      started_from: `state_digest` of the base weights; "" where a checkpoint's weights are loaded later.
    """

    trajectory: Trajectory
    method_state: Mapping[str, Any] | None
    started_from: str


def checkpoint_of(output_dir: str, resume: str | bool | None) -> str | None:
    """The checkpoint that `resume_from_checkpoint` means.

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
                f"resume_from_checkpoint={resume!r} is no folder: give a checkpoint's, or True for the "
                "last one in output_dir."
            )
        return resume or None
    if whole := whole_checkpoints(Path(output_dir)):
        return str(whole[-1])
    if not (Path(output_dir) / LEDGER_NAME).is_file():
        raise ValueError(
            f"{output_dir} has no checkpoint and no {LEDGER_NAME} to resume from: a run that was "
            "killed before it had a ledger released nothing; start it without resume_from_checkpoint."
        )
    return None


def open_run(trainer: Any, checkpoint: str | None, resumes: bool) -> Opened:
    """Opens the ledger of a `DPZeroTrainer`'s run, and checks that the model fits it.

    Args:
      trainer: after the checks before training.
      checkpoint: of `checkpoint_of`.
      resumes: False for a run that starts.

    Returns:
      See `Opened`.

    Raises:
      ValueError: the model is not a base that the run may start from.
      LedgerError: the ledger is missing, damaged, of another run, there already, or of a run that lost
        what it would go on with; or there is no checkpoint, and its releases cannot be made again on
        this model.
    """
    header = run_files.ledger_header(trainer)
    check_agreement(trainer, header)
    return _resume(trainer, header, checkpoint) if resumes else _start(trainer, header)


def _resume(trainer: Any, header: Mapping[str, Any], checkpoint: str | None) -> Opened:
    ledger = run_files.continue_ledger(trainer.output_dir, header, checkpoint)
    try:
        compare({"releases": ledger.digest()})
        check_resumed(trainer.plan, ledger)
        if checkpoint is not None:
            return Opened(ledger, load_state(checkpoint, ledger), "")
        _check_replayed(trainer, ledger)
    except (ValueError, RankError):
        ledger.close()
        raise
    return Opened(ledger, None, state_digest(trainer.model))


def _start(trainer: Any, header: dict[str, Any]) -> Opened:
    model, folder = trainer.model, trainer.output_dir
    header["base_weights"], compared = _checked_start(trainer)
    digest = digest_model(model)
    header["frozen_digest"] = digest_frozen(model)
    header["earlier_runs"] = trainer.earlier_runs
    header["forward_passes"] = forward_passes(trainer.shapes)
    header["processes"] = mesh_words(trainer)
    if isinstance(trainer.plan.sampler, FixedBatchesSampler):
        parts = distributed.shared_from_main(lambda: steady_parts(trainer.train_dataset))
        header |= {} if parts is None else {"row_parts": parts}
    ledger = run_files.start_ledger(folder, header, digest)
    _keep_initial_values(trainer, compared, digest)
    return Opened(ledger, None, state_digest(model))


def _keep_initial_values(trainer: Any, compared: Any, digest: str) -> None:
    def write() -> None:
        if trainer.args.should_save and trainer.plan.mechanism.replayable:
            write_initial_values(trainer.output_dir, trainer.model, compared, digest)

    if is_split(trainer.model):
        on_first_of(trainer.model, write)
    else:
        write()


def _checked_start(trainer: Any) -> Any:
    """`check_start` on rank 0, for all."""
    args = trainer.args
    if args.extends_run is not None:
        if not trainer.plan.private:
            raise ValueError(
                f"noise_multiplier={args.noise_multiplier} with extends_run={args.extends_run!r}: "
                "nothing bounds what this run would add; give it noise, or target_epsilon."
            )
        ledger = check_extended(args.extends_run, args.privacy_unit, trainer.plan.after)
        run_files.refuse_lost_releases(Path(args.extends_run), ledger)
    return on_first_of(
        trainer.model, lambda: check_start(trainer.model, args.base_is_public, args.extends_run)
    )


def _check_replayed(trainer: Any, ledger: Trajectory) -> None:
    """Refuses to replay a ledger where that would not give the interrupted run's weights."""
    if ledger.releases and not ledger.header["replayable"]:
        raise LedgerError(
            f"{ledger.path} holds {ledger.next_step} steps of {trainer.args.method}, which released "
            "vectors that only the weights held, and there is no checkpoint with these: what they spent "
            "is lost. Train in another output_dir (both runs then count, where they are on the same "
            "data), and save checkpoints (save_strategy='steps')."
        )
    if digest_model(trainer.model) != ledger.header["base_model_digest"]:
        raise LedgerError(
            f"there is no checkpoint, so the {ledger.next_step} steps of {ledger.path} are replayed on "
            "the base, and this model is not the base that they began with (its digest differs): load "
            "it again, in the same dtype and with the same head and adapters (from the same seed, or by "
            "hf_dpzero.run_folder.initial_values.load_initial_model)."
        )
    _, compared = _checked_start(trainer)
    _keep_initial_values(trainer, compared, ledger.header["base_model_digest"])


def check_resumed(plan: PrivacyPlan, ledger: Trajectory) -> None:
    """Refuses to go on with a run whose next step depends on what was in the interrupted process alone.

    Args:
      plan: of the run.
      ledger: of the interrupted run.

    Raises:
      LedgerError: steps were taken, and their un-noised sums of losses are lost.
    """
    groups = plan.groups
    hidden = groups is not None and groups.num_values and not groups.joint
    if groups is not None and hidden and 0 < ledger.next_step < plan.steps:
        raise LedgerError(
            f"{ledger.path} holds {ledger.next_step} of {plan.steps} steps, and the interrupted run "
            f"cannot go on: group_robust.weights={groups.name!r} needs un-noised sums of "
            "its losses, which "
            "were in its memory alone and must not be written down. Keep its last checkpoint as it is, "
            "or train in another output_dir (extends_run adds up the budgets of two runs that ended); "
            "group_robust.weights='per_step' can be resumed."
        )
