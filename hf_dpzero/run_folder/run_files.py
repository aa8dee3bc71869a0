"""What a run keeps in its output_dir, the public ledger and grid states, and the key it never keeps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME, Trajectory
from hf_dpzero.parallel import distributed
from hf_dpzero.perturbation.directions import new_key
from hf_dpzero.privacy.sampling import new_sampler_key
from hf_dpzero.reporting.extension import header_entries, worst_tuning
from hf_dpzero.reporting.hub import FOLDER_NAME, INITIAL_VALUES_FILE
from hf_dpzero.reporting.plots import PLOT_FILE
from hf_dpzero.reporting.privacy_report import REPORT_FILE, versions
from hf_dpzero.reporting.redaction import RECIPE_FILE
from hf_dpzero.run_folder.checkpoint_state import STATE_NAME, file_digest, read_state, way_out

logger = logging.get_logger(__name__)


def ledger_header(trainer: Any) -> dict[str, Any]:
    """The ledger's header: everything public that the releases depend on."""
    trainable = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    decayed = trainer.get_decay_parameter_names(trainer.model) if trainer.args.weight_decay else []
    header = {
        **trainer.resolved_args.direction_settings(),
        "weight_decay": trainer.args.weight_decay,
        "trainable": trainable,
        "decayed": sorted(set(decayed) & set(trainable)),
        "replayable": trainer.plan.mechanism.replayable,
        "num_values": trainer.plan.values_per_release,
        "plan": trainer.plan.to_dict(),
        "target_epsilon": trainer.args.target_epsilon if trainer.plan.private else None,
        "target_delta": trainer.delta,
        "tuning": trainer.args.tuning,
        "noise_source": trainer.noise.name,
        "privacy_unit": trainer.args.privacy_unit,
        "sampler_key_is_secret": trainer.args.testing.sampler_key is None,
        "log_private_diagnostics": trainer.args.testing.log_private_diagnostics,
        "versions": versions(),
    }
    if trainer.args.extends_run is not None:
        header["extends"] = header_entries(trainer.args.extends_run)
        header["tuning"] = worst_tuning(trainer.args.tuning, header["extends"])
    if trainer.args.testing.direction_key is not None:
        header["direction_key"] = f"{trainer.args.testing.direction_key:032x}"
    return header


def start_ledger(output_dir: str, header: dict[str, Any], base_digest: str) -> Trajectory:
    """A new ledger: on disk on rank 0, in memory on the others. Another run's results are moved aside.

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
        refuse_lost_releases(Path(output_dir), None)
        distributed.on_main(lambda: _set_aside(Path(output_dir)), lambda: None)
    key = header.get("direction_key") or f"{new_key():032x}"
    header = {**header, "base_model_digest": base_digest, "direction_key": distributed.shared(key)}
    return distributed.on_main(lambda: Trajectory.create(path, header), lambda: Trajectory(header))


def discard_unused(trajectory: Trajectory) -> None:
    """Removes the ledger of a run that is refused before its first release: it may start anew."""
    trajectory.close()
    if trajectory.path is not None and not trajectory.releases:
        trajectory.path.unlink()


def continue_ledger(
    output_dir: str, header: Mapping[str, Any], checkpoint: str | None = None
) -> Trajectory:
    """The ledger of an interrupted run, checked against this run's header.

    Args:
      output_dir: of the run.
      header: of `ledger_header`.
      checkpoint: that it goes on from, to say where its ledger is.

    Returns:
      The trajectory so far.

    Raises:
      LedgerError: it is missing, corrupt, of another plan, or holds fewer or other releases than
        what lies beside it.
    """
    path = Path(output_dir) / LEDGER_NAME
    if not path.exists():
        run = path.parent if checkpoint is None else Path(checkpoint).resolve().parent
        advice = "put it back there, or start afresh in another output_dir."
        if (run / LEDGER_NAME).exists():
            advice = (
                f"that of {checkpoint} is in {run}: set output_dir to that folder to go on with it."
            )
        raise LedgerError(
            f"{path} is missing, and without it nobody knows how much budget was spent: {advice}"
        )
    trajectory = distributed.on_main(
        lambda: Trajectory.open(path, header), lambda: Trajectory.load(path)
    )
    try:
        refuse_lost_releases(Path(output_dir), trajectory)
    except LedgerError:
        trajectory.close()
        raise
    return trajectory


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
    for folder in (output_dir, output_dir / FOLDER_NAME, *checkpoints):
        written: Mapping[str, str] = {}
        for name, read in _RECORDS.items():
            path = folder / name
            if not path.is_file() or (ledger is None and name == REPORT_FILE):
                continue
            try:
                if name == STATE_NAME:
                    written = read_state(folder)["files"]
                elif name in written and file_digest(path) != written[name]:
                    raise ValueError("not what the run wrote there")
                steps, digest = read(path)
            except (OSError, ValueError, LookupError, TypeError) as error:
                advice = "restore the file, or remove what a crash cut short."
                if ledger is not None and folder in checkpoints:
                    advice = way_out(folder, ledger)
                raise LedgerError(
                    f"{path} cannot be read ({error}), so it is unknown whether {LEDGER_NAME} holds all "
                    f"that was spent. {advice[0].upper()}{advice[1:]}"
                ) from error
            same = ledger is not None and digest in (None, ledger.digest(steps))
            if ledger is None or steps > ledger.next_step or not same:
                raise LedgerError(
                    f"{path} was made by {steps} steps that {LEDGER_NAME} does not hold: the ledger "
                    "was removed or rolled back, or is another run's. Restore it, or start afresh in "
                    "another output_dir; what those steps spent stays spent."
                )


def _set_aside(output_dir: Path) -> None:
    """Renames what another run left in the folder and this run's card and Hub folder would show."""
    patterns = ("*_results.json", RECIPE_FILE, PLOT_FILE, INITIAL_VALUES_FILE)
    found = [path for pattern in patterns for path in sorted(output_dir.glob(pattern))]
    for path in found:
        names = (f"{path.name}.before{number or ''}" for number in itertools.count())
        path.rename(next(path.with_name(n) for n in names if not path.with_name(n).exists()))
    if found:
        logger.warning(
            "%s of another run in %s moved aside (to *.before): they are not this run's to ship.",
            ", ".join(path.name for path in found),
            output_dir,
        )


def _of_state(path: Path) -> tuple[int, str | None]:
    state = read_state(path.parent)
    return int(state["step"]), str(state["trajectory_digest"])


def _of_trajectory(path: Path) -> tuple[int, str | None]:
    shipped = Trajectory.load(path)
    return shipped.next_step, shipped.digest()


def _of_report(path: Path) -> tuple[int, str | None]:
    return int(json.loads(path.read_text(encoding="utf-8"))["steps"]), None


_RECORDS: dict[str, Callable[[Path], tuple[int, str | None]]] = {
    STATE_NAME: _of_state,
    SHIPPING_NAME: _of_trajectory,
    REPORT_FILE: _of_report,
}
"""Files that say how many steps were taken: name -> (steps, digest of their releases or None)."""


def draw_sampler_key(given: str | None = None) -> bytes:
    """The secret that one call of `train` draws its batches by; a resumed run has another.

    It is never stored: whoever copies the run's folder, or goes back to an older copy, could
    otherwise release the same batches a second time.

    Args:
      given: 64 hex digits, for tests (the report then says NOT PRIVATE); None draws a fresh key.

    Returns:
      32 bytes, the same on all ranks.
    """
    return distributed.shared_from_main(
        lambda: bytes.fromhex(given) if given else new_sampler_key()
    )
