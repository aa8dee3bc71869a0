"""What the environments of oldest and newest releases are held to."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from scripts import versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("at_hand", [True, False])
def test_the_oldest_releases_are_the_lower_bounds_but_torch_needs_a_build_at_hand(
    monkeypatch, at_hand
):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    asked, bounds = setup["options"]["install_requires"].split(), versions.lower_bounds()
    assert len(asked) > 10 and {line.split(">=")[0] for line in asked} <= set(bounds)
    assert bounds["transformers"] == "5.3", "the upper bound is left out"
    monkeypatch.setattr(versions, "at_hand", lambda torch: at_hand and torch == bounds["torch"])
    oldest, pinned = versions.pins("oldest"), versions.pinned_torch()
    assert oldest["torch"] == (bounds["torch"] if at_hand else pinned) != ""
    assert ("triton" in oldest) == at_hand, "it belongs to its torch"
    assert versions.pins("newest") == {"torch": pinned}
    assert {n: oldest[n] for n in versions.NAMED[:1]} == {"transformers": bounds["transformers"]}


@pytest.mark.parametrize(
    ("last", "told", "good"),
    [
        ("== 8 passed, 1 skipped in 3.21s (0:00:03) ==", "8 passed, 1 skipped", True),
        ("1 failed, 8 passed in 3.21s", "1 failed, 8 passed", False),
        ("3 deselected, 1 error in 0.10s", "3 deselected, 1 error", False),
        ("", "exit status 0", False),
    ],
)
def test_the_row_of_the_table(monkeypatch, tmp_path, last, told, good):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo 3.11 5 2 1 0 4 || echo "{last}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(versions, "environment", lambda which: python)
    assert versions.row("oldest", []) == (f"| oldest | 3.11 | 5 | 2 | 1 | 0 | 4 | {told} |", good)
