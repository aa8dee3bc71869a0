"""Kinds of those values in a `DPZeroConfig` that have no range: truth values, texts, seeds."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

TRUTH = ("reuse_frozen_prefix", "defer_updates", "log_private_diagnostics", "base_is_public")
SEEDS: Mapping[str, int] = {"seed": 32, "direction_key": 128, "insecure_noise_seed": 128}
"""Integers of at least 0, and their most bits."""

_METRIC_INPUTS = ("inputs", "loss")


def check_kinds(config: Any) -> None:
    """Refuses values of another kind than their field's, which would be taken for something else.

    Args:
      config: a `DPZeroConfig`; a field that may be None and is, is not looked at.

    Raises:
      ValueError: names one field, its value and what it must be.
    """
    for name in TRUTH:
        _check(config, name, isinstance(getattr(config, name), bool), "True or False")
    for name, bits in SEEDS.items():
        value = getattr(config, name)
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        holds = (value is None and name != "seed") or (whole and 0 <= value < 1 << bits)
        _check(config, name, holds, f"an integer of at least 0, below 2^{bits}")
    for name in ("trainable", "extends_run", "group_column", "output_dir"):
        value = getattr(config, name)
        text = isinstance(value, (str, os.PathLike) if name != "trainable" else str)
        empty = name != "output_dir" and text and not str(value)
        _check(config, name, value is None or (text and not empty), "a text, or left out")
    key = config.sampler_key
    hexadecimal = isinstance(key, str) and re.fullmatch("[0-9a-fA-F]{64}", key)
    if key is not None and not hexadecimal:  # not shown: it may be secret
        raise ValueError("sampler_key must be 64 hex digits; leave it out for a secret one.")
    given = config.include_for_metrics
    known = isinstance(given, (list, tuple)) and set(given) <= set(_METRIC_INPUTS)
    _check(config, "include_for_metrics", known or not given, "a list of 'inputs' and 'loss'")


def check_scheduler_settings(config: Any) -> None:
    """Refuses `lr_scheduler_kwargs` that the scheduler does not take.

    Args:
      config: a `DPZeroConfig` that Hugging Face's checks have passed.

    Raises:
      ValueError: names what it takes.
    """
    given, kind = config.lr_scheduler_kwargs or {}, config.lr_scheduler_type
    _check(config, "lr_scheduler_kwargs", isinstance(given, Mapping), "a mapping, {name: value}")
    schedule: Any = TYPE_TO_SCHEDULER_FUNCTION.get(kind)
    if schedule is None or not given:
        return
    parameters = inspect.signature(schedule).parameters.values()
    own = ("optimizer", "num_warmup_steps", "num_training_steps")
    takes = [p.name for p in parameters if p.name not in own]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for name in given:
        if name not in takes:
            raise ValueError(
                f"lr_scheduler_kwargs has {name!r}, and lr_scheduler_type={kind.value!r} takes "
                f"{', '.join(takes) or 'nothing'}: leave it out, or choose another schedule."
            )


def _check(config: Any, name: str, holds: bool, words: str) -> None:
    if not holds:
        raise ValueError(f"{name}={getattr(config, name)!r} must be {words}.")
