"""Studies go on where they stopped, also in the middle of a line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hf_dpzero.papers.study_rows import append_rows, read_rows


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
