"""Studies go on where they stopped, also in the middle of a line."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from scripts.studies import harness
from scripts.studies.harness import append_rows, read_rows, run


@dataclass(frozen=True)
class Tiny:
    fields: ClassVar = ("name", "size")
    measured: ClassVar[list] = []

    seeds: tuple[int, ...] = (1, 2)
    names: tuple[str, ...] = ("b", "a", "c", "d")

    def points(self):
        return [(name, "xabcd".index(name)) for name in self.names]

    def measure(self, name, size):
        self.measured.append((name, size))
        if size in self.stops:
            raise KeyboardInterrupt
        return [{"name": name, "size": size, "part": part} for part in range(2)]

    stops: ClassVar[set] = {3}


def test_a_line_cut_short_is_dropped_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert read_rows(path, Tiny()) == []
    assert append_rows(path, [{"a": (1, 2)}, {"a": None}]) == [{"a": [1, 2]}, {"a": None}]
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"a": 3')
    assert read_rows(path, Tiny()) == [{"a": [1, 2]}, {"a": None}]
    append_rows(path, [{"a": 4}])
    assert [row["a"] for row in read_rows(path, Tiny())] == [[1, 2], None, 4]


def test_rows_of_another_study_are_refused(tmp_path):
    read_rows(tmp_path / "rows.jsonl", Tiny())
    with pytest.raises(ValueError, match="use another folder"):
        read_rows(tmp_path / "rows.jsonl", Tiny(seeds=(3,)))


def test_points_are_measured_once_in_the_order_given_and_kept_when_interrupted(tmp_path):
    folder, study = tmp_path / "new", Tiny()
    Tiny.measured.clear()
    with pytest.raises(KeyboardInterrupt):
        run(study, folder)
    kept = read_rows(folder / "rows.jsonl", study)
    assert [row["name"] for row in kept] == ["b", "b", "a", "a"]
    assert harness.left(study, kept) == [("c", 3), ("d", 4)]
    Tiny.measured.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tiny, "stops", set())
        rows = run(study, folder)
    assert Tiny.measured == [("c", 3), ("d", 4)]
    assert rows == read_rows(folder / "rows.jsonl", study) and len(rows) == 8


def command(monkeypatch, folder, *words):
    """The exit status, and what `write` was called with."""
    seen = []

    def write(study, rows, folder):
        seen.append((study, len(rows), folder))
        return "tables"

    monkeypatch.setattr(sys, "argv", ["tiny", "--output_dir", str(folder), *words])
    names = {"nargs": "+", "help": "what is measured"}
    quick = Tiny(names=("a",))
    status = harness.main("What it is.", Tiny(), quick, write, harness.first_seeds, names=names)
    return status, seen


def test_a_study_that_is_interrupted_writes_what_it_has(tmp_path, monkeypatch, capsys):
    status, seen = command(monkeypatch, tmp_path)
    assert status == 130 and seen == [(Tiny(), 4, tmp_path)]
    assert "4 rows kept; the same command continues" in capsys.readouterr().err
    monkeypatch.setattr(Tiny, "stops", set())
    status, seen = command(monkeypatch, tmp_path)
    assert status == 0 and seen == [(Tiny(), 8, tmp_path)]
    assert capsys.readouterr().out.endswith("tables\n")


def test_words_change_the_settings(tmp_path, monkeypatch):
    _, ((study, *_),) = command(monkeypatch, tmp_path / "a", "--quick")
    assert study == Tiny(names=("a",))
    _, ((study, *_),) = command(monkeypatch, tmp_path / "b", "--names", "d", "b", "--seeds", "3")
    assert study == Tiny(names=("d", "b"), seeds=(1, 2, 3))


def test_the_intervals_are_students():
    mean, half = harness.interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5 and half == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2)
    assert math.isnan(harness.interval([1.0]).half_width)


def test_interrupted_before_the_first_row_and_one_repetition(tmp_path, monkeypatch, capsys):
    """Nothing is written then; one repetition has no interval."""
    assert command(monkeypatch, tmp_path, "--names", "c") == (130, [])
    with pytest.raises(SystemExit):
        command(monkeypatch, tmp_path, "--seeds", "1")
    assert "--seeds" in capsys.readouterr().err
