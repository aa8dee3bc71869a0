"""The table of what starters reach: accuracy by epsilon, and what more budget adds, row by row."""

from __future__ import annotations

from pathlib import Path

from scripts.studies.starters import Study, write

STUDY = Study(tasks=("trec", "sst2"), epsilons=(1.0, 8.0), seeds=(1, 2))


def row(epsilon: float, seed: int, right: str) -> dict:
    return {"task": "trec", "epsilon": epsilon, "seed": seed, "right": right}


def test_a_task_has_a_line_once_each_epsilon_was_run(tmp_path: Path) -> None:
    found = [row(1.0, 1, "1100"), row(1.0, 2, "1000"), row(8.0, 1, "1110"), row(8.0, 2, "1110")]
    lines = write(STUDY, found, tmp_path).splitlines()
    # runs: 50 and 25 %, then 75 and 75 %; rows gain 0, 1/2, 1 and 0
    # 27.0^2 = 12.5^2 of the runs + 23.9^2 of the rows
    assert lines[2] == "| trec | 37.5 ± 12.5 | 75.0 ± 0.0 | +37.5 ± 27.0 |"
    assert len(lines) == 3 and len(write(STUDY, found[:2], tmp_path).splitlines()) == 2


def test_every_epsilon_is_run_before_a_second_seed() -> None:
    assert STUDY.points()[:3] == [("trec", 1.0, 1), ("trec", 8.0, 1), ("trec", 1.0, 2)]
