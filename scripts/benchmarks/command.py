"""Options of `step` and `memory`, and tables for people."""

from __future__ import annotations

import argparse
import contextlib
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

import hf_dpzero
from scripts.benchmarks.arguments import add_fields
from scripts.benchmarks.capacity import CapacityTable, capacity, capacity_table
from scripts.benchmarks.fixed import FixedBench, fixed_table, run_fixed
from scripts.benchmarks.memory import measure_memory, peak_bytes
from scripts.benchmarks.settings import CHOICES, PHASES, StepBench
from scripts.benchmarks.shapes import PUBLISHED, SHAPES
from scripts.benchmarks.timing import measure_time


def run_step(bench: StepBench) -> dict[str, Any]:
    """All measurements with what is needed to read them: settings, machine, versions."""
    memory = measure_memory(bench) if bench.memory else {}
    known = _cpu("flags|Features").split()
    machine = _cpu("model name") or platform.processor() or platform.machine()
    if torch.device(bench.device).type == "cuda":
        machine = torch.cuda.get_device_name(bench.device)
    modules = {m.__name__: m.__version__ for m in (hf_dpzero, torch, numpy, transformers)}
    return {
        **measure_time(bench),
        **memory,
        "settings": asdict(bench),
        "threads": torch.get_num_threads(),
        "machine": machine,
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in known],
        "versions": {"python": platform.python_version(), **modules},
    }


def _cpu(field: str) -> str:
    """What Linux says about the CPU; "" elsewhere."""
    with contextlib.suppress(OSError):
        if match := re.search(rf"(?:{field})\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    return ""


INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8",
                    "sve", "asimd", "bf16")  # fmt: skip
"""Those that decide how fast kernels are on a CPU, as Linux names them."""


# ---------------------------------------------------------------- the table of `step`


def table(result: Mapping[str, Any]) -> str:
    """The result for people: one line a measurement."""
    s, seconds = result["settings"], result["seconds"]
    directions = f"{s['direction']}, K = {s['num_directions']}, " * (s["method"] != "dp-adamw")
    directions += "forward differences, " * (s["differences"] == "forward")
    how = [s["dtype"], *(["load_in_4bit"] if s["load_in_4bit"] else [])]
    how += [f"lora_rank={s['lora_rank']}"] if s["lora_rank"] else []
    lines = [
        f"{s['shape']} {' '.join(how)}, {s['batch_size']} x {s['seq_length']} tokens, "
        f"{directions}d = {result['dimension']:,}",
        f"{result['machine']} ({', '.join(result['instruction_sets']) or 'instruction sets unknown'}), "
        f"{result['threads']} threads, {s['device']}",
    ]
    if s["method"] == "dpzero" and not s["one_batch"]:
        lines.append(
            f"private settings: Poisson batches in passes of {result['rows_per_pass']:.1f} rows on "
            f"average, of which {100 * result['blank_share']:.0f} % were blanks; the bare passes run "
            "them too"
        )
    forwards = f"{2 * s['num_directions']} bare forward passes"
    lines += ["", f"{forwards:<28}{seconds['two_forwards']:>9.3f} s"]
    if s["method"] != "reference":
        lines.append(_ratio_line(f"{s['method']} step", "step", "", result))
    if "reference" in seconds:
        lines.append(_ratio_line("published reference loop", "reference", "reference_", result))
    if "marginal_ratio_per_direction" in result:
        one, ratio = result["seconds_per_direction"], result["marginal_ratio_per_direction"]
        lines.append(f"{'each further direction':<28}{one:>9.3f} s  time x {ratio:.2f}")
    if "ratio_to_central" in result:
        taken, ratio = seconds["central_step"], result["ratio_to_central"]
        lines.append(
            f"{'central differences':<28}{taken:>9.3f} s  the step takes {ratio:.2f} of it"
        )
    for part, taken in result.get("breakdown", {}).items():
        lines.append(f"{'  of the step: ' + part:<28}{taken:>9.3f} s")
    if "strategy" in result:
        count = result["bytes_per_parameter"]
        lines.append(f"{'weight traffic':<28}{count:>9.2f} bytes a parameter, {result['strategy']}")
    for name in ("restore_error", "restore_error_after_3_cycles"):
        if result.get(name) is not None:
            lines.append(f"{name.replace('_', ' '):<28}{result[name]:>9.2g}")
    return "\n".join(lines + result.get("notes", []))


def _ratio_line(title: str, name: str, prefix: str, result: Mapping[str, Any]) -> str:
    low, middle, high = result[f"{prefix}ratio_quartiles"]
    memory = result.get(f"{prefix}peak_memory_over_inference")
    used = "" if memory is None else f"  memory x {memory:.2f}"
    spread = f"(quartiles {low:.2f} to {high:.2f})"
    seconds = result["seconds"][name]
    return f"{title:<28}{seconds:>9.3f} s  time x {middle:.2f} {spread}{used}"


# ---------------------------------------------------------------- options


def build_parser() -> argparse.ArgumentParser:
    """The fields of `StepBench` and `CapacityTable` as options, and --json."""
    summary = (sys.modules["scripts.benchmarks"].__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks", description=summary)
    commands = parser.add_subparsers(dest="what", required=True)
    step = commands.add_parser("step", help="time and memory of one step", allow_abbrev=False)
    memory = commands.add_parser("memory", help="what fits in memory", allow_abbrev=False)
    fixed = commands.add_parser("fixed", help="a step's cost beside its model", allow_abbrev=False)
    shapes = {"choices": SHAPES, "metavar": f"{{{','.join(PUBLISHED)}}}"}
    step.add_argument("--shape", default=StepBench.shape, **shapes)
    memory.add_argument("--shapes", default=PUBLISHED, nargs="+", **shapes)
    add_fields(step, StepBench, CHOICES, skip=("shape", "memory"))
    add_fields(memory, CapacityTable, CHOICES, skip=("shapes",))
    add_fields(fixed, FixedBench)
    step.add_argument("--no_memory", action="store_true", help="skip the memory measurement")
    step.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    for command in (step, memory, fixed):
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: 2 for a mistake in what was asked."""
    try:
        print(_run(**vars(build_parser().parse_args(argv))))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(what: str, json: bool, **settings: Any) -> str:
    """The result of a command: JSON or a table."""
    if what == "fixed":
        result = run_fixed(FixedBench(**settings))
        return dumps(result, indent=1) if json else fixed_table(result)
    if what == "memory":
        asked = CapacityTable(**{**settings, "shapes": tuple(settings["shapes"])})
        rows = capacity(asked)
        return dumps(rows, indent=1) if json else capacity_table(asked, rows)
    phase = settings.pop("phase")
    bench = StepBench(memory=not settings.pop("no_memory"), **settings)
    if phase is not None:
        return dumps({"peak_bytes": peak_bytes(bench, phase)})
    result = run_step(bench)
    return dumps(result, indent=1) if json else table(result)
