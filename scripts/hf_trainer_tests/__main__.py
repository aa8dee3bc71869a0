"""Runs Hugging Face's trainer tests with Trainer, and those that pass with ours in its place."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.hf_trainer_tests import ARMS
from scripts.hf_trainer_tests.cannot_hold import CANNOT_HOLD, CANNOT_HOLD_PRIVATELY
from scripts.markdown import table

ROOT = Path(__file__).resolve().parent.parent.parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(checkout: Path, arm: str, out: Path, words: Sequence[str] = ()) -> dict[str, dict]:
    """Runs one arm in a process of its own.

    Args:
      checkout: of transformers; its tests/trainer and tests/fixtures are used.
      arm: of `ARMS`.
      out: the folder for its results and what it printed.
      words: passed on to pytest.

    Returns:
      Name of a test, without its file -> its line of `substitute`.
    """
    results = out / f"{arm}.jsonl"
    results.unlink(missing_ok=True)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"HF_TRAINER_TESTS_ARM": arm, "HF_TRAINER_TESTS_RESULTS": str(results)}
    settings = ["-q", "--tb=short", "--continue-on-collection-errors"]
    settings += ["-p", "scripts.hf_trainer_tests.substitute", "-p", "no:cacheprovider"]
    settings += ["--noconftest", "-c", os.devnull, "--rootdir", str(checkout)]
    others = ("distributed", "test_data_collator.py")  # those need GPUs, these no Trainer
    where = ["tests/trainer", *(f"--ignore=tests/trainer/{name}" for name in others), *words]
    with open(out / f"{arm}.log", "w", encoding="utf-8") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", *settings, *where],
            cwd=checkout,
            env={**os.environ, **OFFLINE, **own, "PYTHONPATH": paths},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return read(results)


def read(results: Path) -> dict[str, dict]:
    """Reads what an arm wrote: name of a test, without its file -> its line."""
    if not results.exists():
        sys.exit(f"{results} was not written: {results.with_suffix('.log')} says why.")
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    return {line["test"].split("::", 1)[1]: line for line in lines}


def reasons(arm: str) -> dict[str, str]:
    """Test -> why it cannot hold in this arm."""
    lists = [CANNOT_HOLD, *([CANNOT_HOLD_PRIVATELY] if arm == "private" else [])]
    return {test: why for each in lists for why, tests in each.items() for test in tests}


def report(arm: str, plain: Mapping[str, dict], ours: Mapping[str, dict]) -> tuple[str, int]:
    """Compares an arm with Trainer.

    Returns:
      What to print, and the number of tests that fall short: neither passed nor listed.
    """
    holds = [test for test, line in plain.items() if line["ended"] == "passed"]
    passed = [test for test in holds if ours.get(test, {}).get("ended") == "passed"]
    why = reasons(arm)
    cannot = [test for test in holds if test not in passed and test in why]
    short = [test for test in holds if test not in passed and test not in why]
    lines = [["passed", len(passed)]]
    lines += [[f"cannot hold: {reason}", n] for reason, n in Counter(map(why.get, cannot)).items()]
    lines += [["falls short", len(short)]]
    parts = [
        f"## {arm}, of {len(holds)} tests that pass with Trainer\n",
        table(["", "tests"], lines),
    ]
    parts += [f"{test}\n    {ours.get(test, {}).get('said', 'did not run')}" for test in short]
    parts += [f"listed, and passes: {test}" for test in passed if test in why]
    return "\n".join(parts), len(short)


def main() -> int:
    """Prints each arm's table and what falls short; 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of transformers, near its version here")
    parser.add_argument("--out", type=Path, help="folder for results; default a new one")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=ARMS, help="others are read from out"
    )
    parser.add_argument("--seconds", type=int, default=120, help="that one test may take")
    parser.add_argument("words", nargs="*", help="for pytest, after --")
    given = parser.parse_args()
    out = (given.out or Path(tempfile.mkdtemp())).resolve()
    out.mkdir(parents=True, exist_ok=True)
    ended = {
        arm: run(given.checkout.resolve(), arm, out, [f"--timeout={given.seconds}", *given.words])
        if arm in given.arms
        else read(out / f"{arm}.jsonl")
        for arm in ARMS
    }
    short = 0
    for arm in ARMS[1:]:
        text, falls = report(arm, ended["plain"], ended[arm])
        print(text)
        short += falls
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
