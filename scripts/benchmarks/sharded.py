"""Parameters in parts on several processes (FSDP2) beside one process with all of them.

    OMP_NUM_THREADS=1 python -m scripts.benchmarks.sharded --hidden 256 --layers 32 --repeats 15

Starts its own processes on CPUs (gloo). They measure in turns with the first alone, which holds the same
model whole. Prints one JSON object: bytes of parameters at rest and at the peak of a forward pass (what
modules can see: parts, and what is gathered; `with_buffers` whatever torch holds in a pass of one row,
buffers of messages included), and medians of the time of a perturbation (theta + lambda u, theta -
lambda u, theta) and of a step (two passes over every process' share of the rows, and the update);
`ratio` is parts over whole.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook
from transformers import RobertaConfig, RobertaForSequenceClassification

from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.parallel.fsdp import give_back, layer_classes
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.sharding import is_sharded, local
from scripts.benchmarks.arguments import in_processes

SMOOTHING, LEARNING_RATE = 1e-3, 1e-4


def main(arguments: list[str] | None = None) -> int:
    """Measures, in processes of its own; the first of them prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("hidden", 256), ("layers", 32), ("vocabulary", 1000), ("tokens", 16), ("rows", 8),
        ("processes", 2), ("repeats", 15),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--timeout", type=int, default=600, help="seconds")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        return _as_rank(options)
    given = sys.argv[1:] if arguments is None else arguments
    return max(
        in_processes(options.processes, "scripts.benchmarks.sharded", given, options.timeout)
    )


def _as_rank(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    found = measured(options)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=2), flush=True)
    dist.barrier()
    os._exit(0)  # some builds' gloo threads abort an ordinary interpreter exit


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, of the process with the largest where they differ."""
    first, count = dist.get_rank() == 0, options.processes
    batch = _rows(options)
    share = {name: value[dist.get_rank() :: count] for name, value in batch.items()}
    parts = Measured(_cut(_model(options)), share)
    whole = Measured(_model(options), batch) if first else None
    rounds: dict[str, list[Seconds]] = {"whole": [], "parts": []}
    for number in range(options.repeats + 1):
        for name, one in (("whole", whole), ("parts", parts)):
            dist.barrier()
            times = Seconds(0.0, 0.0, 0.0) if one is None else one.round(number)
            if number and (name == "parts" or first):
                rounds[name].append(Seconds(*map(_largest, times)) if name == "parts" else times)
            dist.barrier()
    found: dict[str, Any] = {"options": vars(options)}
    for name, one in (("whole", whole), ("parts", parts)):
        bytes_of = one.bytes if one is not None else dict.fromkeys(parts.bytes, 0)
        found[name] = {key: _largest(value) for key, value in bytes_of.items()}
    digest = digest_model(parts.model)  # every process lends its parts
    if whole is None:
        return found
    for name in ("whole", "parts"):
        medians = map(statistics.median, zip(*rounds[name], strict=True))
        found[name] |= {f"{what}_s": s for what, s in zip(Seconds._fields, medians, strict=True)}
    found["ratio"] = {key: found["parts"][key] / found["whole"][key] for key in found["whole"]}
    found["same_weights"] = digest == digest_model(whole.model)
    return found


class Seconds(NamedTuple):
    """Of a round: a perturbation, the same in processor time (others at work matter less), a step."""

    perturbation: float
    perturbation_cpu: float
    step: float


class Measured:
    """A model, whole or in parts, and what is done to it in a round.

    Args:
      model: cut or not.
      rows: this process' share of a batch.

    Attributes:
      bytes: of parameters, at rest and at the peak of a pass.
    """

    def __init__(self, model: nn.Module, rows: dict[str, Tensor]) -> None:
        self.model, self.rows = model.eval(), rows
        self.space = ParameterSpace.from_model(model, smoothing=SMOOTHING)
        objective = select_objective(model)

        def resharded(given: nn.Module, inputs: Any) -> Tensor:
            losses = objective(given, inputs)
            give_back(given)
            return losses

        self.differences = FiniteDifferences(
            model, self.space, resharded, SMOOTHING, strategy="whole_model"
        )
        self.space.snap_()
        self.bytes = self._memory()

    @torch.no_grad()
    def _memory(self) -> dict[str, float]:
        self.differences.evaluate(self.rows)  # FSDP sets itself up
        rest = seen = float(sum(local(p).nbytes for p in self.model.parameters()))

        def gathered(*_: Any) -> None:
            nonlocal seen
            more = (p.nbytes for p in self.model.parameters() if not is_sharded(p))
            seen = max(seen, rest + sum(more))

        few = {
            name: value[:1, :2] if value.dim() > 1 else value[:1]
            for name, value in self.rows.items()
        }
        grown = _allocated(lambda: self.differences.evaluate(few))
        if any(is_sharded(p) for p in self.model.parameters()):
            with _on_every_module(gathered):
                self.differences.evaluate(few)
        return {"rest_bytes": rest, "peak_bytes": seen, "peak_with_buffers_bytes": rest + grown}

    def round(self, number: int) -> Seconds:
        """Perturbs and restores, then takes a step."""
        start, busy = time.perf_counter(), time.process_time()
        for position in (((Direction(1, number), s),) for s in (SMOOTHING, -SMOOTHING)):
            self.space.move_to_(position)
        self.space.settle_()
        between, busy = time.perf_counter(), time.process_time() - busy
        direction = Direction(2, number)
        self.differences([self.rows], [direction])
        self.space.step_([direction], [LEARNING_RATE])
        return Seconds(between - start, busy, time.perf_counter() - between)


@contextlib.contextmanager
def _on_every_module(look: Callable[..., None]) -> Iterator[None]:
    """`look` is called after each module's forward, before FSDP gives its parameters back."""
    handle = register_module_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _allocated(work: Callable[[], object]) -> float:
    """Bytes that torch holds on the CPU at the peak of `work`, beyond those before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return float(max(itertools.accumulate((n for _, n in sorted(changes)), initial=0)))


def _model(options: argparse.Namespace) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RobertaForSequenceClassification(
            RobertaConfig(
                vocab_size=options.vocabulary,
                hidden_size=options.hidden,
                num_hidden_layers=options.layers,
                num_attention_heads=max(1, options.hidden // 64),
                intermediate_size=4 * options.hidden,
                max_position_embeddings=options.tokens + 2,
            )
        )
    return model.to(getattr(torch, options.dtype))


def _rows(options: argparse.Namespace) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, options.vocabulary, (options.rows, options.tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}


def _cut(model: nn.Module) -> nn.Module:
    """As Accelerate cuts it: layers, the token embedding, and what is left."""
    blocks = set(layer_classes(model))
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module)
    fully_shard(model.get_input_embeddings())  # type: ignore[operator]
    fully_shard(model)
    model.set_reshard_after_forward(True)  # type: ignore[operator]
    return model


def _largest(value: float) -> float:
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


if __name__ == "__main__":
    sys.exit(main())
