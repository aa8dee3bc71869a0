"""Studies go on where they stopped, also in the middle of a line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from scripts.studies.command import run_and_write, study_parser
from scripts.studies.rows import append_rows, measure_points, read_rows


@dataclass(frozen=True)
class Tiny:
    seeds: tuple[int, ...] = (1, 2)


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
    path, measured = tmp_path / "new" / "rows.jsonl", []

    def measure(name, size):
        measured.append((name, size))
        if size == 3:
            raise KeyboardInterrupt
        return [{"name": name, "size": size, "part": part} for part in range(2)]

    points = [("b", 2), ("a", 1), ("c", 3), ("d", 4)]
    with pytest.raises(KeyboardInterrupt):
        measure_points(path, Tiny(), points, ("name", "size"), measure)
    assert [row["name"] for row in read_rows(path, Tiny())] == ["b", "b", "a", "a"]
    measured.clear()
    rows = measure_points(path, Tiny(), [*points[:2], points[3]], ("name", "size"), measure)
    assert measured == [("d", 4)] and rows == read_rows(path, Tiny()) and len(rows) == 6


def test_a_study_that_is_interrupted_writes_what_it_has(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"

    def run(study, folder):
        read_rows(path, study)
        append_rows(path, [{"a": 1}])
        raise KeyboardInterrupt

    seen = []

    def write(study, rows, folder):
        seen.append((rows, folder))
        return "tables"

    assert run_and_write(Tiny(), path, run, write) == 130
    assert seen == [([{"a": 1}], tmp_path)] and "1 rows kept" in capsys.readouterr().err
    assert run_and_write(Tiny(), path, lambda study, folder: [{"a": 2}], write) == 0
    assert seen[1] == ([{"a": 2}], tmp_path) and capsys.readouterr().out == "tables\n"


@pytest.mark.parametrize("seeds", ["1", "0", "many"])
def test_one_repetition_has_no_interval(seeds, capsys):
    parser = study_parser("What it is.\n\nMore.", "less", "repetitions")
    with pytest.raises(SystemExit):
        parser.parse_args(["--output_dir", "out", "--seeds", seeds])
    assert "--seeds" in capsys.readouterr().err
    assert parser.parse_args(["--output_dir", "out"]).seeds is None
    assert parser.description == "What it is."
