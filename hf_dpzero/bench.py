"""`hf-dpzero bench step`: what a DPZero step costs, in units of the two forward passes it needs.

Everything is measured in one run on random weights of a named architecture: bare forward passes and
whole steps (perturb, evaluate, clip, noise, log, update) take turns, so that other load on the
machine falls on both; a ratio is the median over the rounds of step over forwards. Beside them
stands the loop of the published MeZO and DPZero implementations, as a yardstick: directions drawn
again from a re-seeded generator, in four out-of-place passes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hf_dpzero
from hf_dpzero.directions import DISTRIBUTIONS, Direction
from hf_dpzero.estimator import FiniteDifferences, evaluation_mode
from hf_dpzero.mechanisms import Mechanism, NonPrivateMean, ScalarMechanism
from hf_dpzero.noise import SecureNoise
from hf_dpzero.objectives import PerExampleLoss, select_objective
from hf_dpzero.perturbation import ParameterSpace
from hf_dpzero.step import PrivateStep
from hf_dpzero.trajectory import Trajectory
from hf_dpzero.validation import select_trainable

SMOOTHING, LEARNING_RATE, CLIP = 1e-3, 1e-6, 50.0  # DPZero's RoBERTa-large settings
METHODS = ("dpzero", "mezo", "reference")
PHASES = ("inference", "step", "reference")
_KEY = 0x5EED_0F_BE7C4

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {
        "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536,
    },
    "roberta-base": {
        "model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514,
        "type_vocab_size": 1, "pad_token_id": 1,
    },
    "roberta-large": {
        "model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514,
        "type_vocab_size": 1, "pad_token_id": 1, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096,
    },
    "opt-125m": {"model_type": "opt"},
    "opt-1.3b": {
        "model_type": "opt", "hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192,
        "num_hidden_layers": 24, "num_attention_heads": 32,
    },
    "tiny": {
        "model_type": "bert", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 32,
    },
}  # fmt: skip
"""Configurations of the published checkpoints, where they differ from transformers' defaults."""


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """What `hf-dpzero bench step` measures; every field is an option of the command.

    Attributes:
      shape: key of `SHAPES`, as a two-class sequence classifier.
      method: `dpzero`; `mezo` (no clip, no noise); `reference` (only the published loop).
      direction: distribution of the directions.
      dtype: of the weights, `float32` or `bfloat16`.
      batch_size, seq_length: of the one microbatch.
      num_directions: K; the yardstick is then 2K forward passes.
      repeats: timed rounds, after one untimed.
      trainable: regular expression of the parameters that train; None for all.
      device: torch device.
      memory: measure peak memory as well (three more processes on the CPU).
    """

    shape: str = "roberta-base"
    method: str = "dpzero"
    direction: str = "rademacher"
    dtype: str = "float32"
    batch_size: int = 16
    seq_length: int = 64
    num_directions: int = 1
    repeats: int = 9
    trainable: str | None = None
    device: str = "cpu"
    memory: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_length", "num_directions", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1.")
        limit = build_config(self.shape).max_position_embeddings - 2
        if self.seq_length > limit:
            raise ValueError(
                f"seq_length={self.seq_length} is more than {self.shape} has positions for: "
                f"use at most {limit}."
            )


# ---------------------------------------------------------------- what is measured


def build_config(shape: str) -> Any:
    """The transformers configuration of a shape; nothing is downloaded."""
    from transformers import AutoConfig

    return AutoConfig.for_model(num_labels=2, **SHAPES[shape])


def build_model(bench: StepBench) -> nn.Module:
    """The shape's classifier with random weights, in eval mode."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(build_config(bench.shape))
    model = model.to(device=bench.device, dtype=getattr(torch, bench.dtype)).eval()
    select_trainable(model, bench.trainable)
    return model


def build_batch(bench: StepBench, vocabulary: int) -> dict[str, Tensor]:
    """One microbatch of random tokens without padding, the same each time."""
    generator = torch.Generator().manual_seed(0)
    size = (bench.batch_size, bench.seq_length)
    batch = {
        "input_ids": torch.randint(4, vocabulary, size, generator=generator),
        "attention_mask": torch.ones(size, dtype=torch.int64),
        "labels": torch.randint(0, 2, size[:1], generator=generator),
    }
    return {name: value.to(bench.device) for name, value in batch.items()}


class Forwards:
    """The yardstick: 2K bare forward passes at fixed weights."""

    def __init__(self, bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.count, self.model = 2 * bench.num_directions, model
        self.inputs = {name: value for name, value in batch.items() if name != "labels"}

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        for _ in range(self.count):
            self.model(**self.inputs)


class Step:
    """A whole training step, the one that the trainer takes, with the ledger in memory."""

    def __init__(self, bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.space = ParameterSpace.from_model(
            model, distribution=bench.direction, smoothing=SMOOTHING
        )
        self.space.snap_()
        header = {
            "direction_key": f"{_KEY:032x}",
            "num_directions": bench.num_directions,
            "weight_decay": 0.0,
            "replayable": True,
        }
        self.batch = batch
        self.step = PrivateStep(
            mechanism=_mechanism(bench),
            space=self.space,
            differences=FiniteDifferences(model, self.space, select_objective(model), SMOOTHING),
            noise=SecureNoise(),
            trajectory=Trajectory(header),
        )

    def __call__(self, step: int) -> None:
        self.step(self.step.trajectory.next_step, [self.batch], LEARNING_RATE)

    def restore_error(self) -> float:
        """max |theta after +lambda, -lambda, settle - theta before|: 0.0 if restoring is exact."""
        before = [tensor.detach().clone() for tensor in self.space.tensors]
        for sign in (1.0, -1.0):
            self.space.move_to_(((Direction(_KEY, 1 << 40), sign * SMOOTHING),))
        self.space.settle_()
        return _largest_difference(before, self.space.tensors)


def _mechanism(bench: StepBench) -> Mechanism:
    sizes: dict[str, Any] = {
        "expected_batch_size": bench.batch_size,
        "num_directions": bench.num_directions,
    }
    if bench.method == "mezo":
        return NonPrivateMean(**sizes)
    return ScalarMechanism(clip=CLIP, noise_multiplier=1.0, **sizes)


class ReferenceStep:
    """The published implementations' step: four passes, torch.normal, a new tensor in each.

    A generator of its own, re-seeded for each pass, stands for the global one of the original.
    The restore is not exact: run it last.
    """

    def __init__(self, bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.model, self.batch, self.count = model, batch, bench.num_directions
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.generator = torch.Generator(device=bench.device)
        self.objective: PerExampleLoss = select_objective(model)

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        for k in range(self.count):
            seed = step * self.count + k
            with evaluation_mode(self.model):
                value = self._difference(seed)
            self.add(seed, -LEARNING_RATE * value)

    def _difference(self, seed: int) -> float:
        self.add(seed, SMOOTHING)
        plus = self.objective(self.model, self.batch)
        self.add(seed, -2 * SMOOTHING)
        minus = self.objective(self.model, self.batch)
        self.add(seed, SMOOTHING)
        return float((plus - minus).div(2 * SMOOTHING).clamp(-CLIP, CLIP).mean())

    def add(self, seed: int, coefficient: float) -> None:
        """theta <- theta + coefficient * z(seed)."""
        self.generator.manual_seed(seed)
        for p in self.parameters:
            z = torch.normal(
                0.0, 1.0, p.shape, generator=self.generator, device=p.device, dtype=p.dtype
            )
            p.data = p.data + coefficient * z

    @torch.no_grad()
    def restore_error(self) -> float:
        """max |theta after +1, -2, +1 - theta before|: float rounding, which adds up over steps."""
        before = [p.detach().clone() for p in self.parameters]
        for times in (1, -2, 1):
            self.add(1 << 40, times * SMOOTHING)
        return _largest_difference(before, self.parameters)


def _largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    return max(float((a.detach().float() - b.float()).abs().max()) for b, a in pairs if b.numel())


# ---------------------------------------------------------------- time


def timed(work: Callable[[int], None], step: int, device: str) -> float:
    """Seconds of one call, the device's queue included."""
    _synchronize(device)
    start = time.perf_counter()
    work(step)
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def interleaved(bench: StepBench, works: Sequence[Callable[[int], None]]) -> list[list[float]]:
    """Seconds of each work in each round; they take turns, after one untimed round."""
    for work in works:
        work(0)
    rounds = [[timed(w, t + 1, bench.device) for w in works] for t in range(bench.repeats)]
    return [list(column) for column in zip(*rounds, strict=True)]


def measure_time(bench: StepBench) -> dict[str, Any]:
    """Times of forwards, step and reference, the restore errors and the dimension."""
    config = build_config(bench.shape)
    model, batch = build_model(bench), build_batch(bench, config.vocab_size)
    kinds: dict[str, type[Step | ReferenceStep]] = {
        "step": Step,
        "reference": ReferenceStep,
    }  # the inexact one last
    if bench.method == "reference":
        del kinds["step"]
    forwards, seconds = Forwards(bench, model, batch), {}
    ratios, errors = {}, {}
    for name, kind in kinds.items():
        work = kind(bench, model, batch)
        beside, own = interleaved(bench, [forwards, work])
        seconds[f"two_forwards_beside_{name}"], seconds[name] = beside, own
        ratios[name] = statistics.median(t / f for f, t in zip(beside, own, strict=True))
        errors[name] = work.restore_error()
    first = next(iter(kinds))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "ratio_to_two_forwards": ratios[first],
        "reference_ratio_to_two_forwards": ratios["reference"],
        "seconds": {"two_forwards": medians[f"two_forwards_beside_{first}"], **medians},
        "all_seconds": seconds,
        "restore_error": errors[first],
        "reference_restore_error": errors["reference"],
        "dimension": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


# ---------------------------------------------------------------- memory

_CPU_METHOD = (
    "peak resident bytes (VmHWM, reset after the model was built) of a fresh process for each phase, "
    "less what was resident before the model was built, libraries loaded"
)
_CUDA_METHOD = "torch.cuda.max_memory_allocated of each phase, weights included"


def measure_memory(bench: StepBench) -> dict[str, Any]:
    """Peak memory of inference, step and reference, and their ratios to inference.

    Each phase runs in a process of its own, so that none inherits another's caches.
    """
    phases = [p for p in PHASES if p != "step" or bench.method != "reference"]
    peaks = {phase: _in_fresh_process(bench, phase) for phase in phases}
    own = "reference" if bench.method == "reference" else "step"
    cuda = torch.device(bench.device).type == "cuda"
    return {
        "peak_memory_over_inference": peaks[own] / peaks["inference"],
        "reference_peak_memory_over_inference": peaks["reference"] / peaks["inference"],
        "peak_bytes": peaks,
        "memory_method": _CUDA_METHOD if cuda else _CPU_METHOD,
    }


def _in_fresh_process(bench: StepBench, phase: str) -> int:
    command = [sys.executable, "-m", "hf_dpzero.bench", "step", "--phase", phase, *_words(bench)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"measuring the memory of {phase} failed: {done.stderr.strip()[-500:]}")
    return int(json.loads(done.stdout)["peak_bytes"])


def _words(bench: StepBench) -> list[str]:
    values = {name: value for name, value in asdict(bench).items() if name != "memory"}
    return [w for name, v in values.items() if v is not None for w in (f"--{name}", str(v))]


def peak_bytes(bench: StepBench, phase: str) -> int:
    """Runs two rounds of one phase in this process and returns their peak memory in bytes."""
    _load_libraries(bench)
    before = _resident(bench.device)
    model, batch = build_model(bench), build_batch(bench, build_config(bench.shape).vocab_size)
    _forget_peak(bench.device)
    kinds: dict[str, Callable[..., Callable[[int], None]]] = {
        "inference": Forwards,
        "step": Step,
        "reference": ReferenceStep,
    }
    work = kinds[phase](bench, model, batch)
    for step in range(2):
        work(step)
    return _peak(bench.device) - before


def _load_libraries(bench: StepBench) -> None:
    """Code is no part of a step's memory: the noise library and the architecture's modules."""
    from transformers import AutoModelForSequenceClassification

    SecureNoise().gaussian(1e6, 1, 0)
    with torch.device("meta"):
        AutoModelForSequenceClassification.from_config(build_config(bench.shape))


def _resident(device: str) -> int:
    """Bytes resident now, as the baseline; none on a GPU, where only torch's own are counted."""
    if torch.device(device).type == "cuda":
        return 0
    _forget_peak(device)
    return _peak(device)


def _forget_peak(device: str) -> None:
    """Starts the peak anew where the platform can; elsewhere building the model counts as well."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        if found:
            return int(found[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ---------------------------------------------------------------- the command


def run_step(bench: StepBench) -> dict[str, Any]:
    """All measurements with what is needed to read them: settings, machine, versions."""
    memory = measure_memory(bench) if bench.memory else {}
    return {
        **measure_time(bench),
        **memory,
        "settings": asdict(bench),
        "threads": torch.get_num_threads(),
        "machine": machine(bench.device),
        "versions": versions(),
    }


def machine(device: str) -> str:
    """The processor's (or GPU's) model name."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    import transformers

    return {
        "hf_dpzero": hf_dpzero.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "transformers": transformers.__version__,
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for people: one line a measurement."""
    s, seconds = result["settings"], result["seconds"]
    forwards = f"{2 * s['num_directions']} bare forward passes"
    lines = [
        f"{s['shape']} {s['dtype']}, {s['batch_size']} x {s['seq_length']} tokens, "
        f"{s['direction']}, K = {s['num_directions']}, d = {result['dimension']:,}",
        f"{result['machine']}, {result['threads']} threads, {s['device']}",
        "",
        f"{forwards:<28}{seconds['two_forwards']:>9.3f} s",
    ]
    rows = [
        ("step", f"{s['method']} step", "ratio_to_two_forwards", "peak_memory_over_inference"),
        ("reference", "published reference loop", "reference_ratio_to_two_forwards",
         "reference_peak_memory_over_inference"),
    ]  # fmt: skip
    for name, title, ratio, memory in rows:
        if name in seconds:
            used = f"  memory x {result[memory]:.2f}" if memory in result else ""
            lines.append(f"{title:<28}{seconds[name]:>9.3f} s  time x {result[ratio]:.2f}{used}")
    lines.append(f"{'largest restore error':<28}{result['restore_error']:>9.2g}")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Options of `hf-dpzero bench`: the fields of `StepBench`, and --json."""
    parser = argparse.ArgumentParser(prog="hf-dpzero bench", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    step = commands.add_parser("step", help="time and memory of one step", allow_abbrev=False)
    shown = [name for name in SHAPES if name != "tiny"]
    choices = {"method": METHODS, "direction": DISTRIBUTIONS, "dtype": ("float32", "bfloat16")}
    step.add_argument(
        "--shape", choices=SHAPES, default=StepBench.shape, metavar=f"{{{','.join(shown)}}}"
    )
    for field in fields(StepBench):
        if field.name not in ("shape", "memory"):
            kind = type(field.default) if field.default is not None else str
            step.add_argument(
                f"--{field.name}", type=kind, default=field.default, choices=choices.get(field.name)
            )
    step.add_argument("--no_memory", action="store_true", help="skip the memory measurement")
    step.add_argument("--json", action="store_true", help="print JSON instead of a table")
    step.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `hf-dpzero bench ...`; `argv` is what follows the word bench."""
    arguments = vars(build_parser().parse_args(argv))
    phase, as_json = arguments.pop("phase"), arguments.pop("json")
    arguments["memory"] = not arguments.pop("no_memory")
    arguments.pop("what")
    bench = StepBench(**arguments)
    if phase is not None:
        print(json.dumps({"peak_bytes": peak_bytes(bench, phase)}))
        return 0
    result = run_step(bench)
    print(json.dumps(result, indent=1) if as_json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
