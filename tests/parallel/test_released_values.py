"""A release is on the first process' disk before any other process hears of it."""

from __future__ import annotations

import pytest

from hf_dpzero.ledger.log_file import LedgerWriteError
from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.collectives import release_on_all_ranks

HEADER = {"num_values": 2, "num_directions": 2}


@pytest.fixture
def heard(monkeypatch):
    """What the other processes were told, in order; this one is the first."""
    found = []

    def numbers_of_main(numbers, count):
        found.append(numbers())
        return found[-1]

    monkeypatch.setattr(collectives, "numbers_of_main", numbers_of_main)
    return found


def test_the_ledger_holds_a_release_when_others_hear_of_it(tmp_path, heard, monkeypatch):
    path = tmp_path / "trajectory.ledger"
    trajectory, told = Trajectory.create(path, HEADER), collectives.numbers_of_main
    on_disk = []

    def then_looked_at(numbers, count):
        values = told(numbers, count)
        on_disk.extend(Trajectory.load(path).releases)
        return values

    monkeypatch.setattr(collectives, "numbers_of_main", then_looked_at)
    expected = Release(0, (0.5, -2.0), 1e-2)
    assert release_on_all_ranks(trajectory, 0, 1e-2, lambda: (0.5, -2.0)) == expected
    assert on_disk == [expected] and heard == [(0.5, -2.0)]


def test_nobody_hears_of_a_release_that_was_not_written(tmp_path, heard, monkeypatch):
    trajectory = Trajectory.create(tmp_path / "trajectory.ledger", HEADER)
    trajectory.path = tmp_path / "gone" / "trajectory.ledger"
    with pytest.raises(LedgerWriteError, match="step 0 could not be written"):
        release_on_all_ranks(trajectory, 0, 1e-2, lambda: (0.5, -2.0))
    assert heard == [] and trajectory.releases == []


def test_another_process_notes_what_it_was_told_and_draws_nothing(monkeypatch):
    monkeypatch.setattr(collectives, "is_main", lambda: False)
    monkeypatch.setattr(collectives, "numbers_of_main", lambda numbers, count: (1.0, 2.0))
    trajectory = Trajectory(HEADER)
    release_on_all_ranks(trajectory, 0, 0.1, lambda: pytest.fail("drew noise of its own"))
    assert trajectory.releases == [Release(0, (1.0, 2.0), 0.1)]
