"""Plants one bug at a time in a copy of the package and checks that the tests notice it.

Each bug is a small, plausible mistake that would break the privacy guarantee, the training or the
files of a run without any error message. A test suite that passes with such a bug in place does not
protect against it. The checkout itself is never changed.

  python scripts/planted_bugs.py                     all bugs, one row each; fails unless all are caught
  python scripts/planted_bugs.py --only noise_halved --list
  python scripts/planted_bugs.py --clean             the same tests without a bug; they must pass
  python scripts/planted_bugs.py --jobs 2 --markdown planted_bugs.md

A bug is caught if pytest reports a failed test. A bug that breaks the import or the collection of
tests is an error here, because then nothing was tested.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bugs_to_plant import BUGS, Bug

CHECKOUT = Path(__file__).resolve().parent.parent
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
ENVIRONMENT = {
    **dict.fromkeys((*OFFLINE, "OMP_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}
KERNEL_SOURCES = ("kernel", "direction", "philox")
"""Parts of the paths of files that numba compiles, or takes constants from."""
BROKEN = "ImportError|ModuleNotFoundError|SyntaxError|NameError"
"""Exceptions which mean that the planted code does not run, so that no test judged it."""


@dataclass(frozen=True)
class Row:
    """One line of the result: a bug, "caught", "MISSED" or "ERROR", and why."""

    name: str
    verdict: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name:<26}{self.verdict:<8}{self.seconds:6.1f} s  {self.detail}"


def copy_checkout(parent: Path) -> Path:
    """Copies the tracked files to `parent`/checkout, with shared data beside it if there is any."""
    copy = parent / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (CHECKOUT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, copy / name)
    shared = CHECKOUT.parent / "shared"
    if shared.is_dir():
        (parent / "shared").symlink_to(shared)
    return copy


def run_tests(
    copy: Path, tests: Sequence[str], timeout: float, numba_cache: Path
) -> tuple[int | None, str]:
    """pytest's exit status (None after `timeout` seconds) and its output for `tests` in `copy`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", ""]
    settings = {**ENVIRONMENT, "PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(numba_cache)}
    process = subprocess.Popen(
        [*command, *tests],
        cwd=copy,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that processes which a test starts can be ended with it
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def planted(copy: Path, bug: Bug) -> Iterator[None]:
    """The bug is in the copy inside the block; afterwards its files are as they were.

    Raises:
      ValueError: a snippet does not occur exactly once.
      SyntaxError: the changed file is not Python.
    """
    changed: dict[Path, str] = {}
    for file, old, new in ((bug.file, bug.old, bug.new), *bug.also):
        source = changed.get(copy / file) or (copy / file).read_text(encoding="utf-8")
        if source.count(old) != 1:
            raise ValueError(f"{file} holds {old!r} {source.count(old)} times, not once")
        changed[copy / file] = source.replace(old, new)
        compile(changed[copy / file], file, "exec")
    # Times of change matter: compiled code is reused while they stay the same.
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in changed}
    try:
        for path, source in changed.items():
            path.write_text(source, encoding="utf-8")
        yield
    finally:
        for path, (content, time_ns) in before.items():
            path.write_bytes(content)
            os.utime(path, ns=(time_ns, time_ns))


def verdict_of(status: int | None, output: str) -> tuple[str, str]:
    """("caught", "MISSED" or "ERROR", the first failing test or the reason)."""
    if status is None:
        return "ERROR", "timed out"
    if status == 0:
        return "MISSED", "all tests passed"
    failed = re.search(r"^FAILED (\S+(?:\[.*?\])?)(.*)$", output, re.MULTILINE)
    if status != 1 or failed is None:
        last = output.strip().splitlines()[-1:] or ["no output"]
        return "ERROR", f"pytest exit status {status}: {last[0]}"
    test, reason = failed.groups()
    if re.search(BROKEN, reason):
        return "ERROR", f"the planted code does not run: {test}{reason}"
    return "caught", test


def judge(copy: Path, bug: Bug, timeout: float) -> Row:
    """Plants one bug in the copy, runs its tests, and takes the bug out again."""
    start = time.monotonic()
    recompile = any(part in bug.file for part in KERNEL_SOURCES)
    cache = copy.parent / (f"numba-{bug.name}" if recompile else "numba")
    try:
        with planted(copy, bug):
            verdict, detail = verdict_of(*run_tests(copy, bug.tests.split(), timeout, cache))
    except (ValueError, SyntaxError, FileNotFoundError) as error:
        verdict, detail = "ERROR", str(error)
    return Row(bug.name, verdict, detail, time.monotonic() - start)


def judged(bugs: Sequence[Bug], jobs: int, timeout: float) -> Iterator[Row]:
    """The row of each bug, in order; every job has a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as folder:
        free: queue.Queue[Path] = queue.Queue()
        for job in range(min(jobs, len(bugs))):
            free.put(copy_checkout(Path(folder, str(job))))

        def one(bug: Bug) -> Row:
            copy = free.get()
            try:
                return judge(copy, bug, timeout)
            finally:
                free.put(copy)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, bugs)


def check_clean(bugs: Sequence[Bug], timeout: float) -> int:
    """Runs all named tests without a bug; 0 if they pass."""
    tests = list(dict.fromkeys(test for bug in bugs for test in bug.tests.split()))
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as folder:
        copy = copy_checkout(Path(folder))
        status, output = run_tests(copy, tests, timeout * len(bugs), Path(folder, "numba"))
    print(output)
    return 0 if status == 0 else 1


def markdown(rows: Sequence[Row], bugs: Sequence[Bug]) -> str:
    """The result as a Markdown table."""
    what = {bug.name: bug.what for bug in bugs}
    lines = [
        "| bug | what goes wrong | result | first failing test | seconds |",
        "|---|---|---|---|---:|",
    ]
    lines += [
        f"| `{r.name}` | {what[r.name]} | {r.verdict} | `{r.detail}` | {r.seconds:.1f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each bug; 0 if all are caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [bug.name for bug in BUGS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names)
    parser.add_argument("--list", action="store_true", help="print the bugs and stop")
    parser.add_argument("--clean", action="store_true", help="run the tests without a bug")
    parser.add_argument("--jobs", type=int, default=1, help="bugs to judge at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one bug's tests")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in BUGS if bug.name in options.only]
    if options.list:
        for bug in bugs:
            print(f"{bug.name:<26}{bug.what} [{bug.tests}]")
        return 0
    if options.clean:
        return check_clean(bugs, options.timeout)
    rows = []
    for row in judged(bugs, options.jobs, options.timeout):
        rows.append(row)
        print(row, flush=True)
    caught, seconds = sum(row.verdict == "caught" for row in rows), sum(r.seconds for r in rows)
    print(f"{caught} of {len(rows)} bugs caught in {seconds:.0f} s of tests")
    if options.markdown:
        options.markdown.write_text(markdown(rows, bugs), encoding="utf-8")
    return 0 if caught == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
