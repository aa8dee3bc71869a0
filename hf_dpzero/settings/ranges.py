"""Ranges of the numbers in a `DPZeroConfig`, and values that float32 cannot carry."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from transformers.utils import logging

from hf_dpzero.settings.kinds import check_kinds

logger = logging.get_logger(__name__)

FINEST_SMOOTHING = 1e-6
"""Below it, rounding in float32 is a large part of a finite difference."""


MOST_DIRECTIONS = 1 << 16
"""In one step; each costs two forward passes."""


class Range(NamedTuple):
    """Allowed numbers, and how an error says so."""

    holds: Callable[[float], bool]
    words: str


_POSITIVE = Range(lambda x: 0 < x < math.inf, "a finite number above 0")
_NOT_NEGATIVE = Range(lambda x: 0 <= x < math.inf, "a finite number of at least 0")
_COUNT = Range(lambda x: 1 <= x < math.inf and x == int(x), "an integer of at least 1")
_INTERVAL = Range(
    lambda x: 0 < x < 1 or _COUNT.holds(x),
    "an integer of at least 1, or a share of the steps below 1 (to switch it off, the strategy is 'no')",
)
_SHARE = Range(lambda x: 0 < x < 1, "a number in (0, 1)")
_BELOW_ONE = Range(lambda x: 0 <= x < 1, "a number in [0, 1)")

RANGES: Mapping[str, Range] = {
    "clip": _POSITIVE,
    "clip_quantile": _SHARE,
    "clip_learning_rate": Range(lambda x: 0 <= x <= 10, "a number in [0, 10]"),
    "clip_count_noise": _POSITIVE,
    "clip_stability": _POSITIVE,
    "clip_groups": _COUNT,
    "group_loss_bound": _POSITIVE,
    "group_rate": _POSITIVE,
    "group_budget": _SHARE,
    "group_draws": _COUNT,
    "smoothing": Range(lambda x: 0 < x <= 1e3, "a finite number above 0, at most 1000; try 1e-3"),
    "expected_batch_size": _POSITIVE,
    "target_epsilon": _POSITIVE,
    "noise_multiplier": _NOT_NEGATIVE,
    "num_directions": Range(
        lambda x: _COUNT.holds(x) and x <= MOST_DIRECTIONS, "an integer of 1 to 65536"
    ),
    "direction_parallel_size": _COUNT,
    "microbatch_size": _COUNT,
    "max_length": _COUNT,
    "max_batch_size": _COUNT,
    "noise_bands": _COUNT,
    "hold_direction_for": _COUNT,
    "momentum": _BELOW_ONE,
    "update_window": _COUNT,
    "max_grad_norm": _NOT_NEGATIVE,
    "learning_rate": Range(lambda x: 0 <= x <= 1e6, "a number in [0, 1e6]"),
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "adam_epsilon": _NOT_NEGATIVE,
    "label_smoothing_factor": _BELOW_ONE,
    "warmup_steps": Range(
        lambda x: 0 <= x < 1 or _COUNT.holds(x),
        "an integer of at least 0, or a share of the steps below 1",
    ),
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "eval_steps": _INTERVAL,
    "save_steps": _INTERVAL,
    "logging_steps": _INTERVAL,
    "eval_delay": _NOT_NEGATIVE,
    "save_total_limit": Range(_COUNT.holds, "an integer of at least 1; leave it out to keep all"),
    "max_steps": Range(
        lambda x: x == -1 or _COUNT.holds(x),
        "an integer of at least 1, or -1 for num_train_epochs",
    ),
}


def check_ranges(config: Any) -> None:
    """Refuses numbers out of range; warns of a smoothing that float32 hardly resolves.

    Args:
      config: a `DPZeroConfig`; a field that may be None and is, is not looked at.

    Raises:
      ValueError: names one field, its value and what it must be.
    """
    check_kinds(config)
    needed = {field.name for field in dataclasses.fields(config) if field.default is not None}
    for name, allowed in RANGES.items():
        value = getattr(config, name)
        if value is not None or name in needed:
            _check(name, value, allowed)
            if allowed is _COUNT or name == "num_directions":
                setattr(config, name, int(value))
    if config.max_steps == -1:
        _check("num_train_epochs", config.num_train_epochs, _POSITIVE)
    _check_target_delta(config)
    _check_schedule(config)
    if config.smoothing < FINEST_SMOOTHING and not config.first_order:
        logger.warning(
            f"smoothing={config.smoothing} is finer than float32 resolves: losses near 1 are rounded to "
            f"6e-8, so rounding moves a finite difference by about {6e-8 / config.smoothing:.2g}, and "
            "weights near 1 may not move at all. Use at least 1e-5."
        )


def check_warmup(config: Any, steps: int) -> None:
    """Refuses a warmup that outlasts the run.

    Args:
      config: a `DPZeroConfig`.
      steps: T.

    Raises:
      ValueError: says both.
    """
    if config.warmup_steps > steps:
        raise ValueError(
            f"warmup_steps={config.warmup_steps} is more than the run's {steps} steps, so learning_rate "
            "would never be reached: lower it, or give a share of the steps, e.g. 0.1."
        )


def _check(name: str, value: Any, allowed: Range) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not allowed.holds(float(value)):  # NaN fails every comparison
        raise ValueError(f"{name}={value!r} must be {allowed.words}.")


def _check_target_delta(config: Any) -> None:
    delta, pure = config.target_delta, config.noise_distribution == "laplace"
    if delta is not None and not (pure and delta == 0):
        _check("target_delta", delta, Range(_SHARE.holds, "a number in (0, 1), e.g. 1e-5"))


def _check_schedule(config: Any) -> None:
    if config.max_steps > 0:
        check_warmup(config, config.max_steps)
    if config.learning_rate == 0:
        logger.warning("learning_rate=0: no step moves the weights, and the budget is spent.")
    decay = (config.learning_rate or 0.0) * config.weight_decay
    if decay >= 1:
        raise ValueError(
            f"learning_rate={config.learning_rate} times weight_decay={config.weight_decay} is "
            f"{decay:g}: a step would decay the weights through zero; their product must be below 1."
        )
