"""What a run on fixed batches must find again when it resumes: its secret keys, and rows in their order.

With another order of its batches a row would take part twice in an epoch, and with other keys correlated
noise would not cancel. So both keys are kept while the run is not finished, in a folder that nothing
ships and that no checkpoint holds, readable by its owner alone. A run that has taken all its steps
removes them.

Places belong to row numbers, so the rows must be the same in the same order too. A digest of them, which
needs the secret key of the order, is kept beside it and compared: of whole rows, or, where each access
draws them anew, of what stays (the header's `row_parts`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from hf_dpzero.run import Run

logger = logging.get_logger(__name__)

FOLDER, FILE = "_private", "noise_keys.json"

UPLOADS = {
    "CometCallback": ("COMET_LOG_ASSETS", ("TRUE",)),
    "DagsHubCallback": ("HF_DAGSHUB_LOG_ARTIFACTS", ("1", "ON", "YES", "TRUE")),
    "DVCLiveCallback": ("HF_DVCLIVE_LOG_MODEL", ("ALL",)),
}
"""Tracking services that take the whole of output_dir: the variable that says so, and its values."""

LOOKED_AT, TWICE = 10_000, 256
"""Rows whose order is compared; rows that tell what each access draws anew. Both are spread evenly."""

INDICES = "Subset.indices"
_UNNOTICED = 2.0**-20  # most chance of another order to pass for the same one

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
        if self.file is not None and collectives.is_main():
            self.file.unlink(missing_ok=True)


def draw_sampler_key(given: str | None = None) -> bytes:
    """Returns the secret that one call of `train` draws its batches by; a resumed run has another.

    It is never stored: whoever copies the run's folder, or goes back to an older copy, could
    otherwise release the same batches a second time.

    Args:
      given: 64 hex digits, for tests (the report then says NOT PRIVATE); None draws a fresh key.

    Returns:
      32 bytes, the same on all ranks.
    """
    return collectives.shared_from_main(
        lambda: bytes.fromhex(given) if given else new_sampler_key()
    )


def check_uploads(plan: PrivacyPlan, callbacks: Iterable[object]) -> None:
    """Refuses callbacks that would upload the folder with the keys together with everything else.

    Args:
      plan: of the run.
      callbacks: of its trainer.

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


def open_keys(run: Run) -> RunKeys:
    """Returns the keys of a run whose ledger is open; fresh ones for what is new.

    Raises:
      LedgerError: steps were released and their keys are not there, or are another run's; or the rows
        are not those that these steps had, in the same order, or there is no telling.
    """
    given = run.args.testing.sampler_key
    if not isinstance(run.plan.sampler, FixedBatchesSampler):
        return RunKeys(draw_sampler_key(given))
    file = Path(str(run.args.output_dir)) / FOLDER / FILE
    taken: int = run.opened.next_step
    began: str = run.header["direction_key"]
    parts: list[str] | None = run.header.get("row_parts")

    def on_main() -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
        started = 0 < taken < run.plan.steps  # a run that has ended needs no keys
        stored: dict[str, Any] = (
            _read(file, began) if started else {"order": new_sampler_key().hex()}
        )
        rows = digest_of_rows(run.dataset, bytes.fromhex(stored["order"]), parts=parts)
        if started:
            _check_rows(file, stored.get("rows", ""), rows)
        elif not rows and not taken:
            logger.warning("This run could not be resumed if it were interrupted: %s", _NO_ORDER)
        noise = [entry for entry in stored.get("noise", ()) if entry[0] < taken]
        # A key of its own for what a resumed run draws: a fork of the folder must not repeat noise.
        noise.append([taken if started else 0, new_noise_key().hex()])
        kept = {"run": began, "order": stored["order"], "rows": rows, "noise": noise}
        write_for_owner(file, json.dumps(kept))
        keys = tuple((int(first), bytes.fromhex(key)) for first, key in noise)
        return bytes.fromhex(given or stored["order"]), keys

    order, keys = collectives.on_main(on_main, lambda: (b"", ((0, new_noise_key()),)))
    return RunKeys(collectives.shared_from_main(lambda: order), keys, file)


def check_kept(run: Run, keys: RunKeys) -> None:
    """Refuses to end a run on fixed batches whose rows changed places while it trained.

    Args:
      run: with its rows.
      keys: of `open_keys`.

    Raises:
      LedgerError: a callback, or the data set itself, shuffled them.
    """

    file = keys.file
    if file is None:
        return

    def on_main() -> None:
        stored = _read(file, run.header["direction_key"])
        if stored["rows"]:
            parts = run.header.get("row_parts")
            now = digest_of_rows(run.dataset, bytes.fromhex(stored["order"]), parts=parts)
            _check_rows(file, stored["rows"], now)

    collectives.on_main(on_main, lambda: None)


def noise_of_steps(plan: PrivacyPlan, source: NoiseSource, keys: RunKeys) -> NoiseSource:
    """Returns what steps draw from: the trainer's source, or correlated noise from the run's keys.

    Args:
      plan: of the run.
      source: what the user gave, or operating-system entropy.
      keys: of `open_keys`.

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


def steady_parts(dataset: Any, rows: Sequence[int] | None = None) -> list[str] | None:
    """Returns the names of what two accesses to a row agree on: columns, or places of a tuple.

    Beneath a `Subset` (one of another, too) they are of the rows that it selects from, of a
    `datasets.Dataset` there of what is stored; and the selection itself is one (`INDICES`), unless it
    is a range.

    Args:
      dataset: rows by number.
      rows: numbers of the rows that are meant; None for all.

    Returns:
      None where rows agree as a whole; [] where nothing does.
    """
    chosen = _spread(range(len(dataset)) if rows is None else rows, TWICE)
    with isolated_randomness():  # looking must not move the generators that training draws from
        if list(_hashes(dataset, chosen)) == list(_hashes(dataset, chosen)):
            return None
        agreed = [
            {name for name, part in once.items() if again.get(name) == part}
            for once, again in zip(_parts(dataset, chosen), _parts(dataset, chosen), strict=True)
        ]
        places = _beneath(dataset, chosen)[1]
        numbers = [
            {name for name, part in row.items() if part == Hasher.hash(place)}
            for place, row in zip(places, _parts(dataset, chosen), strict=True)
        ]
    # a column that is the row's number says where a row stands, not which it is
    names = set[str].intersection(*agreed) - set[str].intersection(*numbers)
    if len({b - a for a, b in itertools.pairwise(places)}) < 2:
        names.discard(INDICES)
    return sorted(names)


def digest_of_rows(
    dataset: Any, key: bytes, rows: Sequence[int] | None = None, parts: Sequence[str] | None = None
) -> str:
    """SHA-256 (hex) of a secret key, the number of rows, and up to `LOOKED_AT` rows in their order.

    Args:
      dataset: rows by number; of a `datasets.Dataset` what is stored, before any transform.
      key: 32 bytes; without it the digest tells nothing of a row that can be guessed.
      rows: numbers of the rows that are meant; None for all.
      parts: of `steady_parts`, to digest these alone; None for whole rows.

    Returns:
      "" where the digest could not tell another order: rows are drawn anew at each access, or the parts
      are so much alike that more than one shuffle in 2^20 would leave them as they are.
    """
    chosen = range(len(dataset)) if rows is None else rows
    digest = hashlib.sha256(key + len(chosen).to_bytes(8, "little"))
    looked_at = _spread(chosen, LOOKED_AT)
    if parts is None and steady_parts(dataset, chosen) is not None:
        return ""
    with isolated_randomness():
        if parts is None:
            found = list(_hashes(dataset, looked_at))
        else:
            each = list(_parts(dataset, looked_at))
            found = ["|".join(row.get(name, "") for name in parts) for row in each]
            # the numbers that a Subset selects say nothing of what lies there
            own = ("|".join(row.get(name, "") for name in parts if name != INDICES) for row in each)
            alike = sum(math.lgamma(count + 1) for count in Counter(own).values())
            if alike and alike - math.lgamma(len(found) + 1) > math.log(_UNNOTICED):
                return ""
    digest.update("".join(found).encode())
    return digest.hexdigest()


def _spread(rows: Sequence[int], most: int) -> Sequence[int]:
    return rows[:: max(1, -(-len(rows) // most))]


def _hashes(dataset: Any, rows: Sequence[int]) -> Iterator[str]:
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.with_format(None)
    return (Hasher.hash(dataset[int(row)]) for row in rows)


def _beneath(dataset: Any, rows: Sequence[int]) -> tuple[Any, list[int]]:
    """The data set that `Subset`s select from, as it is stored, and the rows' numbers there."""
    places = [int(row) for row in rows]
    while isinstance(dataset, Subset):
        places, dataset = [int(dataset.indices[place]) for place in places], dataset.dataset
    stored = isinstance(dataset, datasets.Dataset)
    return (dataset.with_format(None) if stored else dataset), places


def _parts(dataset: Any, rows: Sequence[int]) -> Iterator[dict[str, str]]:
    """Hashes of what each row is made of, by name."""
    below, places = _beneath(dataset, rows)
    for place in places:
        row = below[place]
        if isinstance(row, (tuple, list)):
            row = dict(enumerate(row))
        parts = row.items() if hasattr(row, "items") else ()
        own = {INDICES: str(place)} if isinstance(dataset, Subset) else {}
        yield {**{str(name): Hasher.hash(part) for name, part in parts}, **own}
