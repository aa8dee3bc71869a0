"""Secret keys of a run on fixed batches: the order of its rows, and its correlated noise.

A resumed run needs both again: with another order a row would take part twice in an epoch, and with
other noise nothing cancels. So they are kept while the run is not finished, in a folder that nothing
ships and that no checkpoint holds, readable by its owner alone. A run that has taken all its steps
removes them.

Places belong to row numbers, so the rows must be the same in the same order too. A digest of them, which
needs the secret key of the order, is kept beside it and compared: of whole rows, or, where each access
draws them anew, of what stays (the header's `row_parts`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from hf_dpzero.ledger.log_file import LedgerError, write_for_owner
from hf_dpzero.parallel import distributed
from hf_dpzero.privacy.correlated.correlation import sensitivity
from hf_dpzero.privacy.correlated.stream import CorrelatedNoise, KeyedNoise, new_noise_key
from hf_dpzero.privacy.noise import InsecureSeededNoise, NoiseSource, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FixedBatchesSampler, new_sampler_key
from hf_dpzero.run_folder import run_files
from hf_dpzero.run_folder.row_order import digest_of_rows

logger = logging.get_logger(__name__)

FOLDER, FILE = "_private", "noise_keys.json"

UPLOADS = {
    "CometCallback": ("COMET_LOG_ASSETS", ("TRUE",)),
    "DagsHubCallback": ("HF_DAGSHUB_LOG_ARTIFACTS", ("1", "ON", "YES", "TRUE")),
    "DVCLiveCallback": ("HF_DVCLIVE_LOG_MODEL", ("ALL",)),
}
"""Tracking services that take the whole of output_dir: the variable that says so, and its values."""


_NO_ORDER = (
    "the rows of train_dataset are drawn anew at each access (augmentation?), and what stays of them "
    "does not tell their order. In another one a row could take part twice in an epoch of fixed "
    "batches, which epsilon does not cover. For a run that can be resumed, give rows an id column (of "
    "the row, not its number), seed the split, draw augmentation from the row's number, or use "
    "sampling='poisson', which needs no order."
)


class RunKeys(NamedTuple):
    """The secrets of one call of `train`.

    Attributes:
      sampler: 32 bytes; fixed batches keep theirs for the whole run.
      noise: (first step, key) of each start of a run with correlated noise; of use on rank 0 alone.
      file: where they are kept; None where nothing is.
    """

    sampler: bytes
    noise: tuple[tuple[int, bytes], ...] = ()
    file: Path | None = None

    def __repr__(self) -> str:
        return f"RunKeys(file={str(self.file)!r})"  # the keys are secret

    def forget(self) -> None:
        """Removes the file, on rank 0."""
        if self.file is not None and distributed.is_main():
            self.file.unlink(missing_ok=True)


def check_uploads(trainer: Any) -> None:
    """Refuses callbacks that would upload the folder with the keys together with everything else.

    Args:
      trainer: a `DPZeroTrainer`, before training.

    Raises:
      ValueError: names the callback, and what to set.
    """
    if not isinstance(trainer.plan.sampler, FixedBatchesSampler):
        return
    for callback in trainer.callback_handler.callbacks:
        for kind in type(callback).__mro__:
            variable, values = UPLOADS.get(kind.__name__, ("", ()))
            chosen = str(getattr(callback, "_log_model", os.environ.get(variable, "")))
            if variable and chosen.upper() in values:
                raise ValueError(
                    f"{kind.__name__} uploads all of output_dir ({variable}), where {FOLDER}/{FILE} "
                    "holds the secret keys of fixed batches and correlated noise: whoever has them "
                    f"subtracts the noise. Set {variable}=FALSE; the metrics are still tracked."
                )


def open_keys(trainer: Any) -> RunKeys:
    """The keys of a `DPZeroTrainer` whose ledger is open; fresh ones for what is new.

    Raises:
      LedgerError: steps were released and their keys are not there, or are another run's; or the rows
        are not those that these steps had, in the same order, or there is no telling.
    """
    given = trainer.args.sampler_key
    if not isinstance(trainer.plan.sampler, FixedBatchesSampler):
        return RunKeys(run_files.draw_sampler_key(given))
    file = Path(trainer.output_dir) / FOLDER / FILE
    taken: int = trainer.trajectory.next_step
    run: str = trainer.trajectory.header["direction_key"]
    parts: list[str] | None = trainer.trajectory.header.get("row_parts")

    def on_main() -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
        started = 0 < taken < trainer.plan.steps  # a run that has ended needs no keys
        stored: dict[str, Any] = _read(file, run) if started else {"order": new_sampler_key().hex()}
        rows = digest_of_rows(trainer.train_dataset, bytes.fromhex(stored["order"]), parts=parts)
        if started:
            _check_rows(file, stored.get("rows", ""), rows)
        elif not rows and not taken:
            logger.warning("This run could not be resumed if it were interrupted: %s", _NO_ORDER)
        noise = [entry for entry in stored.get("noise", ()) if entry[0] < taken]
        noise.append([taken if started else 0, new_noise_key().hex()])
        kept = {"run": run, "order": stored["order"], "rows": rows, "noise": noise}
        write_for_owner(file, json.dumps(kept))
        keys = tuple((int(first), bytes.fromhex(key)) for first, key in noise)
        return bytes.fromhex(given or stored["order"]), keys

    order, keys = distributed.on_main(on_main, lambda: (b"", ((0, new_noise_key()),)))
    return RunKeys(distributed.shared_from_main(lambda: order), keys, file)


def check_kept(trainer: Any) -> None:
    """Refuses to end a run on fixed batches whose rows changed places while it trained.

    Raises:
      LedgerError: a callback, or the data set itself, shuffled them.
    """

    def on_main() -> None:
        stored = _read(trainer._keys.file, trainer.trajectory.header["direction_key"])
        if stored["rows"]:
            parts = trainer.trajectory.header.get("row_parts")
            now = digest_of_rows(trainer.train_dataset, bytes.fromhex(stored["order"]), parts=parts)
            _check_rows(trainer._keys.file, stored["rows"], now)

    if trainer._keys.file is not None:
        distributed.on_main(on_main, lambda: None)


def noise_of_steps(trainer: Any, keys: RunKeys) -> NoiseSource:
    """What a run's steps draw from: the trainer's source, or correlated noise from the run's keys.

    Args:
      trainer: a `DPZeroTrainer`.
      keys: of `open_keys`.

    Raises:
      ValueError: a source of the user's own, whose draws cannot be made again.
    """
    plan: PrivacyPlan = trainer.plan
    source: NoiseSource = trainer.noise
    if plan.correlation is None:
        return source
    if not isinstance(source, SecureNoise | InsecureSeededNoise):
        raise ValueError(
            f"noise is a {type(source).__name__}, and correlated noise draws from secret keys that it "
            "can draw from again: leave `noise` out, or noise_correlation."
        )
    base = source if isinstance(source, InsecureSeededNoise) else KeyedNoise(keys.noise)
    factorization = plan.correlation.factorization(plan.steps)
    return CorrelatedNoise(base, factorization, sensitivity(plan), plan.mechanism.dense_draws)


def _check_rows(file: Path, before: str, now: str) -> None:
    if not (before and now):
        raise LedgerError(
            f"{_NO_ORDER} This run cannot go on: start afresh in another output_dir; what was spent "
            "stays spent."
        )
    if before != now:
        raise LedgerError(
            "train_dataset does not hold the same rows in the same order as when this run began (an "
            "unseeded shuffle or train_test_split?): with fixed batches a row could take part twice in "
            f"an epoch, which epsilon does not cover. Load it as it was ({file} knows it again), or "
            "start afresh in another output_dir; what was spent stays spent."
        )


def _read(file: Path, run: str) -> dict[str, Any]:
    if not file.is_file():
        raise LedgerError(
            f"{file} is missing: it held the secret order of the rows and the noise of this run, "
            "without which a row would be used twice and noise would not cancel. Copy it from where "
            "the run was (never to where checkpoints are published), or start afresh in another "
            "output_dir; what was spent stays spent."
        )
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if stored["run"] != run:
        raise LedgerError(
            f"{file} is another run's (its ledger began with another direction_key): restore this "
            "run's, or start afresh in another output_dir."
        )
    return stored
