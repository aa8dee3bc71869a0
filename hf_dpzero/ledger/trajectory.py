"""The public log of a run: one record for each release, from which the weights can be rebuilt.

DPZero's whole output is, per step, K noised scalars along public directions. Written down, they are
a ledger (what privacy was spent, in order), a resume point, and a proof: replaying the log on the
base model gives the final weights bit for bit.

On disk while running, `trajectory.ledger`: a line of JSON (the header), a line with its CRC-32 in hex,
then fixed-size little-endian records (step u64, learning rate f64, N x f32 values, CRC-32 u32), each
flushed to disk before the update that it pays for. For shipping, `trajectory.safetensors`: tensors
`values` float32 [T, N], `steps` int64 [T], `learning_rates` float64 [T]; metadata `header` (JSON)
and `crc32` (over header and tensors). N is K, and one more where the clip adapts: the K scalars of
the update come first. The header's `update_rule` says what an update makes of the releases so far.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.log_file import (
    LedgerError,
    append_whole,
    flush,
    flush_folder,
    header_lines,
    locked,
    split_header,
)
from hf_dpzero.ledger.release import Release
from hf_dpzero.ledger.update_rules import Term, UpdateTerms, update_rule_from_dict
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.subspaces import subspace_from_dict
from hf_dpzero.privacy.mechanisms import Mechanism

FORMAT, VERSION = "hf_dpzero.trajectory", 2  # 2: Philox4x32 directions
LEDGER_NAME, SHIPPING_NAME = "trajectory.ledger", "trajectory.safetensors"


class Trajectory:
    """An append-only list of releases under a header, in memory and, if opened so, on disk.

    Attributes:
      header: base model digest, direction key, distribution, K, smoothing, weight decay, trainable
        names, plan, update rule, versions; all public and JSON-safe.
      releases: the records, steps strictly increasing.
    """

    def __init__(
        self, header: Mapping[str, Any], releases: Sequence[Release] = (), path: Path | None = None
    ) -> None:
        self.header = {"format": FORMAT, "version": VERSION, **header}
        if self.header["format"] != FORMAT or self.header["version"] != VERSION:
            raise LedgerError(
                f"format {self.header['format']!r} version {self.header['version']} is not "
                f"{FORMAT!r} version {VERSION}: another release of hf_dpzero wrote it, whose directions "
                "have other numbers; use that release."
            )
        self.path = path
        self._lock: Any = None
        self._size = 0
        self.releases: list[Release] = []
        self._by_step: dict[int, Release] = {}
        for release in releases:
            self._remember(release)

    @classmethod
    def create(cls, path: str | os.PathLike, header: Mapping[str, Any]) -> Trajectory:
        """Starts a ledger file; refuses to touch one that is there."""
        trajectory = cls(header, path=Path(path))
        trajectory.path.parent.mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
        try:
            with open(path, "xb") as file:
                file.write(header_lines(trajectory.header))
                flush(file)
        except FileExistsError:
            raise LedgerError(
                f"{path} is the ledger of an earlier run: resume it (resume_from_checkpoint), or "
                "train into another output_dir. Its privacy budget stays spent either way."
            ) from None
        flush_folder(Path(path).parent)
        trajectory._hold()
        return trajectory

    @classmethod
    def open(cls, path: str | os.PathLike, header: Mapping[str, Any] | None = None) -> Trajectory:
        """Opens a ledger to continue it.

        A record cut short by a crash at the very end is dropped from the file: it was never
        followed by an update. Anything else that is wrong raises.

        Raises:
          LedgerError: corrupt records, or a `header` that differs from the file's.
        """
        lock = locked(Path(path))
        raw = Path(path).read_bytes()
        found, body = split_header(raw, path)
        trajectory = cls(found, path=Path(path))
        trajectory._lock = lock
        trajectory._refuse_other(header)
        size = trajectory._record.size + 4
        whole = len(body) // size * size
        for start in range(0, whole, size):
            trajectory._remember(trajectory._unpack(body[start : start + size], path))
        if whole != len(body):
            os.truncate(path, len(raw) - len(body) + whole)
        trajectory._size = os.path.getsize(path)
        return trajectory

    def _hold(self) -> None:
        assert self.path is not None
        self._lock, self._size = locked(self.path), os.path.getsize(self.path)

    def close(self) -> None:
        """Lets other processes continue the ledger; nothing can be appended here any more."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def digest(self, upto: int | None = None) -> str:
        """SHA-256 (hex) of the header and the records before step `upto`: ties a state to a log."""
        digest = hashlib.sha256(header_lines(self.header))
        for release in self.releases:
            if upto is None or release.step < upto:
                digest.update(self._pack(release))
        return digest.hexdigest()

    def _refuse_other(self, header: Mapping[str, Any] | None) -> None:
        wanted = {} if header is None else json.loads(json.dumps(_explicit(header)))
        own = _explicit(self.header)
        changed = [k for k in wanted if k != "versions" and wanted[k] != own.get(k)]
        if changed:
            found = {k: own.get(k) for k in changed}
            raise LedgerError(
                f"{self.path} belongs to a run with other {', '.join(changed)}: it has {_short(found)}"
                f", this run has {_short({k: wanted[k] for k in changed})}. A ledger continues only "
                "under the plan it was started with; restore the settings or use a new output_dir."
            )

    @property
    def num_directions(self) -> int:
        """K."""
        return int(self.header["num_directions"])

    @property
    def num_values(self) -> int:
        """How many values a record holds: K; K + 1 where the clip adapts; without the K where a
        release is a d-vector."""
        return int(_explicit(self.header)["num_values"])

    @property
    def next_step(self) -> int:
        """The first step that has not been paid for."""
        return self.releases[-1].step + 1 if self.releases else 0

    def get(self, step: int) -> Release | None:
        """The release of `step`, or None."""
        return self._by_step.get(step)

    def update_terms(self, step: int) -> list[Term]:
        """What the update of `step` is made of, by the header's rule; see `update_rules`.

        A function of the header and the releases up to that step alone, at the cost of the rule's
        window.

        Raises:
          LedgerError: the step was not released, or no rule of that name is known.
        """
        if step not in self._by_step:
            raise LedgerError(
                f"step {step} has no update: the last release is of {self.next_step - 1}."
            )
        return self._updates(self.releases, step)

    @functools.cached_property
    def _updates(self) -> UpdateTerms:
        try:
            rule = update_rule_from_dict(self.header.get("update_rule", {"name": "sgd"}))
        except ValueError as error:
            raise LedgerError(f"the header's {error}") from None
        return UpdateTerms(rule, self.num_directions)

    def append(self, release: Release) -> None:
        """Adds a record; on return it is on disk (flushed and synced).

        If it cannot be written, whole, nothing is added, neither on disk nor here.

        Raises:
          LedgerError: a step that is not after the last, a wrong number of values, or values
            that the file's float32 could not give back.
        """
        self._refuse_misfit(release)
        if self.path is not None:
            self._append_to_file(self.path, self._pack(release))
        self._remember(release)

    def _append_to_file(self, path: Path, record: bytes) -> None:
        if self._lock is None:
            raise LedgerError(f"{path} was closed: open it again to continue it.")
        if os.path.getsize(path) != self._size:
            raise LedgerError(f"{path} was changed by somebody else while this run was writing it.")
        append_whole(path, record)
        self._size += len(record)

    def _remember(self, release: Release) -> None:
        self._refuse_misfit(release)
        self.releases.append(release)
        self._by_step[release.step] = release

    def _refuse_misfit(self, release: Release) -> None:
        if release.step != self.next_step or len(release.values) != self.num_values:
            raise LedgerError(
                f"step {release.step} with {len(release.values)} values does not follow step "
                f"{self.next_step - 1} of a ledger with {self.num_values} values a step."
            )
        if not all(_is_float32(value) for value in release.values):
            raise LedgerError(
                f"step {release.step}: {release.values} are not finite float32 numbers, so a replay "
                "could not repeat them; round with torch.tensor(values).tolist()."
            )

    @property
    def _record(self) -> struct.Struct:
        return struct.Struct(f"<Qd{self.num_values}f")

    def _pack(self, release: Release) -> bytes:
        body = self._record.pack(release.step, release.learning_rate, *release.values)
        return body + struct.pack("<I", zlib.crc32(body))

    def _unpack(self, record: bytes, path: str | os.PathLike) -> Release:
        body, (crc,) = record[:-4], struct.unpack("<I", record[-4:])
        if zlib.crc32(body) != crc:
            raise LedgerError(
                f"{path}: the record after step {self.next_step - 1} is corrupt (checksum); restore "
                "the file from a copy. What was spent after that step is unknown."
            )
        step, learning_rate, *values = self._record.unpack(body)
        return Release(step, tuple(values), learning_rate)

    def to_safetensors(self, path: str | os.PathLike) -> None:
        """Writes the shipping form (atomically)."""
        from safetensors.torch import save_file

        tensors = {
            "values": torch.tensor([r.values for r in self.releases], dtype=torch.float32).reshape(
                len(self.releases), self.num_values
            ),
            "steps": torch.tensor([r.step for r in self.releases], dtype=torch.int64),
            "learning_rates": torch.tensor(
                [r.learning_rate for r in self.releases], dtype=torch.float64
            ),
        }
        header = json.dumps(self.header, sort_keys=True)
        metadata = {"header": header, "crc32": str(_checksum(header, tensors))}
        partial = f"{path}.partial"
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Trajectory:
        """Reads either form, to replay or inspect it; never writes."""
        if not Path(path).exists():
            raise LedgerError(f"{path}: no such trajectory.")
        if Path(path).suffix != ".safetensors":
            opened = _read_only(path)
            return cls(opened.header, opened.releases)
        return cls._load_shipping(path)

    @classmethod
    def _load_shipping(cls, path: str | os.PathLike) -> Trajectory:
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
        trajectory = cls(json.loads(metadata["header"]))
        rows = (tensors[name].tolist() for name in ("steps", "values", "learning_rates"))
        for step, values, learning_rate in zip(*rows, strict=True):
            trajectory._remember(Release(step, tuple(values), learning_rate))
        return trajectory


def _explicit(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header with the keys that it may leave out, as headers older than them do."""
    mechanism = header.get("plan", {}).get("mechanism", {})
    replayable = header.get("replayable", True)
    meant = {
        "method": mechanism.get("name"),
        "num_values": header.get("num_directions", 0) if replayable else 0,
        "update_rule": {"name": "sgd"},
        "subspace": {"name": "full"},
    }
    return {**header, **{key: value for key, value in meant.items() if key not in header}}


def num_values_entry(mechanism: Mechanism) -> dict[str, int]:
    """The header's `num_values`, where a record holds more than the mechanism's directions say."""
    usual = getattr(mechanism, "num_directions", 0) if mechanism.replayable else 0
    found = mechanism.values_per_release
    return {} if found == usual else {"num_values": found}


def _checksum(header: str, tensors: Mapping[str, torch.Tensor]) -> int:
    crc = zlib.crc32(header.encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode(), crc)
        crc = zlib.crc32(tensor.contiguous().numpy().tobytes(), crc)
    return crc


def _is_float32(value: float) -> bool:
    return (
        abs(value) <= torch.finfo(torch.float32).max
        and value == _float32.unpack(_float32.pack(value))[0]
    )


_float32 = struct.Struct("<f")


def _short(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return text if len(text) < 400 else text[:400] + "..."


def _read_only(path: str | os.PathLike) -> Trajectory:
    header, body = split_header(Path(path).read_bytes(), path)
    trajectory = Trajectory(header)
    size = trajectory._record.size + 4
    if len(body) % size:
        raise LedgerError(f"{path}: cut short after step {len(body) // size - 1} of its records.")
    for start in range(0, len(body), size):
        trajectory._remember(trajectory._unpack(body[start : start + size], path))
    return trajectory


def space_from_header(model: nn.Module, header: Mapping[str, Any]) -> ParameterSpace:
    """The parameter space a trajectory's releases act on: `model`'s parameters that train."""
    return subspace_from_dict(header.get("subspace")).space_of(
        model,
        distribution=header["direction"],
        smoothing=header["smoothing"],
        decayed=header["decayed"],
    )


def directions_of(step: int, header: Mapping[str, Any]) -> list[Direction]:
    """The K public directions of a step."""
    key = int(header["direction_key"], 16)
    return [Direction(key, step, k) for k in range(int(header["num_directions"]))]


def apply_release(
    space: ParameterSpace, trajectory: Trajectory, release: Release, defer: bool = False
) -> None:
    """One public update: theta <- (1 - lr wd) theta + sum_{s,k} c_{s,k} u_{s,k}.

    The terms are the header's rule's; for sgd, -lr value_k along the K directions of this step
    (Algorithm 2, line 3). Training and replay both go through here, so they cannot differ.

    Args:
      space: the parameters.
      trajectory: holds the release and those before it.
      release: of the step whose update is made.
      defer: as in `ParameterSpace.step_`.
    """
    header = trajectory.header
    terms = trajectory.update_terms(release.step)
    key, decay = int(header["direction_key"], 16), release.learning_rate * header["weight_decay"]
    directions = [Direction(key, term.step, term.query) for term in terms]
    space.step_(directions, [term.coefficient for term in terms], decay=decay, defer=defer)


def replay(model: nn.Module, trajectory: Trajectory, upto: int | None = None) -> None:
    """Rebuilds the trained weights in place from the base model and the public log.

    Args:
      model: the base model, as it was before training (its digest is checked).
      trajectory: a replayable log.
      upto: stop before this step; None for the end.

    Raises:
      LedgerError: another base model, other trainable tensors, or a log that cannot be replayed.
    """
    header = trajectory.header
    if not header.get("replayable", True):
        raise LedgerError(
            "this run released d-dimensional noised vectors (method dpgd-0th), which a log of "
            "scalars cannot rebuild: use the saved weights."
        )
    if digest_model(model) != header["base_model_digest"]:
        raise LedgerError(
            "this model is not the base that the trajectory was trained from (its digest differs): "
            "load the base model in the same dtype, with the same head and adapters. The recipe.yaml "
            "that the run wrote beside its trajectory holds every setting: give it as the base."
        )
    _train_only(model, header["trainable"])
    space = space_from_header(model, header)
    space.snap_()
    for release in trajectory.releases:
        if upto is not None and release.step >= upto:
            break
        apply_release(space, trajectory, release)


def _train_only(model: nn.Module, names: Sequence[str]) -> None:
    wanted = set(names)
    missing = wanted - {name for name, _ in model.named_parameters()}
    if missing:
        raise LedgerError(f"the model lacks the trained tensors {sorted(missing)[:5]}.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
