"""The public log of a run: one record for each release, from which the weights can be rebuilt.

DPZero's whole output is, per step, K noised scalars along public directions. Written down, they are
a ledger (what privacy was spent, in order), a resume point, and a proof: replaying the log on the
base model gives the final weights bit for bit.

On disk while running, `trajectory.ledger`: a line of JSON (the header), a line with its CRC-32 in hex,
then fixed-size little-endian records (step u64, learning rate f64, N x f32 values, CRC-32 u32), each
flushed to disk before anyone sees the release or the update that it pays for. For shipping,
`trajectory.safetensors`: tensors `values` float32 [T, N], `steps` int64 [T], `learning_rates` float64
[T]; metadata `header` (JSON) and `crc32` (over header and tensors). N is the header's `num_values`: K,
and one more where the clip adapts, after the K scalars of the update. The header's `update_rule` says
what an update makes of the releases so far.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from hf_dpzero.ledger.log_file import (
    LedgerError,
    LedgerWriteError,
    append_whole,
    create_whole,
    flush,
    header_lines,
    locked,
    never_written,
    parsed,
    split_header,
)

FORMAT, VERSION = "hf_dpzero.trajectory", 2  # 2: Philox4x32 directions
LEDGER_NAME, SHIPPING_NAME = "trajectory.ledger", "trajectory.safetensors"

_OPTIONAL = ("smoothing_schedule", "hold_direction_for")
"""Entries of a header that a run without such a setting leaves out."""

_FLOAT32 = struct.Struct("<f")
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


class Release(NamedTuple):
    """What one step made public.

    Attributes:
      step: from 0.
      values: the K noised means, each a float32 number, and what else the step released (the share of
        unclipped examples that an adaptive clip follows); no means for a mechanism that cannot be
        replayed (DPGD-0th releases a d-vector, which only the weights hold).
      learning_rate: of this step.
    """

    step: int
    values: tuple[float, ...]
    learning_rate: float


class Trajectory:
    """An append-only list of releases under a header, in memory and, if opened so, on disk.

    Guarantee: whoever reads a release here (`releases`, `get`, `next_step`, `digest`, the shipping form)
    reads one that is on disk, whole: a sync that still runs is waited for, and what it fails to write is
    taken back. Steps follow each other without gaps; values come back bit for bit; a changed byte is
    noticed by a checksum.

    Args:
      header: see the attribute; format and version are added.
      releases: records from step 0 on.
      path: of the ledger file, for `create` and `open`; None keeps the log in memory.

    Attributes:
      header: base model digest, direction key, distribution, K, values a record holds, smoothing, weight
        decay, trainable names, plan, update rule, versions; all public and JSON-safe.
      releases: the records, steps strictly increasing; on disk. A copy: a later record, perhaps not on
        disk yet, does not get into it.
      appended: the list itself, without waiting, for code that shows nothing of them before `wait`.
      shipped_step: so many releases made the weights that lie beside the file: those of an earlier step,
        where it evaluated best. None: all of them.
      average_last: the weights that lie beside the file are the mean of those after each of so many
        steps, up to `shipped_step`. 1: of the last alone.

    Raises:
      LedgerError: another format version, or releases that do not fit the header.
    """

    def __init__(
        self, header: Mapping[str, Any], releases: Sequence[Release] = (), path: Path | None = None
    ) -> None:
        self.header = _Header({"format": FORMAT, "version": VERSION, **header})
        # Directions are numbered by the version: another's releases would make other weights.
        if self.header["format"] != FORMAT or self.header["version"] != VERSION:
            raise LedgerError(
                f"format {self.header['format']!r} version {self.header['version']} is not "
                f"{FORMAT!r} version {VERSION}: another release of hf_dpzero wrote it, whose directions "
                "have other numbers; use that release."
            )
        self.shipped_step: int | None = None
        self.average_last = 1
        self.path: Path | None = None
        self._lock: IO[bytes] | None = None
        self._size = 0
        self.appended: list[Release] = []
        self._synced: Callable[[], object] = int  # waits for the last record
        for release in releases:
            self.append(release)
        self.path = path

    @classmethod
    def create(cls, path: str | os.PathLike, header: Mapping[str, Any]) -> Trajectory:
        """Starts a ledger file and holds it for this run.

        Args:
          path: of the new file; missing folders are made.
          header: see the class.

        Raises:
          LedgerError: the file exists already, or cannot be written.
        """
        path = Path(path)
        trajectory = cls(header, path=path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_whole(path, header_lines(trajectory.header))
        except OSError as error:
            if path.exists():
                raise LedgerError(
                    f"{path} is the ledger of an earlier run: resume it (resume_from_checkpoint), or "
                    "train into another output_dir. Its privacy budget stays spent either way."
                ) from None
            raise LedgerWriteError(
                f"{path} cannot be written ({error.strerror}), and without a ledger nothing is "
                "released: make room, or give an output_dir that can be written."
            ) from error
        trajectory._lock, trajectory._size = locked(path), os.path.getsize(path)
        return trajectory

    @classmethod
    def open(cls, path: str | os.PathLike, header: Mapping[str, Any] | None = None) -> Trajectory:
        """Opens a ledger to continue it, and holds it for this run.

        A record cut short by a crash at the very end, or never written there though the file was made
        longer (`never_written`), is dropped from the file: no update followed it.

        Args:
          path: of the ledger file.
          header: of the run that continues it, checked against the file's; None checks nothing.

        Raises:
          LedgerError: corrupt records, another run holds the file, or `header` differs from the file's.
        """
        path = Path(path)
        lock = locked(path)  # before it is read: nobody appends in between
        raw = path.read_bytes()
        trajectory, size = cls._parse(raw, path, header)
        if size != len(raw):
            os.truncate(path, size)
        trajectory.path, trajectory._lock, trajectory._size = path, lock, size
        return trajectory

    @classmethod
    def load(cls, path: str | os.PathLike) -> Trajectory:
        """Reads either form, to replay or inspect it; never writes.

        Raises:
          LedgerError: no such file, not a trajectory, cut short or corrupt.
        """
        path = Path(path)
        if not path.exists():
            raise LedgerError(f"{path}: no such trajectory.")
        if path.suffix == ".safetensors":
            return cls._load_shipping(path)
        raw = path.read_bytes()
        trajectory, size = cls._parse(raw, path)
        if size != len(raw):
            last = trajectory.next_step - 1
            raise LedgerError(f"{path}: cut short after step {last} of its records.")
        return trajectory

    @classmethod
    def _parse(
        cls, raw: bytes, path: Path, header: Mapping[str, Any] | None = None
    ) -> tuple[Trajectory, int]:
        """(the trajectory in memory, bytes of its header and whole records)."""
        own, body = split_header(raw, path)
        trajectory = cls(own)
        trajectory._refuse_other(header or {}, path)
        size = trajectory._record.size + 4
        whole = len(body) // size * size
        for start in range(0, whole, size):
            record, crc = body[start : start + size - 4], body[start + size - 4 : start + size]
            if zlib.crc32(record) != int.from_bytes(crc, "little"):
                if start + size == len(body) and never_written(raw, len(raw) - size):
                    whole = start
                    break
                raise LedgerError(
                    f"{path}: the record after step {trajectory.next_step - 1} is corrupt (checksum); "
                    "restore the file from a copy. What was spent after that step is unknown."
                )
            step, learning_rate, *values = trajectory._record.unpack(record)
            trajectory.append(Release(step, tuple(values), learning_rate))
        return trajectory, len(raw) - len(body) + whole

    def _refuse_other(self, header: Mapping[str, Any], path: Path) -> None:
        wanted = json.loads(json.dumps(header))  # tuples are lists in the file
        left_out = [name for name in _OPTIONAL if name in self.header] if wanted else []
        own = flat({name: self.header.get(name) for name in [*wanted, *left_out]})
        now = flat(wanted)
        changed = [
            f"  {name}: {_short(own.get(name))} -> {_short(now.get(name))}"
            for name in sorted(own.keys() | now.keys())
            if not name.startswith("versions") and own.get(name) != now.get(name)
        ]
        if changed:
            lines = "\n".join(changed)
            longer = (now.get("plan.steps") or 0) > (own.get("plan.steps") or 0)
            more = (
                f" (extends_run={str(path.parent)!r} trains on, and adds up both)" if longer else ""
            )
            raise LedgerError(
                f"{path} belongs to a run with other settings (its own -> this run's):\n{lines}\n"
                "A ledger continues only under the plan it was started with: put the values on the left "
                "back to resume, or train into a new output_dir, which spends a budget of its own"
                f"{more}."
            )

    def close(self) -> None:
        """Releases the file to other processes; nothing can be appended here any more."""
        try:
            self.wait()
        finally:
            self._synced = int
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def digest(self, upto: int | None = None) -> str:
        """SHA-256 (hex) of the header and the records before step `upto`: ties a state to a log."""
        digest = hashlib.sha256(header_lines(self.header))
        for release in self.releases[:upto]:
            digest.update(self._pack(release))
        return digest.hexdigest()

    @property
    def releases(self) -> list[Release]:
        """What was released, from step 0 on; see the class."""
        self.wait()
        return self.appended.copy()

    @property
    def num_directions(self) -> int:
        """Number of directions a step, K."""
        return int(self.header["num_directions"])

    @property
    def num_values(self) -> int:
        """How many values a record holds: K; K + 1 where the clip adapts; without the K where a
        release is a d-vector."""
        return int(self.header["num_values"])

    @property
    def next_step(self) -> int:
        """The first step that has not been paid for."""
        self.wait()
        return len(self.appended)

    def get(self, step: int) -> Release | None:
        """The release of `step`, or None."""
        return self.appended[step] if 0 <= step < self.next_step else None

    def append(self, release: Release, wait: bool = True) -> None:
        """Adds a record; on return it is on disk (flushed and synced).

        If it cannot be written, whole, nothing is added, neither on disk nor here. Without `wait` a
        thread syncs it, and whoever reads the release waits.

        Raises:
          LedgerError: a step that is not after the last, a wrong number of values, values that
            the file's float32 could not give back, or a file that was closed, changed or replaced.
          LedgerWriteError: the disk is full or read-only, or the file is gone.
        """
        self._refuse_misfit(release)
        if self.path is not None:
            if self._lock is None:
                raise LedgerError(f"{self.path} was closed: open it again to continue it.")
            record = self._pack(release)
            with self._told(release.step):
                # Somebody may have written to the file, or put another one in its place.
                found, held = os.stat(self.path), os.fstat(self._lock.fileno())
                if found.st_size != self._size or not os.path.samestat(found, held):
                    raise LedgerError(
                        f"{self.path} was changed by somebody else while this run was writing it."
                    )
                self._synced = append_whole(self.path, record, wait)
            self._size += len(record)
        self.appended.append(release)

    def wait(self) -> None:
        """Returns once all that was appended is on disk.

        Raises:
          LedgerWriteError: the last record could not be synced, and was taken back.
        """
        synced = self._synced
        try:
            with self._told(len(self.appended) - 1):
                synced()
        except LedgerWriteError:
            if self._synced is synced:  # of several threads that wait, the first
                self._synced = int
                self._size -= len(self._pack(self.appended.pop()))
            raise

    @contextlib.contextmanager
    def _told(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LedgerWriteError(
                f"{self.path}: step {step} could not be written ({error.strerror}), so it was not "
                f"released; the {step} steps before it are. Make room, or bring the folder back as it "
                "was, then resume (resume_from_checkpoint=True)."
            ) from error

    def _refuse_misfit(self, release: Release) -> None:
        if release.step != self.next_step or len(release.values) != self.num_values:
            raise LedgerError(
                f"step {release.step} with {len(release.values)} values does not follow step "
                f"{self.next_step - 1} of a ledger with {self.num_values} values a step."
            )
        if not all(
            abs(value) <= _LARGEST_FLOAT32 and value == _FLOAT32.unpack(_FLOAT32.pack(value))[0]
            for value in release.values
        ):
            raise LedgerError(
                f"step {release.step}: {release.values} are not finite float32 numbers, so a replay "
                "could not repeat them; round with torch.tensor(values).tolist()."
            )

    @property
    def _record(self) -> struct.Struct:
        return struct.Struct(f"<Qd{self.num_values}f")

    def _pack(self, release: Release) -> bytes:
        body = self._record.pack(release.step, release.learning_rate, *release.values)
        return body + zlib.crc32(body).to_bytes(4, "little")

    def to_safetensors(self, path: str | os.PathLike) -> None:
        """Writes the shipping form (atomically)."""
        from safetensors.torch import save_file

        values = torch.tensor([r.values for r in self.releases], dtype=torch.float32)
        rates = torch.tensor([r.learning_rate for r in self.releases], dtype=torch.float64)
        tensors = {
            "values": values.reshape(len(rates), self.num_values),
            "steps": torch.arange(len(rates), dtype=torch.int64),
            "learning_rates": rates,
        }
        shipped = {} if self.shipped_step is None else {"shipped_step": self.shipped_step}
        if self.average_last > 1:
            shipped["average_last"] = self.average_last
        header = json.dumps({**self.header, **shipped}, sort_keys=True)
        metadata = {"header": header, "crc32": str(_checksum(header, tensors))}
        partial = f"{path}.partial"
        save_file(tensors, partial, metadata=metadata)
        with open(partial, "rb") as file:
            flush(file)
        os.replace(partial, path)

    @classmethod
    def _load_shipping(cls, path: Path) -> Trajectory:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError) as error:
            raise LedgerError(f"{path}: not a whole safetensors file ({error}).") from None
        if "header" not in metadata or set(tensors) != {"values", "steps", "learning_rates"}:
            raise LedgerError(f"{path}: a safetensors file, but not a trajectory.")
        if metadata.get("crc32") != str(_checksum(metadata["header"], tensors)):
            raise LedgerError(f"{path}: its contents do not match its checksum; it is corrupt.")
        rows = zip(
            *(tensors[n].tolist() for n in ("steps", "values", "learning_rates")), strict=True
        )
        releases = [Release(step, tuple(values), rate) for step, values, rate in rows]
        header = parsed(metadata["header"])
        # the ledger's header has neither, nor its digest
        shipped, average = header.pop("shipped_step", None), header.pop("average_last", 1)
        trajectory = cls(header, releases)
        trajectory.shipped_step, trajectory.average_last = shipped, average
        return trajectory


class _Header(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise LedgerError(
            f"the trajectory's header has no {key!r}: an older release of hf_dpzero, or another "
            "program, wrote it; use the release that did."
        )


def _checksum(header: str, tensors: Mapping[str, torch.Tensor]) -> int:
    crc = zlib.crc32(header.encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode(), crc)
        crc = zlib.crc32(tensor.contiguous().numpy().tobytes(), crc)
    return crc


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dictionaries into one, whose keys are joined by dots."""
    joined: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        joined |= flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return joined


def _short(value: Any) -> str:
    text = "(not set)" if value is None else json.dumps(value, sort_keys=True)
    return text if len(text) < 200 else text[:200] + "..."
