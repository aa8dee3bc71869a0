"""What a run on fixed batches must find again when it resumes: its secret keys, and rows in their order.

With another order of its batches a row would take part twice in an epoch, and with other keys correlated
noise would not cancel. So both keys are kept while the run is not finished, in a folder that nothing
ships and that no checkpoint holds, readable by its owner alone. A run that has taken all its steps
removes them.

Places belong to row numbers, so the rows must be the same in the same order too. A digest of them, which
needs the secret key of the order, is kept beside it and compared. Where each access draws rows anew
nothing would tell their order, and the run cannot be resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import datasets
from datasets.fingerprint import Hasher
from torch.utils.data import Subset
from transformers.utils import logging

from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.ledger.log_file import LedgerError, write_for_owner
from hf_dpzero.parallel import collectives
from hf_dpzero.privacy.correlated.correlation import sensitivity
from hf_dpzero.privacy.correlated.stream import CorrelatedNoise, KeyedNoise, new_noise_key
from hf_dpzero.privacy.noise import InsecureSeededNoise, NoiseSource, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FixedBatchesSampler, new_sampler_key
from hf_dpzero.run import Dataset, Run

logger = logging.get_logger(__name__)

FOLDER, FILE, HOLDOUT_FILE = "_private", "noise_keys.json", "holdout.json"

UPLOADS = {
    "CometCallback": ("COMET_LOG_ASSETS", ("TRUE",)),
    "DagsHubCallback": ("HF_DAGSHUB_LOG_ARTIFACTS", ("1", "ON", "YES", "TRUE")),
    "DVCLiveCallback": ("HF_DVCLIVE_LOG_MODEL", ("ALL",)),
}
"""Tracking services that take the whole of output_dir: the variable that says so, and its values."""

LOOKED_AT, TWICE = 10_000, 256
"""Rows whose order is compared; rows that tell whether each access draws them anew. Spread evenly."""

_NO_ORDER = (
    "the rows of train_dataset are drawn anew at each access (augmentation?), so nothing tells their "
    "order. In another one a row could take part twice in an epoch of fixed batches, which epsilon does "
    "not cover. For a run that can be resumed, draw augmentation from the row's number, draw it in a "
    "transform (`with_transform`), or use sampling='poisson', which needs no order."
)


class StoredKeys(TypedDict):
    """What the file holds; keys in hex."""

    run: str  # the ledger's direction key
    order: str  # of the rows in their batches
    rows: str  # `digest_of_rows` when the run began; "" where nothing tells
    noise: list[tuple[int, str]]  # (first step, key) of each start


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
        """Removes the file, on rank 0, and what a crash may have left of its drafts."""
        if self.file is not None and collectives.is_main():
            for path in self.file.parent.glob(f"*{FILE}*"):
                path.unlink()


def check_uploads(plan: PrivacyPlan, callbacks: Iterable[object]) -> None:
    """Refuses callbacks that would upload the folder with the keys together with everything else.

    Raises:
      ValueError: names the callback, and what to set.
    """
    if not isinstance(plan.sampler, FixedBatchesSampler):
        return
    for callback in callbacks:
        for kind in type(callback).__mro__:
            variable, values = UPLOADS.get(kind.__name__, ("", ()))
            chosen = str(getattr(callback, "_log_model", os.environ.get(variable, "")))
            if variable and chosen.upper() in values:
                raise ValueError(
                    f"{kind.__name__} uploads all of output_dir ({variable}), where {FOLDER}/{FILE} "
                    "holds the secret keys of fixed batches and correlated noise: whoever has them "
                    f"subtracts the noise. Set {variable}=FALSE; the metrics are still tracked."
                )


def seeded_key(seed: int, purpose: str) -> bytes:
    """Returns the 32 bytes of key that `seed` makes for runs that are not private, as with Trainer."""
    return hashlib.sha256(f"{purpose} {seed}".encode()).digest()


def open_keys(run: Run) -> RunKeys:
    """Returns the keys of a run whose ledger is open; fresh ones for what is new.

    The sampler's is 32 bytes, the same on all ranks; `testing.sampler_key` gives it in tests.

    Raises:
      LedgerError: steps were released and their keys are not there, or are another run's; or the rows
        are not those that these steps had, in the same order, or there is no telling.
    """
    given = run.args.testing.sampler_key
    if given is None and run.args.not_private:
        given = seeded_key(run.args.seed, "batches").hex()
    if not isinstance(run.plan.sampler, FixedBatchesSampler):
        # Never stored, and a resumed run has another: whoever copies the folder, or goes back to an
        # older copy, could otherwise release the same batches a second time.
        return RunKeys(collectives.shared(bytes.fromhex(given) if given else new_sampler_key()))
    file = run.output_dir / FOLDER / FILE
    taken: int = run.opened.next_step
    began: str = run.header["direction_key"]

    def on_main() -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
        started = 0 < taken < run.plan.steps  # a run that has ended needs no keys
        fresh = StoredKeys(run=began, order=new_sampler_key().hex(), rows="", noise=[])
        stored = _read(file, began) if started else fresh
        # Before anything is written: a run that is refused leaves the file as it was.
        rows = digest_of_rows(run.dataset, bytes.fromhex(stored["order"]))
        if started:
            _check_rows(file, stored.get("rows", ""), rows)  # a file of an older run has none
        elif not rows and not taken:
            logger.warning("This run could not be resumed if it were interrupted: %s", _NO_ORDER)
        noise = [(first, key) for first, key in stored.get("noise", ()) if first < taken]
        # A key of its own for what a resumed run draws: a fork of the folder must not repeat noise.
        noise.append((taken if started else 0, new_noise_key().hex()))
        write_for_owner(file, json.dumps({**stored, "rows": rows, "noise": noise}))
        keys = tuple((first, bytes.fromhex(key)) for first, key in noise)
        return bytes.fromhex(given or stored["order"]), keys

    order, keys = collectives.on_main(on_main, lambda: (b"", ((0, new_noise_key()),)))
    return RunKeys(collectives.shared(order), keys, file)


def check_kept(run: Run, keys: RunKeys) -> None:
    """Refuses to end a run on fixed batches whose rows changed places while it trained.

    Raises:
      LedgerError: a callback, or the data set itself, shuffled them.
    """

    file = keys.file
    if file is None:
        return

    def on_main() -> None:
        stored = _read(file, run.header["direction_key"])
        if stored["rows"]:
            now = digest_of_rows(run.dataset, bytes.fromhex(stored["order"]))
            _check_rows(file, stored["rows"], now)

    collectives.on_main(on_main, lambda: None)


def noise_of_steps(plan: PrivacyPlan, source: NoiseSource, keys: RunKeys) -> NoiseSource:
    """Returns what steps draw from: the trainer's source, or correlated noise from the run's keys.

    Raises:
      ValueError: a source of the user's own, whose draws cannot be made again.
    """
    if plan.correlation is None:
        return source
    if not isinstance(source, SecureNoise | InsecureSeededNoise):
        raise ValueError(
            f"noise is a {type(source).__name__}, and correlated noise draws from secret keys that it "
            "can draw from again: leave `noise` out, or correlated_noise."
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


def _read(file: Path, run: str) -> StoredKeys:
    if not file.is_file():
        raise LedgerError(
            f"{file} is missing: it held the secret order of the rows and the noise of this run, "
            "without which a row would be used twice and noise would not cancel. Copy it from where "
            "the run was (never to where checkpoints are published), or start afresh in another "
            "output_dir; what was spent stays spent."
        )
    stored: StoredKeys = json.loads(file.read_text(encoding="utf-8"))
    if stored["run"] != run:
        raise LedgerError(
            f"{file} is another run's (its ledger began with another direction_key): restore this "
            "run's, or start afresh in another output_dir."
        )
    return stored


def digest_of_rows(dataset: Dataset, key: bytes, rows: Sequence[int] | None = None) -> str:
    """SHA-256 (hex) of a secret key, the number of rows, and up to `LOOKED_AT` rows in their order.

    Args:
      dataset: rows by number; of a `datasets.Dataset`, also beneath `Subset`s, what is stored, before
        any transform.
      key: 32 bytes; without it the digest tells nothing of a row that can be guessed.
      rows: numbers of the rows that are meant; None for all.

    Returns:
      "" where rows are drawn anew at each access, so that a digest could not tell their order.
    """
    chosen = range(len(dataset)) if rows is None else rows
    digest = hashlib.sha256(key + len(chosen).to_bytes(8, "little"))
    with isolated_randomness():  # looking must not move the generators that training draws from
        tried = _spread(chosen, TWICE)
        if _hashes(dataset, tried) != _hashes(dataset, tried):
            return ""
        digest.update("".join(_hashes(dataset, _spread(chosen, LOOKED_AT))).encode())
    return digest.hexdigest()


def _spread(rows: Sequence[int], most: int) -> Sequence[int]:
    return rows[:: max(1, -(-len(rows) // most))]  # rounded up: at most so many


def _hashes(dataset: Dataset, rows: Sequence[int]) -> list[str]:
    if isinstance(dataset, Subset):
        below = [dataset.indices[row] for row in rows]
        return _hashes(dataset.dataset, below)  # type: ignore[arg-type]
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.with_format(None)  # a transform may draw: what is stored is the row
    # `Hasher` pickles, so that tensors, arrays and images count by content.
    return [Hasher.hash(dataset[int(row)]) for row in rows]
