"""The soak kills runs and finds nothing wrong; planted faults it does find."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_dpzero.ledger.trajectory import Release

ROOT = Path(__file__).resolve().parents[2]


def soak() -> Any:
    spec = importlib.util.spec_from_file_location("soak", ROOT / "scripts" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_few_kills(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/soak.py", "--quick", "--kills", "6"]
    place = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, **place}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "soak.json").read_text())
    assert told["kills"] == 6 == sum(told["phases"].values())
    kills = {name: row["kills"] for name, row in told["table"].items()}
    assert sum(kills[name] for name in kills if name.endswith("SIGTERM")) == 2
    assert told["replayed"].get(first := "dpzero from its ledger alone") == told["runs"].get(first)
    assert told["lives"] == told["kills"] + sum(told["runs"].values()) + told["refused"]


PAID = [Release(step, (float(step),), 0.1) for step in range(3)]


@pytest.mark.parametrize(
    ("before", "now", "told", "words"),
    [
        (PAID[:2], PAID[:1], [], "changed"),
        (PAID[:1], [Release(0, (9.0,), 0.1)], [], "changed"),
        (PAID[:2], PAID, [["drawn", 1, []], ["drawn", 2, []]], "drawn again"),
        (PAID[:2], PAID, [["drawn", 2, []], ["paid", 2, [7.0]]], "not what was released"),
        (PAID[:2], PAID[:2], [["drawn", 2, []], ["moved", 2, []]], "unpaid"),
        (PAID[:2], PAID[:2], [["logged", 3, []]], "unpaid"),
        ([], PAID, [["drawn", 0, []]], "without a draw"),
    ],
)
def test_what_may_not_be(before: Any, now: Any, told: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        soak().check_ledger(before, now, told)


def test_what_may_be() -> None:
    module = soak()
    module.check_ledger(PAID[:2], PAID, [["drawn", 2, []], ["paid", 2, [2.0]], ["moved", 2, []]])
    module.check_ledger(PAID[:2], PAID[:2], [["moved", 0, []], ["drawn", 2, []]])
    assert module.phase([["begun", -1, []]], True) == "while it resumes"
    assert module.phase([["drawn", 2, []]], True) == "between noise and ledger"
