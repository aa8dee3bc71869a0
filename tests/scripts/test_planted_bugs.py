"""Each planted bug fits the code as it is: its text stands once in its file, and its tests are there."""

from __future__ import annotations

from pathlib import Path

from scripts.bugs_to_plant import BUGS

ROOT = Path(__file__).parents[2]


def test_each_bug_fits_the_code():
    assert len({bug.name for bug in BUGS}) == len(BUGS) > 60
    for bug in BUGS:
        for file, old, new in ((bug.file, bug.old, bug.new), *bug.also):
            assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1 and new != old, (
                bug.name
            )
        for test in bug.tests.split():
            assert (ROOT / test.partition("::")[0]).exists(), bug.name
