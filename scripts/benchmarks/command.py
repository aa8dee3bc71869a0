"""Options of `step` and `memory`, and tables for people."""

from __future__ import annotations

import argparse
import contextlib
import platform
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from json import dumps
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

import hf_dpzero
from scripts.benchmarks.capacity import CapacityTable, capacity, capacity_table
from scripts.benchmarks.memory import measure_memory, peak_bytes
from scripts.benchmarks.settings import CHOICES, PHASES, StepBench
from scripts.benchmarks.shapes import PUBLISHED, SHAPES
from scripts.benchmarks.timing import measure_time


def run_step(bench: StepBench) -> dict[str, Any]:
    """All measurements with what is needed to read them: settings, machine, versions."""
    memory = measure_memory(bench) if bench.memory else {}
    modules = {m.__name__: m.__version__ for m in (hf_dpzero, torch, numpy, transformers)}
    return {
        **measure_time(bench),
        **memory,
        "settings": asdict(bench),
        "threads": torch.get_num_threads(),
        "machine": _processor(bench.device),
        "instruction_sets": instruction_sets(),
        "versions": {"python": platform.python_version(), **modules},
    }


def _processor(device: str) -> str:
    """The model name of what runs the steps."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        if match := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    return platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Those of the CPU that decide how fast kernels are, as Linux names them; [] where it does not."""
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "sve",
              "asimd", "bf16")  # fmt: skip
    with contextlib.suppress(OSError):
        if match := re.search(r"(?:flags|Features)\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return [name for name in wanted if name in match[1].split()]
    return []


# ---------------------------------------------------------------- the table of `step`


def table(result: Mapping[str, Any]) -> str:
    """The result for people: one line a measurement."""
    s, seconds = result["settings"], result["seconds"]
    forwards = f"{2 * s['num_directions']} bare forward passes"
    lines = [*_heading(result), "", f"{forwards:<28}{seconds['two_forwards']:>9.3f} s"]
    if s["method"] != "reference":
        lines.append(_ratio_line(f"{s['method']} step", "step", "", result))
    if "reference" in seconds:
        lines.append(_ratio_line("published reference loop", "reference", "reference_", result))
    return "\n".join(lines + _details(result))


def _heading(result: Mapping[str, Any]) -> list[str]:
    s = result["settings"]
    directions = f"{s['direction']}, K = {s['num_directions']}, " * (s["method"] != "dp-adamw")
    words = [word for word in ("load_in_4bit", "autocast", "compile") if s[word]]
    words += [f"lora_rank={s['lora_rank']}"] * bool(s["lora_rank"])
    how = [s["dtype"], *words, s["attention"]]
    return [
        f"{s['shape']} {' '.join(how)}, {s['batch_size']} x {s['seq_length']} tokens, "
        f"{directions}d = {result['dimension']:,}",
        f"{result['machine']} ({', '.join(result['instruction_sets']) or 'instruction sets unknown'}), "
        f"{result['threads']} threads, {s['device']}",
        *_rows(result),
    ]


def _rows(result: Mapping[str, Any]) -> list[str]:
    if result["settings"]["one_batch"] or result["settings"]["method"] != "dpzero":
        return []
    return [
        f"private settings: Poisson batches in passes of {result['rows_per_pass']:.1f} rows on average, "
        f"of which {100 * result['blank_share']:.0f} % were blanks; the bare passes run them too"
    ]


def _ratio_line(title: str, name: str, prefix: str, result: Mapping[str, Any]) -> str:
    low, middle, high = result[f"{prefix}ratio_quartiles"]
    memory = result.get(f"{prefix}peak_memory_over_inference")
    used = "" if memory is None else f"  memory x {memory:.2f}"
    spread = f"(quartiles {low:.2f} to {high:.2f})"
    seconds = result["seconds"][name]
    return f"{title:<28}{seconds:>9.3f} s  time x {middle:.2f} {spread}{used}"


def _details(result: Mapping[str, Any]) -> list[str]:
    """What only a DPZero or MeZO step has."""
    lines = []
    if "marginal_ratio_per_direction" in result:
        seconds, ratio = result["seconds_per_direction"], result["marginal_ratio_per_direction"]
        lines.append(f"{'each further direction':<28}{seconds:>9.3f} s  time x {ratio:.2f}")
    for part, seconds in result.get("breakdown", {}).items():
        lines.append(f"{'  of the step: ' + part:<28}{seconds:>9.3f} s")
    if "strategy" in result:
        count = result["bytes_per_parameter"]
        lines.append(f"{'weight traffic':<28}{count:>9.2f} bytes a parameter, {result['strategy']}")
    cycles = f"restore_error_after_{result['settings']['cycles']}_cycles"
    for name in ("restore_error", cycles):
        if result.get(name) is not None:
            lines.append(f"{name.replace('_', ' '):<28}{result[name]:>9.2g}")
    return lines + result.get("notes", [])


# ---------------------------------------------------------------- options


def build_parser() -> argparse.ArgumentParser:
    """The fields of `StepBench` and `CapacityTable` as options, and --json."""
    summary = (sys.modules["scripts.benchmarks"].__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks", description=summary)
    commands = parser.add_subparsers(dest="what", required=True)
    step = commands.add_parser("step", help="time and memory of one step", allow_abbrev=False)
    _add_shape(step, "--shape", default=StepBench.shape)
    _add_fields(step, StepBench, skip=("shape", "memory"))
    step.add_argument("--no_memory", action="store_true", help="skip the memory measurement")
    step.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    memory = commands.add_parser("memory", help="what fits in memory", allow_abbrev=False)
    _add_shape(memory, "--shapes", default=PUBLISHED, nargs="+")
    _add_fields(memory, CapacityTable, skip=("shapes",))
    for command in (step, memory):
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.add_argument(
            "--traceback", action="store_true", help="show where an error came from"
        )
    return parser


def _add_shape(parser: argparse.ArgumentParser, option: str, **settings: Any) -> None:
    parser.add_argument(option, choices=SHAPES, metavar=f"{{{','.join(PUBLISHED)}}}", **settings)


def _add_fields(parser: argparse.ArgumentParser, kind: Any, skip: Sequence[str]) -> None:
    """An option for each field of a dataclass, of its type; a flag for each bool."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        if field.name in skip:
            continue
        if hints[field.name] is bool:
            parser.add_argument(f"--{field.name}", action="store_true")
            continue
        types = [t for t in typing.get_args(hints[field.name]) if t is not type(None)]
        parser.add_argument(
            f"--{field.name}",
            type=types[0] if types else hints[field.name],
            default=field.default,
            choices=CHOICES.get(field.name),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: 2 for a mistake in what was asked."""
    arguments = vars(build_parser().parse_args(argv))
    traceback = arguments.pop("traceback")
    try:
        print(_run(**arguments))
    except (ValueError, OSError, ImportError) as error:
        if traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(what: str, json: bool, **settings: Any) -> str:
    """The result of a command: JSON or a table."""
    if what == "memory":
        asked = CapacityTable(**{**settings, "shapes": tuple(settings["shapes"])})
        rows = capacity(asked)
        return dumps(rows, indent=1) if json else capacity_table(asked, rows)
    phase = settings.pop("phase")
    bench = StepBench(memory=not settings.pop("no_memory"), **settings)
    if bench.threads is not None:
        torch.set_num_threads(bench.threads)
    if phase is not None:
        return dumps({"peak_bytes": peak_bytes(bench, phase)})
    result = run_step(bench)
    return dumps(result, indent=1) if json else table(result)
