"""A client's folder that its owner, or another user of the machine, meddled with."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import pytest
from federated_sides import NAMES, client_folder, rounds_of, side, started

from hf_dpzero.federated import flower
from hf_dpzero.federated.messages import (
    ASK,
    RELEASED_NAME,
    VALUES,
    Message,
    pack,
    pack_json,
    unpack,
    unpack_json,
)
from hf_dpzero.federated.plan import PlanError
from hf_dpzero.federated.report import RUNS, served, spent, together
from hf_dpzero.federated.setup import run_of
from hf_dpzero.ledger.log_file import LedgerError


def test_a_client_whose_ledger_was_deleted_releases_nothing_more(tmp_path):
    """Else the open round would be drawn anew, and what was spent before would be forgotten."""
    made, server = started(tmp_path)
    rounds_of(made, server).gather()
    client, folder = made.clients[NAMES[0]], client_folder(tmp_path, NAMES[0])
    raw = pack(Message(ASK, 0, server.digest))
    first = client.answer(made.replica, raw)
    assert unpack(first, 3).kind == VALUES
    (folder / RELEASED_NAME).unlink()
    again = side(tmp_path / "again")  # another process
    for attempt in (
        lambda: client.answer(made.replica, raw),
        lambda: again.client(NAMES[0], 0, folder),
        lambda: again.join(NAMES[0], 0, folder, server.invitation()),
    ):
        with pytest.raises(LedgerError, match="is missing"):
            attempt()
    assert not (folder / RELEASED_NAME).exists()


def test_an_invitation_that_is_refused_turns_nobody_to_other_directions(tmp_path):
    """A process that met a strange server first answers its own run along that run's directions."""
    made, server = started(tmp_path)
    name, folder = NAMES[0], client_folder(tmp_path, NAMES[0])
    made.join(name, 0, folder, server.invitation())
    again = side(tmp_path / "again")  # another process of the same client
    own = unpack_json(server.invitation())["contract"]
    strange = pack_json({"contract": {**own, "direction_key": "1" * 32}})
    with pytest.raises(LedgerError):
        again.join(name, 0, folder, strange)
    again.client(name, 0, folder)
    followed = again.replica.run.header["direction_key"]
    assert followed == own["direction_key"]


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_other_users_do_not_read_a_clients_log(tmp_path, monkeypatch):
    """It may quote rows; a folder made with the usual umask lets everybody in."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    log = folder / flower.LOG_NAME
    log.write_text("of an earlier release\n", encoding="utf-8")
    log.chmod(0o644)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    for target in (folder, tmp_path / "new"):
        process = flower._start(target)
        process.wait()
        assert (target / flower.LOG_NAME).stat().st_mode & 0o077 == 0
    assert "earlier" in log.read_text(encoding="utf-8")


# ------------------------------------------------------------------ several runs


TARGET = {"target_epsilon": 2.0, "noise_multiplier": None}


def key(number: int) -> dict[str, int]:
    return {"testing.direction_key": number}  # another run's


def test_runs_of_one_client_add_up_and_stop_at_its_ceiling(tmp_path):
    """Two runs of epsilon 2 cost less than 4 and more than 2 together; a third would pass 3."""
    client = tmp_path / "north"

    def joins(number, **settings):
        _, server = started(tmp_path / f"server-{number}", **TARGET, **key(number))
        made = side(tmp_path / f"own-{number}", **TARGET, **settings)
        folder = client / RUNS / run_of("join", server.invitation())
        made.join("north", 0, folder, server.invitation())
        return made, server, folder

    first, server, folder = joins(0)
    first.answer("round", server.ask(server.join(first.join(
        "north", 0, folder, server.invitation())).name), "north", 0, folder)  # fmt: skip
    with pytest.raises(PlanError, match=r"1 earlier ones .* epsilon = (2\.\d+|3\.\d+) .*2 at most"):
        joins(1)  # the target is the ceiling where nothing else is said
    for number, ceiling in ((4, 0.0), (5, float("nan"))):
        with pytest.raises(PlanError, match="would cost"):
            joins(number, max_epsilon=ceiling)
    joins(2, max_epsilon=3.0)
    with pytest.raises(PlanError, match="3 at most"):
        joins(3, max_epsilon=3.0)
    runs = served(client)
    assert sorted(run.released for run in runs) == [0, 1]
    assert run_of("round", server.ask("north")) == folder.name
    full = together([(run.local, run.local.rounds) for run in runs], 1e-3)
    assert 2.0 < full <= 3.0
    first_alone = runs[0].local.epsilon(1)
    assert together([(run.local, run.released) for run in runs], 1e-3) == pytest.approx(first_alone)
    lines = spent(client).splitlines()
    assert len(lines) == 3 and "all 2 runs together" in lines[2]
    again = side(tmp_path / "again", **TARGET)  # another process: a run that it knows goes on
    assert again.client("north", 0, folder)


def test_a_client_with_fixed_noise_serves_no_second_run_without_a_ceiling(tmp_path):
    """A server could start one run after the other, each within what the client agreed to."""
    for number, refused in enumerate((nullcontext(), pytest.raises(PlanError, match="no max-eps"))):
        _, server = started(tmp_path / f"server-{number}", **key(number))
        folder = tmp_path / "north" / RUNS / run_of("join", server.invitation())
        with refused:
            side(tmp_path / f"own-{number}").join("north", 0, folder, server.invitation())
        assert folder.exists() == (number == 0)


def test_a_run_counts_whose_folder_was_moved_behind_a_link_or_lost_its_ledger(tmp_path):
    """Else a server's next run would be admitted as if it were the first."""
    _, server = started(tmp_path / "server", **TARGET, **key(0))
    folder = tmp_path / "north" / RUNS / run_of("join", server.invitation())
    side(tmp_path / "own", **TARGET).join("north", 0, folder, server.invitation())
    moved = tmp_path / "other disk"
    folder.rename(moved)
    folder.symlink_to(moved, target_is_directory=True)
    _, server = started(tmp_path / "next", **TARGET, **key(1))
    following = folder.with_name(run_of("join", server.invitation()))
    made = side(tmp_path / "again", **TARGET)
    with pytest.raises(PlanError, match="1 earlier ones"):
        made.join("north", 0, following, server.invitation())
    (moved / RELEASED_NAME).unlink()
    with pytest.raises(LedgerError, match="is missing"):
        made.join("north", 0, following, server.invitation())


@pytest.mark.parametrize("name", ["trajectory.ledger", "messages.ledger"])
def test_a_folder_with_another_ledger_does_not_count_as_nothing_spent(tmp_path, name):
    """Of an earlier version, or of a run on one machine over the same rows."""
    _, server = started(tmp_path / "server", **TARGET)
    (tmp_path / "north").mkdir()
    (tmp_path / "north" / name).touch()
    folder = tmp_path / "north" / RUNS / run_of("join", server.invitation())
    with pytest.raises(LedgerError, match=r"released\.ledger is missing.*as output-dir"):
        side(tmp_path / "own", **TARGET).join("north", 0, folder, server.invitation())
    with pytest.raises(LedgerError, match="is missing"):
        spent(tmp_path / "north")
    assert not folder.exists()
