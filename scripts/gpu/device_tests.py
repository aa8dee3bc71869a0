"""Tests marked `gpu`, a pytest process a file: one that cannot be imported takes no other along."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.gpu.results import Item

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150.0
"""Seconds that one file may take: a test that hangs must leave time for the rest."""
KERNELS = Path("tests/perturbation/test_triton_kernels.py")


def marked_files(root: Path = ROOT) -> list[Path]:
    """Test files with a test for a GPU, relative to the root."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [f.relative_to(root) for f in found if "mark.gpu" in f.read_text(encoding="utf-8")]


def items(dry_run: bool) -> Iterator[Item]:
    """One for each file; in a dry run the interpreter's first tests stand for all."""
    for path in sorted(marked_files(), key=lambda path: path != KERNELS):
        words = _dry_words(path) if dry_run else ["-m", "gpu"]
        yield Item(path.stem, 3 if dry_run else 45, _runner(path, words))


def _dry_words(path: Path) -> list[str]:
    if path == KERNELS and importlib.util.find_spec("triton") is not None:
        return ["-m", "not slow", "-k", "interpreter and test_one_term_of_one_tensor and signs"]
    return ["-m", "gpu", "--collect-only"]


def _runner(path: Path, words: list[str]) -> Any:
    return lambda left: run_file(path, words, min(left, LIMIT_S))


def run_file(path: Path, words: list[str], limit_s: float) -> Mapping[str, Any]:
    """Counts of a file's tests: passed, failed, skipped, seconds; raises RuntimeError on a failure.

    A file that needs a package which this machine lacks is no failure: `lacks` names the package.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        child = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path), *words,
             f"--junitxml={report}"],
            cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        said = (child.stdout + child.stderr)[-6000:]
        if lacking := re.search(r"No module named '([\w.]+)'", said):
            return {"lacks": lacking[1].split(".")[0], "passed": 0}
        if "--collect-only" in words and child.returncode == 0:
            found = re.search(r"(\d+)(?:/\d+)? tests? collected", said)
            return {"collected": int(found[1]) if found else 0}
        if child.returncode != 0:
            raise RuntimeError(f"pytest {path} ended with {child.returncode}:\n{said}")
        return counts(ElementTree.parse(report).getroot())


def counts(root: ElementTree.Element) -> dict[str, Any]:
    """Passed, failed and skipped tests, and seconds, of a JUnit report.

    Raises:
      RuntimeError: no test passed: a run in which all are skipped shows nothing.
    """
    suites = list(root.iter("testsuite"))
    total = {
        k: sum(int(s.get(k, 0)) for s in suites) for k in ("tests", "failures", "errors", "skipped")
    }
    wrong = total["failures"] + total["errors"]
    passed = total["tests"] - wrong - total["skipped"]
    if not passed:
        raise RuntimeError(f"no test passed: {total}")
    seconds = sum(float(s.get("time", 0)) for s in suites)
    return {"passed": passed, "failed": wrong, "skipped": total["skipped"], "seconds": seconds}
