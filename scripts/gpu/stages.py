"""The stages in order: what a first hour on a GPU should find out first, the dearest last."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.gpu import device_tests, passes, profile, rest, steps
from scripts.gpu.results import Item

STAGES = {
    "kernels": "tests marked gpu: kernels and offload against plain torch, bit for bit",
    "passes": "forward passes: rows in other places and beside other rows",
    "steps": "private step over its forward passes, peak memory, K = 1 and 16",
    "profile": "where one step of OPT-13B spends host and device: kernels, launches, Python, waits",
    "rest": "fixed cost, weight decay, float32, offload over PCIe, digests",
    "differences": "forward and central differences on SST-2, K = 16; needs a packed file",
    "sst2": "SST-2 with all parameters of MiniLM: DPZero, K = 1, 16, 64; needs a packed file",
}
PACKED = ("differences", "sst2")
"""Stages that need a packed file."""
UNASKED = [name for name in STAGES if name not in PACKED]
"""Stages of a run that names none."""


def items_of(stage: str, device: str, data: Path, dry_run: bool) -> Iterator[Item]:
    """The items of a stage.

    Args:
      stage: key of `STAGES`.
      device: torch device.
      data: the packed file.
      dry_run: tiny sizes.
    """
    if stage == "kernels":
        return device_tests.items(dry_run)
    if stage in PACKED:
        from scripts.gpu import differences, sst2  # load transformers

        return (sst2 if stage == "sst2" else differences).items(data, device, dry_run)
    kinds = {"passes": passes, "steps": steps, "profile": profile, "rest": rest}
    items: Iterator[Item] = kinds[stage].items(device, dry_run)
    return items


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
