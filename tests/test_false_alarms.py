"""Tests that may fail by chance say how often: `false_alarm(rate)`, and all rates together are small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
TOGETHER = 1e-4
STATISTICS = {"pvalue", "kstest", "chisquare", "binomtest", "corrcoef"}
"""A test whose own lines, or whose helpers in the same file, use one of these compares statistics."""


def rate(function: ast.FunctionDef) -> float | None:
    """Of the mark, which holds for all cases of a test together; None without the mark."""
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.false_alarm":
            return float(ast.literal_eval(mark.args[0]))
    return None


def words(function: ast.FunctionDef) -> set[str]:
    nodes = list(ast.walk(function))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }


def functions() -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Every test, and whether it is statistical."""
    for path in sorted(TESTS.rglob("test_*.py")):
        made = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        ]
        helpers = {f.name for f in made if not f.name.startswith("test_") and words(f) & STATISTICS}
        for function in made:
            if function.name.startswith("test_"):
                marked = any("mark.statistical" in ast.unparse(d) for d in function.decorator_list)
                found = bool(words(function) & (STATISTICS | helpers))
                yield f"{path.relative_to(TESTS)}::{function.name}", function, marked or found


def test_every_statistical_test_states_its_false_alarms():
    silent = [name for name, test, statistical in functions() if statistical and rate(test) is None]
    assert not silent, f"state false_alarm(rate), 0 where every draw has a fixed seed: {silent}"


def test_all_tests_together_fail_by_chance_less_than_once_in_ten_thousand_runs():
    stated = {name: found for name, test, _ in functions() if (found := rate(test)) is not None}
    assert len(stated) > 20 and all(0 <= found < TOGETHER for found in stated.values())
    assert sum(stated.values()) < TOGETHER, stated


def test_a_test_without_a_rate_is_found():
    (made,) = ast.parse("def test_a():\n    assert check(stats.kstest(x).pvalue)").body
    assert isinstance(made, ast.FunctionDef)
    assert words(made) & STATISTICS and rate(made) is None
    (made,) = ast.parse("@pytest.mark.false_alarm(1e-7)\ndef test_a(): ...").body
    assert isinstance(made, ast.FunctionDef) and rate(made) == pytest.approx(1e-7)
