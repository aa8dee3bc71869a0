"""What a run keeps in its output_dir: the public ledger, the secret sampler key, grid states."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.perturbation.directions import new_key
from hf_dpzero.privacy.sampling import new_sampler_key
from hf_dpzero.reporting.privacy_report import versions
from hf_dpzero.training import distributed

logger = logging.getLogger(__name__)

STATE_NAME = "dpzero_state.json"
SECRET_FOLDER = "_private"  # Trainer's own Hub upload ignores names that start with "_"
KEY_NAME = "sampler_key"


def ledger_header(trainer: Any) -> dict[str, Any]:
    """The ledger's header: everything public that the releases depend on."""
    trainable = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    decayed = trainer.get_decay_parameter_names(trainer.model) if trainer.args.weight_decay else []
    header = {
        **trainer.args.direction_settings(),
        "weight_decay": trainer.args.weight_decay,
        "trainable": trainable,
        "decayed": sorted(set(decayed) & set(trainable)),
        "replayable": trainer.plan.mechanism.replayable,
        "num_values": trainer.plan.mechanism.values_per_release,
        "plan": trainer.plan.to_dict(),
        "target_delta": trainer.delta,
        "noise_source": trainer.noise.name,
        "privacy_unit": trainer.args.privacy_unit,
        "sampler_key_is_secret": trainer.args.sampler_key is None,
        "log_private_diagnostics": trainer.args.log_private_diagnostics,
        "versions": versions(),
    }
    if trainer.args.direction_key is not None:
        header["direction_key"] = f"{trainer.args.direction_key:032x}"
    return header


def start_ledger(output_dir: str, header: dict[str, Any], base_digest: str) -> Trajectory:
    """A new ledger: on disk on rank 0, in memory on the others.

    Args:
      output_dir: of the run.
      header: of `ledger_header`; a direction key is drawn if it has none.
      base_digest: `digest_model` before training.

    Returns:
      An empty trajectory.

    Raises:
      LedgerError: the folder holds a ledger already.
    """
    path = Path(output_dir) / LEDGER_NAME
    if not path.exists():  # one that exists is refused below, for what it is
        _refuse_orphaned_checkpoints(Path(output_dir), -1)
    key = header.get("direction_key") or f"{new_key():032x}"
    header = {**header, "base_model_digest": base_digest, "direction_key": distributed.shared(key)}
    return distributed.on_main(lambda: Trajectory.create(path, header), lambda: Trajectory(header))


def continue_ledger(output_dir: str, header: Mapping[str, Any]) -> Trajectory:
    """The ledger of an interrupted run, checked against this run's header.

    Args:
      output_dir: of the run.
      header: of `ledger_header`.

    Returns:
      The trajectory so far.

    Raises:
      LedgerError: it is missing, corrupt or of another plan.
    """
    path = Path(output_dir) / LEDGER_NAME
    if not path.exists():
        raise LedgerError(
            f"{path} is missing: without the ledger it is unknown how much budget was spent. Copy "
            "it beside the checkpoints, or start afresh in another output_dir."
        )
    trajectory = distributed.on_main(
        lambda: Trajectory.open(path, header), lambda: Trajectory.load(path)
    )
    _refuse_orphaned_checkpoints(Path(output_dir), trajectory.next_step)
    return trajectory


def _refuse_orphaned_checkpoints(output_dir: Path, paid: int) -> None:
    """Refuses a folder whose checkpoints know of more steps than its ledger (`paid`)."""
    for path in sorted(output_dir.glob(f"checkpoint-*/{STATE_NAME}")):
        if json.loads(path.read_text())["step"] > paid:
            raise LedgerError(
                f"{path.parent} was made by steps that {LEDGER_NAME} does not hold: the ledger was "
                "removed or rolled back. Restore it, or start afresh in another output_dir; what "
                "those steps spent stays spent."
            )


def new_secret(output_dir: str, given: str | None = None) -> bytes:
    """A sampler key, written with mode 0600.

    Args:
      output_dir: of the run.
      given: 64 hex digits; None draws a fresh key.

    Returns:
      32 secret bytes, the same on all ranks.
    """
    key = distributed.shared(bytes.fromhex(given) if given else new_sampler_key())

    def write() -> None:
        folder = Path(output_dir) / SECRET_FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / KEY_NAME).unlink(missing_ok=True)  # it may have a wider mode, or be a link
        descriptor = os.open(folder / KEY_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(key.hex())

    distributed.on_main(write, lambda: None)
    return key


def old_secret(output_dir: str, given: str | None = None) -> bytes:
    """The sampler key of an interrupted run; a fresh one, with a warning, if it is gone.

    Either is sound: steps in the ledger are never sampled again, and the remaining ones are
    sampled with a secret key.

    Args:
      output_dir: of the run.
      given: as for `new_secret`; used only if the file is gone.

    Returns:
      32 secret bytes.
    """
    path = Path(output_dir) / SECRET_FOLDER / KEY_NAME
    key = distributed.shared_from_main(lambda: path.read_text() if path.exists() else None)
    if key is not None:
        return bytes.fromhex(key)
    logger.warning("%s is gone: the remaining steps are sampled with a fresh secret key.", path)
    return new_secret(output_dir, given)


def save_state(
    checkpoint: Path, step: int, space: Mapping[str, Any], trajectory: Trajectory
) -> None:
    """Writes a checkpoint's public grid state, tied to the log that made it.

    Args:
      checkpoint: an existing folder.
      step: steps taken.
      space: `state_dict` of the training method.
      trajectory: its first `step` releases are digested.
    """
    state = {"step": step, "space": dict(space), "trajectory_digest": trajectory.digest(step)}
    (checkpoint / STATE_NAME).write_text(json.dumps(state))


def load_state(checkpoint: str, trajectory: Trajectory) -> dict[str, Any]:
    """The grid state of a checkpoint of this run.

    Args:
      checkpoint: its folder.
      trajectory: the run's ledger.

    Returns:
      What `save_state` wrote as `space`.

    Raises:
      ValueError: the checkpoint was not written by DPZeroTrainer.
      LedgerError: it was made by other releases than the ledger's first steps.
    """
    path = Path(checkpoint) / STATE_NAME
    if not path.exists():
        raise ValueError(f"{checkpoint} was not written by DPZeroTrainer: it has no {STATE_NAME}.")
    state = json.loads(path.read_text())
    if state["trajectory_digest"] != trajectory.digest(state["step"]):
        raise LedgerError(
            f"{checkpoint} was made by another run, or by releases that {LEDGER_NAME} does not hold: "
            "resume from a checkpoint of this ledger, or start afresh in another output_dir."
        )
    return dict(state["space"])
