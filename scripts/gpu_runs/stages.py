"""The stages in order: what only a GPU can tell, the dearest last."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.gpu_runs import device_tests, passes, steps
from scripts.gpu_runs.results import Item

STAGES = {
    "kernels": "tests marked gpu: the Triton kernels against plain torch, bit for bit",
    "sharding": "tests marked gpu: sharding, offload, layers one by one",
    "passes": "forward passes: what one costs, and rows in other places and beside other rows",
    "steps": "private step over two forward passes, peak memory, beside the published loop",
    "sst2": "SST-2 with all parameters of MiniLM: DPZero against DP-AdamW",
    "steps-64-rows": "the private step of batches of 64 rows",
    "steps-one-batch": "the step on one full microbatch",
    "steps-whole-model": "the private step with a copy of the weights",
}


def items_of(
    stage: str, device: str, data: Path, dry_run: bool, rate_factor: float = 1.0
) -> Iterator[Item]:
    """The items of a stage.

    Args:
      stage: key of `STAGES`.
      device: torch device.
      data: the packed file of `sst2`.
      dry_run: tiny sizes.
      rate_factor: that learning rates of `sst2` are multiplied by.
    """
    if stage in ("kernels", "sharding"):
        return device_tests.items(stage == "sharding", dry_run)
    if stage == "sst2":
        from scripts.gpu_runs import sst2  # loads transformers

        return sst2.items(data, device, dry_run, rate_factor)
    if stage == "passes":
        return passes.items(device, dry_run)
    return steps.items(stage, device, dry_run)


def machine(device: str) -> dict[str, Any]:
    """What figures depend on: the GPU, its driver, and versions."""
    import torch

    found: dict[str, Any] = {"device": device, "python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "accelerate"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"name": properties.name, "memory": properties.total_memory}
        found |= {"driver": _driver(), "cuda": torch.version.cuda}
    else:
        found["name"] = platform.processor() or platform.machine()
    return found


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.strip().splitlines()[0] if said.strip() else None
