"""Schedules as settings write them: `exp(gamma=0.99)`, a list, or a file of numbers.

    uniform                        constant noise, the default
    exp(gamma=0.99)                noise falls by gamma^(1/4) a step
    gd(kappa=20)                   the same with gamma = 1 - 1/kappa (any schedule takes kappa or gamma)
    momentum(kappa=20, beta=0.9)   for updates with momentum
    learning_rate(gamma=0.99)      for the run's own learning-rate schedule
    subsampled(gamma=0.99)         the same, where steps see a small part of the data
    1.2,1.1,1.0 or levels.json     relative noise of each step

Clips and smoothings: `linear(0.1)` and `exp(0.1)` go from the setting to a tenth of it, or one factor
for each step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import TrainingArguments
from transformers.utils import logging

from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.schedules import (
    NOISE_SCHEDULES,
    Factors,
    Given,
    NoiseSchedule,
    factors_from_dict,
    noise_schedule_from_dict,
)
from hf_dpzero.privacy.words import gain_against_uniform
from hf_dpzero.values import listed

if TYPE_CHECKING:
    from hf_dpzero.settings.config import DPZeroConfig

logger = logging.get_logger(__name__)

_CALL = re.compile(r"\s*([a-z_]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_ITEM = re.compile(r"\s*-\s+")  # of a YAML list; a sign has its number right behind it
_SUFFIXES = (".json", ".csv", ".txt", ".yaml", ".yml")
_NOISE = ("uniform", "gd", *(name for name in NOISE_SCHEDULES if name != Given.name))
_FOLLOW_RATE = ("learning_rate", "subsampled")


def noise_schedule_of(config: DPZeroConfig, steps: int) -> NoiseSchedule | None:
    """The schedule that `config.schedules.noise` names.

    Args:
      config: a `DPZeroConfig`; `lr_scheduler_type` and the warm-up belong to schedules that follow them.
      steps: T.

    Returns:
      None for constant noise.

    Raises:
      ValueError: it cannot be read, or its parameters are out of range.
    """
    values = _values("schedules.noise", config.schedules.noise)
    if values is None or values["name"] == "uniform":
        return None
    if values["name"] not in _NOISE and "levels" not in values:
        raise ValueError(
            f"schedules.noise={config.schedules.noise!r} is unknown; use one of {', '.join(_NOISE)}, or "
            "the noise of each step: a list of numbers, or a file of them."
        )
    if values["name"] == "gd":
        values["name"] = "exp"
    if (kappa := values.pop("kappa", None)) is not None:
        if "gamma" in values:
            raise ValueError("schedules.noise has both kappa and gamma = 1 - 1/kappa; give one.")
        if not kappa > 1:
            raise ValueError(
                f"schedules.noise has kappa={kappa}: a condition number above 1 is needed (at 1 each "
                "step forgets all noise before it)."
            )
        values["gamma"] = 1 - 1 / kappa
    if values["name"] in _FOLLOW_RATE:
        if own := {"learning_rate", "warmup_steps"} & values.keys():
            raise ValueError(
                f"schedules.noise={config.schedules.noise!r} has {min(own)!r}, which it takes from "
                "lr_scheduler_type and warmup_steps: leave it out."
            )
        values["learning_rate"] = str(
            getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type)
        )
        values["warmup_steps"] = TrainingArguments.get_warmup_steps(config, steps)
    return noise_schedule_from_dict(values)


def factors_of(name: str, text: str | None) -> Factors | None:
    """The schedule that a setting such as `schedules.clip` names; None for a constant.

    Raises:
      ValueError: it cannot be read, or its numbers are out of range.
    """
    values = _values(name, text)
    if values is None or values["name"] in ("constant", "uniform"):
        return None
    try:
        return factors_from_dict(values)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from None


def smoothing_of_steps(config: DPZeroConfig, steps: int) -> Callable[[int], float] | None:
    """lambda of each step.

    Returns:
      step -> lambda; None for one that stays.

    Raises:
      ValueError: a factor above 1, or not one for each step.
    """
    schedule = factors_of("schedules.smoothing", config.schedules.smoothing)
    if schedule is None:
        return None
    sizes = (config.smoothing * schedule.factors(steps)).tolist()
    if max(sizes) > config.smoothing:
        raise ValueError(
            f"schedules.smoothing={config.schedules.smoothing!r} raises the smoothing to "
            f"{max(sizes):g}: set smoothing to the largest value, and give factors of at most 1."
        )
    return sizes.__getitem__


def check_steps(plan: PrivacyPlan) -> None:
    """Refuses schedules that leave the range of a clip or a noise multiplier in some step.

    Raises:
      ValueError: says which step; nothing was spent yet.
    """
    sizes: list[tuple[str, NoiseSchedule | Factors, np.ndarray]] = []
    if plan.noise_schedule is not None:  # a number for each step, of which there may be a billion
        sizes.append(("noise", plan.noise_schedule, plan.multipliers))
    if plan.clip_schedule is not None:
        sizes.append(("clip", plan.clip_schedule, plan.clip_schedule.factors(plan.steps)))
    for name, schedule, values in sizes:
        # The extremes decide: ranges are intervals, and a billion mechanisms are too many to make.
        for step in (int(values.argmin()), int(values.argmax())):
            try:
                plan.mechanism_at(step)
            except ValueError as error:
                raise ValueError(f"schedules.{name}={schedule}, step {step}: {error}") from None


def judge_schedule(plan: PrivacyPlan, delta: float) -> None:
    """Logs what a plan's noise schedule is worth; a warning where constant noise would be better."""
    if plan.noise_schedule is None or not plan.private:
        return
    gain = gain_against_uniform(plan, delta)
    words = f"schedules.noise={plan.noise_schedule}: its noise counts {1 / gain:.3g} of constant noise's"
    if gain < 1:
        logger.warning(
            f"{words}, which is more, at sampling probability {plan.sampler.sampling_probability:.3g}: "
            "use schedules.noise='subsampled(gamma=..)', a larger batch, or no schedule."
        )
    else:
        logger.info(words)


def _values(name: str, text: Any) -> dict[str, Any] | None:
    """Name and parameters as a plan's JSON has them."""
    if text is None:
        return None
    if isinstance(text, list | tuple):
        return {"name": "given", "levels": tuple(text)}
    text = str(text).strip()
    if text.endswith(_SUFFIXES):  # by its name: a file that is missing is no formula
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}={text!r} cannot be read: {error}") from None
        # A list of JSON or YAML, or numbers a line or between commas.
        items = [_ITEM.sub("", line).strip("[], \t") for line in lines]
        return {"name": "given", "levels": _numbers(name, text, ",".join(filter(None, items)))}
    call = _CALL.fullmatch(text)
    if call is None:
        return {"name": "given", "levels": _numbers(name, text, text)}
    found: dict[str, Any] = {"name": call[1]}
    for i, part in enumerate(filter(None, map(str.strip, (call[2] or "").split(",")))):
        key, equals, value = part.partition("=")
        if not equals and i == 0:
            key, value = ("end" if name != "schedules.noise" else "gamma"), part
        try:
            found[key.strip()] = float(value)
        except ValueError:
            raise ValueError(
                f"{name}={text!r}: {part!r} is no number; write it as exp(gamma=0.99)."
            ) from None
    return found


def _numbers(name: str, given: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(item) for item in listed(text))
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}={given[:80]!r} is no schedule: write exp(gamma=0.99), one number for each step "
            "between commas, or the name of a file with them."
        ) from None
