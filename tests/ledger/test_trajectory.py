"""The ledger: round trips, corruption, crash safety, and replay bit for bit.

`python tests/ledger/test_trajectory.py` re-records `golden/trajectory.json`; do that only with a change
that is meant to alter numbers, and say why in the changelog.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from bytes_digest import bytes_digest
from safetensors import safe_open
from torch import nn
from whole_directions import direction_vector

from hf_dpzero.ledger import log_file
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.log_file import LedgerError, LedgerWriteError
from hf_dpzero.ledger.replay import (
    UpdateRule,
    apply_release,
    directions_of,
    replay,
    space_from_header,
)
from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.perturbation.directions import DISTRIBUTIONS
from hf_dpzero.perturbation.parameter_space import ParameterSpace

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "trajectory.json"
KEY = 0x00112233445566778899AABBCCDDEEFF


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def header_for(model: nn.Module | None = None, **changes: object) -> dict[str, object]:
    names = [] if model is None else [n for n, p in model.named_parameters() if p.requires_grad]
    header = {
        "base_model_digest": "" if model is None else digest_model(model),
        "direction_key": f"{KEY:032x}",
        "direction": "rademacher",
        "num_directions": 2,
        "smoothing": 1e-3,
        "weight_decay": 0.01,
        "trainable": names,
        "decayed": [n for n in names if n.endswith("weight")],
        "replayable": True,
        "plan": {"name": "test", "steps": 20},
        "versions": {"hf_dpzero": "0.1.0"},
        "update_rule": {"name": "sgd"},
    }
    return {**header, "num_values": changes.get("num_directions", 2), **changes}


def release_at(step: int, count: int = 2) -> Release:
    """Values and rates of every size: some updates far below a grid step, some that re-grid."""
    values = tuple(
        float32(((7 * step + 3 * k) % 11 - 5) / 4 * 10.0 ** (k - 1)) for k in range(count)
    )
    return Release(step, values, learning_rate=[1e-7, 1e-5, 1e-3, 0.3][step % 4])


def written(path: Path, count: int = 3, **changes: object) -> Trajectory:
    trajectory = Trajectory.create(path, header_for(**changes))
    for step in range(count):
        trajectory.append(release_at(step, trajectory.num_values))
    return trajectory


class Explicit(nn.Module):
    """34 + 18 float32 and 40 bfloat16 weights, given by formulas; one frozen."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self._weights(32), self._weights(16)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 4)
        self.frozen = nn.Parameter(self._weights(3), requires_grad=False)
        self.narrow = nn.Parameter(self._weights(40).bfloat16())
        self.first.weight.data, self.second.weight.data = first.view(4, 8), second.view(4, 4)
        self.first.bias.data, self.second.bias.data = torch.zeros(4), self._weights(4)

    @staticmethod
    def _weights(count: int) -> torch.Tensor:
        return (torch.arange(count) * 37 % 101 - 50).float() / 64


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize(("count", "values"), [(0, 2), (1, 2), (17, 2), (2, 0)])
def test_both_forms_round_trip(tmp_path: Path, count: int, values: int):
    """Without values too: DPGD-0th's ledger only counts what was spent. Shipped as plain safetensors."""
    path, shipped = tmp_path / "deep" / "t.ledger", tmp_path / "t.safetensors"
    made = written(path, count, num_values=values)
    made.close()
    made.to_safetensors(shipped)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["deep", "t.safetensors"]
    header = header_for(num_values=values)
    for read in (Trajectory.open, Trajectory.load, lambda p: Trajectory.open(p, header), None):
        found = Trajectory.load(shipped) if read is None else read(path)
        found.close()
        assert found.header == made.header and found.next_step == count
        assert found.releases == [release_at(step, values) for step in range(count)]
    with safe_open(shipped, framework="pt") as file:
        assert json.loads(file.metadata()["header"])["direction_key"] == f"{KEY:032x}"
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "values": (torch.float32, (count, values)),
        "steps": (torch.int64, (count,)),
        "learning_rates": (torch.float64, (count,)),
    }


def test_a_ledger_is_held_by_one_run_until_it_is_closed(tmp_path: Path):
    path = tmp_path / "t.ledger"
    held = written(path, 2)
    with pytest.raises(LedgerError, match="written by another run"):
        Trajectory.open(path)
    held.close()
    with pytest.raises(LedgerError, match="closed"):
        held.append(release_at(2))
    other = Trajectory.open(path)
    other.append(release_at(2))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(LedgerError, match="changed by somebody else"):
        other.append(release_at(3))


def test_digest_names_a_prefix(tmp_path: Path):
    made = written(tmp_path / "t.ledger", 4)
    shorter = Trajectory(made.header, made.releases[:2])
    assert made.digest(2) == shorter.digest() != made.digest()
    other = Trajectory({**made.header, "direction_key": "0"}, made.releases[:2])
    assert other.digest() != shorter.digest()


# ---------------------------------------------------------------- crash safety


def test_append_is_on_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second reader sees each record; and the file was synced, after writing, each time."""
    path, synced = tmp_path / "t.ledger", []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    trajectory = written(path, 0)
    for step in range(4):
        trajectory.append(release_at(step))
        assert synced[-1] == path.stat().st_size
        assert Trajectory.load(path).releases == trajectory.releases
    assert len(synced) == 6  # the header and the folder, too


@pytest.mark.parametrize("fails", [False, True])
def test_a_release_is_read_once_its_sync_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """The sync is held up until another thread has asked for the release for a while, in vain."""
    path, asked, read = tmp_path / "t.ledger", threading.Event(), list[object]()
    trajectory = written(path, 2)
    before, seen = path.read_bytes(), trajectory.releases

    def sync(descriptor: int) -> None:
        asked.wait()
        time.sleep(0.05)
        assert not read
        if fails:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", sync)

    def reader() -> None:
        asked.set()
        try:
            read.append(trajectory.get(2))
        except LedgerWriteError as error:
            read.append(str(error))

    trajectory.append(release_at(2), wait=False)
    assert trajectory.appended[2] == release_at(2) and len(seen) == 2
    thread = threading.Thread(target=reader)
    thread.start()
    thread.join()
    monkeypatch.undo()
    if fails:
        assert "step 2 could not be written" in str(read[0])
        assert path.read_bytes() == before and trajectory.next_step == 2
        trajectory.append(release_at(2))
    else:
        assert read == [release_at(2)]
    assert Trajectory.load(path).releases == [release_at(step) for step in range(3)]


@pytest.mark.parametrize("lost", [1, 11, 27])
def test_a_tail_cut_short_by_a_crash_is_dropped(tmp_path: Path, lost: int):
    path = tmp_path / "t.ledger"
    written(path, 3)
    os.truncate(path, path.stat().st_size - lost)
    with pytest.raises(LedgerError, match="cut short after step 1"):
        Trajectory.load(path)  # a reader does not repair
    opened = Trajectory.open(path)
    assert opened.next_step == 2
    opened.append(release_at(2))
    assert Trajectory.load(path).releases == [release_at(step) for step in range(3)]


def test_a_failed_write_leaves_neither_half_a_record_nor_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Disk full: the file is as before, and the step counts as not released."""
    path = tmp_path / "t.ledger"
    trajectory = written(path, 2)
    before = path.read_bytes()

    def full(file: object) -> None:
        file.flush()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log_file, "flush", full)
        with pytest.raises(OSError, match="No space left"):
            trajectory.append(release_at(2))
    assert path.read_bytes() == before
    assert trajectory.next_step == 2
    trajectory.append(release_at(2))
    assert Trajectory.load(path).next_step == 3


def test_an_existing_ledger_is_never_overwritten(tmp_path: Path):
    path = tmp_path / "t.ledger"
    written(path, 2)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"earlier run: resume it.*budget stays spent"):
        Trajectory.create(path, header_for())
    assert path.read_bytes() == before


# ---------------------------------------------------------------- corruption


def flips(raw: bytes) -> list[bytes]:
    """Every byte changed in turn: in its lowest bit, its highest, or all, in turn."""
    masks = (0x01, 0x80, 0xFF)
    return [raw[:i] + bytes([raw[i] ^ masks[i % 3]]) + raw[i + 1 :] for i in range(len(raw))]


def test_every_flipped_byte_of_a_ledger_is_noticed(tmp_path: Path):
    """Records by their checksum, the header by its own; both ways of reading."""
    path = tmp_path / "t.ledger"
    written(path, 3)
    broken = flips(path.read_bytes())
    assert len(broken) > 400
    for raw in broken:
        path.write_bytes(raw)
        for read in (Trajectory.load, Trajectory.open):
            with pytest.raises(LedgerError):
                read(path)
        assert path.read_bytes() == raw, "a corrupt file is evidence: leave it"


def test_every_changed_byte_of_the_shipping_form_is_noticed(tmp_path: Path):
    path = tmp_path / "t.safetensors"
    Trajectory(header_for(), [release_at(step) for step in range(3)]).to_safetensors(path)
    whole = path.read_bytes()
    broken = [*flips(whole), *(whole[:length] for length in range(0, len(whole), 13))]
    assert len(broken) > 750
    for raw in broken:
        path.write_bytes(raw)
        with pytest.raises(LedgerError):
            Trajectory.load(path)


def test_the_corrupt_record_is_located(tmp_path: Path):
    path = tmp_path / "t.ledger"
    written(path, 3)
    raw = bytearray(path.read_bytes())
    raw[-28 - 5] ^= 1  # in the record of step 1; a record is 28 bytes
    path.write_bytes(raw)
    with pytest.raises(LedgerError, match=r"after step 0 is corrupt \(checksum\).*unknown"):
        Trajectory.open(path)


def test_records_out_of_order_or_twice_are_refused(tmp_path: Path):
    path = tmp_path / "t.ledger"
    written(path, 3)
    raw = path.read_bytes()
    path.write_bytes(raw + raw[-28:])  # the last record again, checksum intact
    with pytest.raises(LedgerError, match="step 2 with 2 values does not follow step 2"):
        Trajectory.open(path)


def test_other_files_are_not_trajectories(tmp_path: Path):
    from safetensors.torch import save_file

    with pytest.raises(LedgerError, match="no such trajectory"):
        Trajectory.load(tmp_path / "none.ledger")
    for name, content in [("empty", b""), ("text", b"hello\n"), ("json", b"{}\n")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LedgerError):
            Trajectory.load(tmp_path / name)
        with pytest.raises(LedgerError):
            Trajectory.open(tmp_path / name)
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(LedgerError, match="not a trajectory"):
        Trajectory.load(tmp_path / "model.safetensors")


# ---------------------------------------------------------------- what does not belong


OTHERS = {
    "plan": {"name": "test", "steps": 21}, "smoothing": 2e-3, "direction_key": "0" * 32,
    "trainable": ["other"], "num_directions": 3, "weight_decay": 0.0, "num_values": 3,
    "update_rule": {"name": "momentum"},
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), OTHERS.items())
def test_a_changed_plan_is_refused_by_name(tmp_path: Path, key: str, value: object):
    path = tmp_path / "t.ledger"
    written(path, 2)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=rf"(?m)^  {key}[.\w]*: .+ -> .+$"):
        Trajectory.open(path, header_for(**{key: value}))
    assert path.read_bytes() == before
    Trajectory.open(path, header_for(versions={"hf_dpzero": "0.2"}))  # other libraries may go on


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("smoothing_schedule", {"a": 1}),
        ("hold_direction_for", 4),
    ],
)
def test_a_setting_that_is_left_out_later_is_refused_by_name(
    tmp_path: Path, key: str, value: object
):
    """Headers have these where they are set: a run without them would go on along other directions."""
    path = tmp_path / "t.ledger"
    written(path, 2, **{key: value})
    with pytest.raises(LedgerError, match=rf"(?m)^  {key}[.\w]*: .+ -> \(not set\)$"):
        Trajectory.open(path, header_for())
    Trajectory.open(path, header_for(**{key: value}))


@pytest.mark.parametrize(
    "release",
    [
        Release(1, (1.0, 2.0), 0.1),  # not after step 1
        Release(5, (1.0, 2.0), 0.1),  # a gap
        Release(2, (1.0,), 0.1),
        Release(2, (1.0, 2.0, 3.0), 0.1),
        Release(2, (0.1, 2.0), 0.1),  # not a float32 number
        Release(2, (math.nan, 2.0), 0.1),
        Release(2, (math.inf, 2.0), 0.1),
        Release(2, (1e300, 2.0), 0.1),
    ],
)
def test_releases_that_do_not_fit_are_refused_before_writing(tmp_path: Path, release: Release):
    path = tmp_path / "t.ledger"
    trajectory = written(path, 2)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=f"step {release.step}"):
        trajectory.append(release)
    assert trajectory.next_step == 2
    assert trajectory.get(1) == release_at(1) and trajectory.get(2) is None
    assert path.read_bytes() == before


# ---------------------------------------------------------------- replay


def train(model: nn.Module, header: dict[str, object], steps: int) -> tuple[Trajectory, list[str]]:
    """What the trainer does, without data: perturb, release, update; and the digest after each step."""
    trajectory, digests = Trajectory(header), []
    space = space_from_header(model, header)
    space.snap_()
    for step in range(steps):
        for direction in directions_of(step, header):
            space.move_to_(((direction, header["smoothing"]),))
            space.move_to_(((direction, -header["smoothing"]),))
        trajectory.append(release_at(step, trajectory.num_values))
        apply_release(space, trajectory, trajectory.releases[-1])
        digests.append(digest_model(model))
    return trajectory, digests


@pytest.mark.parametrize("rule", [UpdateRule(), UpdateRule("momentum", 0.8, 5)])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_replay_is_bit_exact(tmp_path: Path, distribution: str, rule: UpdateRule):
    """From both forms, to the end or up to a step; a record may hold more than K values."""
    model = Explicit()
    header = header_for(
        model, direction=distribution, num_directions=3, num_values=4, update_rule=rule.to_dict()
    )
    trajectory, digests = train(model, header, 20)
    on_disk = Trajectory.create(tmp_path / "t.ledger", header)
    for release in trajectory.releases:
        on_disk.append(release)
    trajectory.to_safetensors(tmp_path / "t.safetensors")
    for name, upto in (("t.ledger", None), ("t.safetensors", None), ("t.ledger", 7)):
        base = Explicit().requires_grad_(False)  # the header says what trains
        replay(base, Trajectory.load(tmp_path / name), upto)
        found = digests[(upto or 20) - 1]
        assert digest_model(base) == found != header["base_model_digest"]
        assert [n for n, p in base.named_parameters() if p.requires_grad] == header["trainable"]


def test_another_base_model_is_refused():
    model = Explicit()
    trajectory, _ = train(model, header_for(model), 3)
    other = Explicit()
    other.frozen.data[0] += 1  # frozen weights count as well
    before = digest_model(other)
    with pytest.raises(LedgerError, match="not the base that the trajectory was trained from"):
        replay(other, trajectory)
    assert digest_model(other) == before
    with pytest.raises(LedgerError, match="not the base"):
        replay(model, trajectory)  # already trained


UNFIT = [
    ({"version": 3}, "version 3 is not .* version 2: another release"),
    ({"trainable": ["first.weight", "lora_A"]}, r"lacks the trained tensors \['lora_A'\]"),
    ({"direction": None}, "header has no 'direction'"),
    ({"replayable": False, "num_values": 0}, "dpgd-0th.*use the saved"),
]


@pytest.mark.parametrize(("changes", "message"), UNFIT)
def test_logs_that_cannot_be_replayed_are_refused(changes: dict[str, object], message: str):
    header = {**header_for(Explicit()), **changes}
    header = {name: value for name, value in header.items() if value is not None}
    with pytest.raises(LedgerError, match=message):
        replay(Explicit(), Trajectory(header))


# ---------------------------------------------------------------- golden


def golden(distribution: str) -> dict[str, object]:
    """20 releases on `Explicit`: the base's digest, the result's, and how each direction starts."""
    model = Explicit()
    base = bytes_digest(model)
    header = header_for(model, direction=distribution)
    replay(model, Trajectory(header, [release_at(step) for step in range(20)]))
    space = ParameterSpace.from_model(model, distribution=distribution)
    starts = [
        direction_vector(u, distribution, space.layout)[:4].tolist()
        for t in range(20)
        for u in directions_of(t, header)
    ]
    return {
        "base_model_digest": base,
        "final_model_digest": bytes_digest(model),
        "first_bias": model.first.bias.tolist(),
        "releases_digest": hashlib.sha256(
            repr([release_at(step) for step in range(20)]).encode()
        ).hexdigest(),
        "first_coordinates": starts,
    }


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_golden_trajectory(distribution: str):
    """The same key and releases give the same bits, on every machine and in every later version."""
    stored = json.loads(GOLDEN.read_text())
    assert set(stored) == set(DISTRIBUTIONS)
    found = golden(distribution)
    for name, value in stored[distribution].items():
        assert found[name] == value, name


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({d: golden(d) for d in DISTRIBUTIONS}, indent=1) + "\n")
