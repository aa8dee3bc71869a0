"""`hf-dpzero bench`: what a DPZero step costs, in units of the forward passes that it needs.

`bench step` measures time, memory and exactness of one step on random weights of a named
architecture; bare forward passes and whole steps take turns in one process, so that other load on
the machine falls on both. `bench memory` says what fits: for every shape the peak memory of
inference, DPZero, the published loop and first-order private training.
"""

from hf_dpzero.experiments.memory.shapes import SHAPES, build_batch, build_config, build_model
from scripts.benchmarks.command import build_parser, main
from scripts.benchmarks.memory import peak_bytes
from scripts.benchmarks.settings import METHODS, PHASES, StepBench
from scripts.benchmarks.timed_steps import FirstOrderStep, Forwards, ReferenceStep, Step

__all__ = [
    "METHODS",
    "PHASES",
    "SHAPES",
    "FirstOrderStep",
    "Forwards",
    "ReferenceStep",
    "Step",
    "StepBench",
    "build_batch",
    "build_config",
    "build_model",
    "build_parser",
    "main",
    "peak_bytes",
]
