"""Launches and settings of DeepSpeed are refused, with what serves instead.

ZeRO-1 and ZeRO-2 divide optimizer states and gradients, which zeroth-order training does not have.
ZeRO-3 divides the parameters, and gathers them by hooks of its engine; writes to gathered parameters
come from rank 0 alone. Plain data parallelism and FSDP2 do both jobs here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PLAIN = "accelerate launch --multi_gpu, one process a GPU"
_SHARDED = "accelerate launch --config_file configs/accelerate/fsdp2.yaml"
_ONE = "one process with offload (configs/accelerate/offload.yaml)"


def refuse_deepspeed(settings: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses DeepSpeed before anything asks for its package.

    Args:
      settings: `TrainingArguments.deepspeed`: None, a dictionary or the path of a JSON file.
      environment: of the process; `accelerate launch` asks for DeepSpeed there.

    Raises:
      ValueError: says what to use instead, by the stage of ZeRO.
    """
    launched = environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("1", "true", "yes")
    if not settings and not launched:
        return
    stage = _stage(settings)
    if stage is None:
        file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
        stage = _stage(file) if file not in ("", "none") else None
    if stage is None:
        named = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
        stage = int(named) if named.isdigit() else None
    asked = f"deepspeed={settings!r}" if settings else "distributed_type: DEEPSPEED"
    raise ValueError(f"{asked} {_words(stage)}")


def _words(stage: int | None) -> str:
    if stage == 3:
        return (
            "(ZeRO-3) divides the parameters in ways that the perturbation does not follow: FSDP2 does "
            f"that here ({_SHARDED}); or {_ONE}."
        )
    if stage is not None:
        return (
            f"(ZeRO-{stage}) divides gradients and optimizer states, and this training has none: use "
            f"plain data parallelism ({_PLAIN}), or, for a model that does not fit on one device, "
            f"FSDP2 ({_SHARDED})."
        )
    return (
        "wraps the model in an engine whose parameters the perturbation does not follow: use plain "
        f"data parallelism ({_PLAIN}), or, for a model that does not fit on one device, FSDP2 "
        f"({_SHARDED}) or {_ONE}."
    )


def _stage(settings: Any) -> int | None:
    """The stage of ZeRO that a configuration asks for; None if it does not say."""
    if isinstance(settings, (str, os.PathLike)):
        path = Path(settings)
        try:
            settings = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:
            return None
    zero = settings.get("zero_optimization") if isinstance(settings, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return stage if isinstance(stage, int) else None
