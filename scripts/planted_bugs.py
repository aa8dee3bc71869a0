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
class Bug:
    """A mistake in one place of the package, and the tests that should notice it.

    Attributes:
      name: identifier for `--only` and the table.
      what: what goes wrong, in one sentence.
      file: path of the changed file in the checkout.
      tests: files or node ids for pytest, with spaces between.
      old: source text that occurs exactly once in the file.
      new: what replaces it.
      also: a second (file, old, new), where two places guard against the same mistake.
    """

    name: str
    what: str
    file: str
    tests: str
    old: str
    new: str
    also: tuple[str, str, str] | None = None


# fmt: off
BUGS = (
    Bug("noise_halved",
        "The noise has half of the standard deviation that is accounted.",
        "hf_dpzero/privacy/mechanisms/scalar.py",
        "tests/privacy/test_mechanisms.py::test_released_noise_has_the_accounted_scale",
        "scale = math.ldexp(self.noise_multiplier, GRID_BITS)",
        "scale = math.ldexp(self.noise_multiplier, GRID_BITS - 1)"),
    Bug("noise_seeded",
        "The secret noise comes from a fixed seed and not from the operating system.",
        "hf_dpzero/privacy/noise.py", "tests/privacy/test_noise.py",
        "return list(_measurement(distribution, scale)([0] * size)) if size else []",
        "return InsecureSeededNoise(0)._integers(distribution, scale, size, step)"),
    Bug("realised_batch_size",
        "The noised sum is divided by the secret size of the sampled batch.",
        "hf_dpzero/training/zeroth_order_step.py",
        "tests/training/test_trainer.py::test_values_are_clipped_sum_plus_noise_over_expected_batch",
        "total: list[Any] = self.split.sum_agreed(own, agreed)\n",
        "object.__setattr__(mechanism, 'expected_batch_size', float(max(len(x), 1)))\n"
        "        total: list[Any] = self.split.sum_agreed(own, agreed)\n"),
    Bug("empty_batch_skipped",
        "An empty batch releases exact zeros, which tells that nobody was sampled.",
        "hf_dpzero/training/zeroth_order_step.py",
        "tests/training/test_trainer.py::test_empty_batches_still_release_noise",
        "values = numbers_of_main(lambda: mechanism.release(total, step, self.noise), count)",
        "values = [0.0] * len(total)\n"
        "        if len(x):\n"
        "            values = numbers_of_main(\n"
        "                lambda: mechanism.release(total, step, self.noise), count)"),
    Bug("clip_per_direction",
        "Each of an example's K finite differences is clipped to C by itself.",
        "hf_dpzero/privacy/mechanisms/scalar.py",
        "tests/privacy/test_mechanisms.py::test_one_row_never_exceeds_the_radius_and_attains_it",
        "return [int(n) for n in on_grid(rows, self.radius, self.granularity, order).sum(axis=0)]",
        "single = on_grid(rows.reshape(-1, 1), self.radius, self.granularity, order)\n"
        "        return [int(n) for n in single.reshape(rows.shape).sum(axis=0)]"),
    Bug("radius_is_the_clip",
        "Rows are clipped to C, and nothing is left for the row that one more displaces.",
        "hf_dpzero/privacy/mechanisms/base.py", "tests/privacy/test_radius.py",
        "return self.clip / (1 + DISPLACEMENT)",
        "return self.clip"),
    Bug("rounded_above_clip",
        "Rounding to the grid may lift a clipped row above C; nothing checks it afterwards.",
        "hf_dpzero/privacy/discretization.py",
        "tests/privacy/test_mechanisms.py::test_the_integer_check_catches_what_float64_cannot_see",
        "while (over := _exceeds(integers, most, order)).any():",
        "while (over := np.zeros(len(integers), dtype=bool)).any():"),
    Bug("replay_from_wrong_step",
        "A replay starts at the second release.",
        "hf_dpzero/ledger/replay.py", "tests/ledger/test_trajectory.py",
        "for release in trajectory.releases:",
        "for release in trajectory.releases[1:]:"),
    Bug("sampler_reused",
        "A resumed run counts its batches from 0 and draws the same batches again.",
        "hf_dpzero/training/batches.py",
        "tests/training/test_trainer.py::test_resume_equals_a_straight_run",
        "chosen = self.plan.sampler.batch(step, self.key)",
        "drawn = self.__dict__.setdefault('drawn', iter(range(2**62)))\n"
        "        chosen = self.plan.sampler.batch(next(drawn), self.key)"),
    Bug("direction_reused",
        "Every step moves along the direction of step 0.",
        "hf_dpzero/perturbation/directions.py", "tests/perturbation/test_directions.py",
        "self.key = stream_key(*direction, _DOMAIN_DIRECTION)",
        "self.key = stream_key(direction.key, 0, direction.query, _DOMAIN_DIRECTION)"),
    Bug("nan_passed_on",
        "A row with NaN or infinity is passed on and not counted as zero.",
        "hf_dpzero/privacy/discretization.py",
        "tests/privacy/test_mechanisms.py::test_bad_rows_count_as_zero_and_reach_nothing_else",
        "return np.where(finite[:, None], rows, 0.0), finite",
        "return rows, finite"),
    Bug("epsilon_of_one_step_less",
        "The report states the epsilon of T - 1 steps.",
        "hf_dpzero/reporting/plan_facts.py", "tests/reporting/test_privacy_report.py",
        "plan.epsilon(delta, at=steps)",
        "plan.epsilon(delta, at=max(steps - 1, 0))"),
    Bug("prompt_without_label",
        "A training row holds the prompt alone, without the answer to learn.",
        "hf_dpzero/tasks/prompted_generation.py",
        "tests/tasks/test_prompted_tasks.py::test_prompt_and_answer_of_a_question",
        '"input_ids": [p.input_ids + a for p, a in zip(prompts, answers, strict=True)],',
        '"input_ids": [p.input_ids for p in prompts],'),
    Bug("padding_on_wrong_side",
        "Batches are padded on the side that the tokenizer does not pad.",
        "hf_dpzero/tasks/collators.py", "tests/tasks/test_prompted_tasks.py::test_label_word_batches",
        'if side == "right"',
        'if side == "left"'),
    Bug("tied_weights_forgotten",
        "Ghost norms of a tied embedding leave out the product of its two uses.",
        "hf_dpzero/estimators/ghost_clipping.py", "tests/estimators/test_ghost_clipping.py",
        "if len(joined) == 2:",
        "if len(joined) > 2:"),
    Bug("count_without_noise",
        "Adaptive clipping releases the exact share of unclipped examples.",
        "hf_dpzero/privacy/mechanisms/adaptive_clipping.py", "tests/privacy/test_adaptive_clipping.py",
        "(drawn,) = noise.gaussian(scale, 1, step + COUNT_STREAM)",
        "drawn = 0 * round(scale)"),
    Bug("replacement_not_doubled",
        "Replacing an example is accounted like adding one: C, where it moves the sum by 2 C.",
        "hf_dpzero/privacy/mechanisms/base.py", "tests/privacy/test_plan.py",
        'return replace if relation == "replace_one" else add_remove',
        "return add_remove"),
    Bug("ledger_after_update",
        "The ledger's file is written after the update, so that a crash loses a paid step.",
        "hf_dpzero/training/zeroth_order_step.py",
        "tests/training/test_trainer.py::test_a_step_that_cannot_be_written_down_changes_nothing",
        "self.trajectory.append(release)\n"
        "        apply_release(self.space, self.trajectory, release, defer=self.defer)",
        "log, path = self.trajectory, self.trajectory.path\n"
        "        log.path = None\n"
        "        log.append(release)\n"
        "        apply_release(self.space, log, release, defer=self.defer)\n"
        "        log.path = path\n"
        "        log.append(log.releases.pop())"),
    Bug("checkpoint_unsettled",
        "A checkpoint's weights are saved while an update is still to be made.",
        "hf_dpzero/training/trainer.py",
        "tests/estimators/test_deferred_updates.py::test_a_checkpoint_of_a_deferring_run_holds_theta",
        "self.method.settle_()\n"
        '        folder = Path(self._get_output_dir(trial=trial)) / '
        'f"checkpoint-{self.state.global_step}"\n'
        "        super()._save_checkpoint(model, trial)",
        'folder = Path(self._get_output_dir(trial=trial)) / '
        'f"checkpoint-{self.state.global_step}"\n'
        "        super()._save_checkpoint(model, trial)\n"
        "        self.method.settle_()",
        ("hf_dpzero/estimators/deferred_updates.py",
        "register_state_dict_pre_hook(self._settle)",
        "register_state_dict_pre_hook(lambda *_: None)")),
    Bug("secret_folder_shipped",
        "A push to the Hub copies what lies under `_private`.",
        "hf_dpzero/reporting/hub.py", "tests/reporting/test_hub.py",
        "for path in _copied_files(source):",
        'for path in [*_copied_files(source), *source.glob("_private/*")]:'),
    Bug("wrong_shards",
        "Every process takes the first one's microbatches, so examples count twice.",
        "hf_dpzero/training/batches.py",
        "tests/training/test_distributed.py::test_one_process_equals_several_bit_for_bit",
        "self.shapes.dealt(chosen, self.share, self.shares, entropy)",
        "self.shapes.dealt(chosen, 0, self.shares, entropy)"),
    Bug("vertex_range_of_one_score",
        "A vertex draw is accounted with the move of one score and not with the range of all moves.",
        "hf_dpzero/privacy/mechanisms/vertex.py", "tests/privacy/test_vertex.py",
        "(1 if self.one_sided else 2)",
        "(1 if self.one_sided else 1)"),
    Bug("vertices_of_one_player",
        "Only the vertices of one player are counted, as in the paper on saddle points.",
        "hf_dpzero/papers/saddle_point_plans.py",
        "tests/papers/test_saddle_point.py::test_vertices_after_a_batch_are_counted_for_both_players",
        "each = self.players * (self.vertices + 1)",
        "each = self.vertices + 1"),
)
# fmt: on


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
    for file, old, new in filter(None, ((bug.file, bug.old, bug.new), bug.also)):
        source = (copy / file).read_text(encoding="utf-8")
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
