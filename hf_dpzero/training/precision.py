"""Autocast for private steps: the same arithmetic in every forward pass, with no weight kept over.

Autocast keeps its low-precision copies of the weights while its outermost block lasts. A forward pass
at another perturbation would then see the old weights, and both signs of a pair the same ones; no
copy is used twice here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def uncached_autocast(accelerator: Any) -> contextlib.AbstractContextManager[None]:
    """The autocast that `accelerator` is set to (none, perhaps), which keeps no copies of weights.

    Accelerate puts it around `model.forward` as well, but only once training has been prepared; this
    one is also there for what is checked before.
    """
    from accelerate.utils import AutocastKwargs

    if accelerator.autocast_handler is None:
        accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    accelerator.autocast_handler.cache_enabled = False
    return accelerator.autocast()


def check_mixed_precision(args: Any, device_type: str) -> None:
    """Refuses arithmetic that `args` do not show or that is too coarse.

    Args:
      args: `TrainingArguments`; `mixed_precision` also holds what `accelerate launch` asks for.
      device_type: of the training device.

    Raises:
      ValueError: autocast around the call, or a mixed precision other than "no" and "bf16".
    """
    if torch.is_autocast_enabled(device_type):
        raise ValueError(
            "train() was called under torch.autocast, which keeps copies of the weights that no "
            "perturbation reaches: call it outside, with bf16=True."
        )
    if args.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={args.mixed_precision!r} (accelerate's configuration or "
            "ACCELERATE_MIXED_PRECISION) is too coarse for finite differences: use 'bf16' or 'no'."
        )
