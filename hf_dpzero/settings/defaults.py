"""Settings that are chosen where the user gives none: learning rate, clip, number of directions.

Everything here follows from the plan, the settings and the shapes of the model, never from the data.

The learning rate: a step releases, along each direction, the mean clipped difference plus noise of
deviation sigma C / B, and moves the weights by alpha times that. One unit along a direction changes an
example's loss by about C, since C is where differences are clipped. After T steps the noise has moved
the weights along a direction by alpha (sigma C / B) sqrt(T), and a loss by C times that. The rate is
chosen such that this change is `NOISE_SHARE`, whatever the number of parameters:

    alpha = NOISE_SHARE w B / (sigma C^2 sqrt(T)),     w = sqrt(3) under a linear or cosine decay, else 1

(w: a rate that decays to zero adds up to a third of the variance). In these units the tuned recipes of
this project take 0.12 to 1, for a head of 770 weights, K = 64, as for all of RoBERTa-large, K = 1.

With little noise that rate has no end, and curvature bounds it: a step of alpha g along u lowers a loss
of slope g by alpha g^2 - alpha^2 g^2 u'Hu / 2: most at alpha u'Hu = 1, not at all from 2 on, and the K
directions of a step add up. For losses that are log-likelihoods u'Hu is near the mean of the examples'
(u'g_i)^2, and C bounds the norm of K such slopes of a typical example: u'Hu is about C^2 / K. So alpha
is at most `CURVED` K / C^2, which public numbers say before any row was seen. Where a unit along a
direction is known to change losses by more than C (`slope`), one C of both squares is that.

Both rules know nothing of the model. Where public rows' losses tell its slope and curvature
(`Landscape`), the rate is at most what gains most in the first step. The step is
alpha sum_k (g_k + e_k) u_k with the mean slopes g_k and e_k of variance s^2 / B + noise^2; over random
directions it gains

    alpha K g^2 - alpha^2 / 2 (K (g^2 + s^2 / B + noise^2) h + K (K - 1) g^2 R),

R = grad'H grad / |grad|^2, for the mean over pairs of directions of g_k g_l u_k'Hu_l is g^2 R. So

    alpha = g^2 / ((g^2 + s^2 / B + noise^2) h + (K - 1) g^2 R),

where R counts a quarter (`STEEP`). Clipping multiplies g and s by C / |x| and the noise not. h is at
least g^2 + s^2, what it is for the log-likelihood of a model that is right.

That gain is the first step's. T steps along K directions move each of d > K T weights at random, by
alpha (K T (g^2 + s^2 / B + noise^2))^(1/2), a root of 3 less where the rate falls to zero. Pretrained
weights may move by a share `MOVED` of their own size: at a third the accuracy of a small language model
goes up and down, however little its loss curved at first (docs/results.md). Of LoRA factors the
product B A may move by this share of the weight that it is added to; their slopes grow as they do. Fewer
weights than directions are learned, not moved at random, and a fresh head has further to go than
pretrained weights beside it.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from hf_dpzero.objectives.losses import base_model
from hf_dpzero.perturbation.sharding import own_class
from hf_dpzero.perturbation.trainable import is_prompt, is_trained
from hf_dpzero.privacy.correlated.correlation import run_deviation
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting.wording import RATE_FAR_OFF, RATE_OF_HEAD
from hf_dpzero.settings.nested import NESTED
from hf_dpzero.settings.setting import COUNT, refuse

if TYPE_CHECKING:
    from transformers.trainer_utils import SchedulerType

    from hf_dpzero.estimators.landscape import Landscape
    from hf_dpzero.settings.config import DPZeroConfig

NOISE_SHARE = 0.3
"""Change of an example's loss that the noise of the whole run may make along one direction."""

CURVED = 0.125
"""alpha u'Hu at most, at the first step. Six classes of questions like 0.12 to 0.3, and lose from 0.4
on; two that few steps tell apart like 0.06, and lose from 0.25 on, for C falls faster there."""

FOLLOWED, FOLLOWED_AT_LEAST = 0.15, 20
"""Share of the steps in which the rate follows an adaptive clip (alpha C^2 is constant); of a short run
so many steps, in which a clip falls to a seventh, but no more than half. Later the clip falls because
rows are learned, and a rate that followed it would grow without end: it follows only down to norms of
public rows at the start, where these are known."""

CLASSIC: dict[str, Any] = {
    "learning_rate": 5e-5, "clip": 50.0, "clipping": "fixed", "num_directions": 1,
    "expected_batch_size": 64.0,
}  # fmt: skip
"""What stands for None where nothing is chosen: Hugging Face's rate, the paper's K = 1."""

OF_GRADIENTS: dict[str, dict[str, float]] = {
    "dp-sgd": {"clip": 1.0, "learning_rate": 0.1}, "dp-adamw": {"clip": 1.0, "learning_rate": 5e-4},
}  # fmt: skip
"""What stands for None of private gradients, whose norms are about 1: middles of the usual grids (Li et
al. 2022, "Large language models can be strong differentially private learners", arXiv:2110.05679)."""

CHEAP, MANY = 1_000_000, 32
"""K is 32 where a direction takes so many multiplications a row, and halves as often as they double."""

LEAST_SLOPE, ALONG, STEEP = 0.25, (0.05, 0.5), 0.25
"""A slope's square counts as at least this share of its error in a batch, and the curvature along the
gradient as a share of that along a direction within these bounds, for few directions tell both roughly.
A quarter of it counts: a step too far along the gradient comes back, and what is learned beside it
gains."""

MOVED = 0.15
"""Random movement of the whole run, over the root mean square of the weights that are trained."""

POSITIONS = 128
"""Tokens of a text, or frames of a sound, that layers below a pooled vector see."""

FORWARD_FROM, FORWARD_SMOOTHING = 4, 1e-3
"""From so many directions on, and up to such a smoothing, differences are forward where nothing is said:
at equal K they learn as much there; at 1e-2 a head lost a point (docs/results.md)."""

FAR, LOST = 10.0, 50.0
"""A given rate that is off by more than `FAR` is spoken of; a script's that is too small by more than
`LOST` is replaced where it trains a fresh head, for a budget spent on no movement cannot be had back."""


def fill_in(config: DPZeroConfig) -> None:
    """Puts values where a config has None, but for what `resolve` and `learning_rate` choose for a run.

    Args:
      config: a `DPZeroConfig`; what stays None is its `chosen`.
    """
    chosen: set[str] = set()
    if config.method == "dpzero" and config.noise_distribution == "gaussian":
        if (
            config.learning_rate is None
            and config.update_rule == "sgd"  # a step of momentum is 1 / (1 - beta) times as long
            and config.noise_multiplier
            != 0  # there is no rate at which no noise moves a loss by 0.3
        ):
            chosen.add("learning_rate")
        if config.clip is None and config.clipping is None:
            config.clipping, config.clip_left_out = "adaptive", True
            if config.num_directions is None:
                chosen.add("num_directions")
    for name, value in (CLASSIC | OF_GRADIENTS.get(config.method, {})).items():
        if getattr(config, name) is None and name not in chosen:
            setattr(config, name, value)


def take_accumulation(config: DPZeroConfig) -> str:
    """Makes B of a script's gradient accumulation; a step is then one batch, sampled and noised once.

    Args:
      config: a `DPZeroConfig` before `fill_in`; its `gradient_accumulation_steps` is 1 afterwards.

    Returns:
      What to say of it; "" where nothing is accumulated.
    """
    rows, times = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if times == 1 or not (COUNT.holds(times) and COUNT.holds(rows)):
        return ""
    config.gradient_accumulation_steps = 1
    if config.expected_batch_size is not None or config.sampling == "full_batch":
        given = (
            "sampling='full_batch'" if config.sampling == "full_batch" else "expected_batch_size"
        )
        return f"gradient_accumulation_steps={times} has no effect: {given} is the batch of a step."
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # of the launcher, before devices are set up
    config.accumulated_rows = rows * times
    config.expected_batch_size = float(rows * times * processes)
    return (
        f"gradient_accumulation_steps={times}: a step's batch is expected_batch_size={rows} x {times} x "
        f"{processes} (processes) = {rows * times * processes} examples, sampled and noised once. In a "
        "larger one each example bears less of the noise, and a step takes longer."
    )


def copied(config: DPZeroConfig) -> DPZeroConfig:
    """Returns a copy with nested settings of its own: changes to the one are none to the other."""
    copy_of = copy.copy(config)  # not dataclasses.replace, which would check and warn again
    for name in NESTED:
        setattr(copy_of, name, copy.copy(getattr(config, name)))
    return copy_of


def resolve(config: DPZeroConfig, model: nn.Module) -> DPZeroConfig:
    """Returns a copy of a config with K and the kind of differences for a model.

    Args:
      config: a `DPZeroConfig`.
      model: its `requires_grad` and `config.trainable` say what is trained.

    Raises:
      ValueError: forward differences were asked for, and K is 1.
    """
    resolved = copied(config)
    resolved.num_directions = directions_for(config, model)
    resolved.differences = differences_for(config, resolved.num_directions)
    refuse(forward_saves_nothing(resolved))
    return resolved


def differences_for(config: DPZeroConfig, directions: int) -> str:
    """Returns the kind of differences as given; else by K, for forward ones take K + 1 passes of 2 K."""
    forward = directions >= FORWARD_FROM and config.smoothing <= FORWARD_SMOOTHING
    return config.differences or ("forward" if forward else "central")


def forward_saves_nothing(config: DPZeroConfig) -> Iterator[str]:
    """Says that forward differences along one direction are no cheaper."""
    if config.differences == "forward" and config.num_directions == 1 and not config.first_order:
        yield (
            "differences='forward' with num_directions=1 saves nothing: K + 1 passes are 2 K. Leave it "
            "out, or set num_directions=4 or more."
        )


def directions_for(config: DPZeroConfig, model: nn.Module) -> int:
    """Returns K as given; else by the cost of a direction, a power of 2 from 1 to `MANY`."""
    if config.num_directions is not None:
        return config.num_directions
    times = cost_of_direction(model, config.trainable) / CHEAP
    return max(1, MANY >> math.ceil(math.log2(max(1.0, times))))


def cost_of_direction(model: nn.Module, pattern: str | None) -> int:
    """Multiplications a row that each direction takes, by the model's structure alone.

    A parameter from the first trainable one on, in the model's order, takes one for each position that
    it sees; tables are looked up. What precedes them is run once a batch (`reuse_frozen_prefix`).
    """
    named = list(model.named_parameters())
    trained = [i for i, (name, p) in enumerate(named) if is_trained(name, p, pattern)]
    prompted = any(is_prompt(named[i][0]) for i in trained)
    first = 0 if prompted else min(trained, default=0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    again = sum(p.numel() for _, p in named[first:] if id(p) not in tables)
    positions = 1 if named and _is_pooled(model, named[first][1]) else POSITIONS
    return again * positions


def _is_pooled(model: nn.Module, first: nn.Parameter) -> bool:
    """Whether from this parameter on a row is one vector, as in a head that classifies whole rows."""
    base: Any = base_model(model)
    kind, body = own_class(base).__name__, getattr(base, "base_model_prefix", None)
    if body is None:  # no model of transformers
        return True
    sound = getattr(base, "main_input_name", "") in ("input_values", "input_features")
    if "Classif" not in kind or "Token" in kind or sound:
        return False
    below = getattr(base, body, base).named_parameters()
    return not any(p is first for name, p in below if "pooler" not in name)


def steps_that_follow(chosen: Collection[str], clipping: str, steps: int) -> int:
    """Returns in how many first steps a chosen learning rate follows the clip; 0 for a given one."""
    adapts = "learning_rate" in chosen and clipping == "adaptive"
    return max(round(FOLLOWED * steps), min(FOLLOWED_AT_LEAST, steps // 2)) if adapts else 0


def learning_rate(plan: PrivacyPlan, schedule: SchedulerType | str) -> float:
    """The rate of the first step, for the clip that it starts with (see the module).

    Args:
      plan: calibrated.
      schedule: `lr_scheduler_type`, a word or Hugging Face's enumeration.

    Returns:
      alpha > 0.
    """
    mechanism = plan.mechanism
    noise = mechanism.noise_multiplier * mechanism.clip * run_deviation(plan)
    directions = int(getattr(mechanism, "num_directions", 1))
    return rate_of_noise(noise / float(mechanism.divisor), mechanism.clip, directions, schedule)


def rate_of_noise(
    noise: float,
    clip: float,
    directions: int,
    schedule: SchedulerType | str,
    slope: float | None = None,
) -> float:
    """The rate of the first step, for noise of any origin.

    Args:
      noise: deviation, > 0, of the sum over the run's steps of what a release adds along one direction.
      clip: C.
      directions: K.
      schedule: `lr_scheduler_type`, a word or Hugging Face's enumeration.
      slope: what a unit along a direction changes a loss by, where it is known to be more than C.

    Returns:
      alpha > 0.
    """
    slope = max(clip, slope or 0.0)
    decay = _decay(schedule)
    return min(NOISE_SHARE * decay / (slope * noise), CURVED * directions / (slope * clip))


def _decay(schedule: SchedulerType | str) -> float:
    """The first rate over the root of the mean square of all steps' rates."""
    word = str(getattr(schedule, "value", schedule))
    return math.sqrt(3) if word.startswith(("linear", "cosine")) else 1.0


def rate_on(
    landscape: Landscape, plan: PrivacyPlan, schedule: SchedulerType | str, size: float = 0.0
) -> float:
    """The rate at which the first step gains most and all of them move weights little (see the module).

    Args:
      landscape: of public rows at the weights that training starts with.
      plan: calibrated; its noise, K, B, T and clip count.
      schedule: `lr_scheduler_type`, a word or Hugging Face's enumeration.
      size: root mean square of the weights that are moved at random; 0 where none are.

    Returns:
      alpha >= 0; 0 where the loss does not change along any direction.
    """
    mechanism, (slope, scatter, curvature, along, _) = plan.mechanism, landscape
    batch, directions = float(mechanism.divisor), int(getattr(mechanism, "num_directions", 1))
    slope = max(slope, LEAST_SLOPE * scatter / batch)
    norm = landscape._replace(slope=slope).norm(directions)
    if not norm:
        return 0.0
    clip = norm if mechanism.name == "dpzero-adaptive" else mechanism.clip  # it follows the norms
    kept = min(1.0, clip / norm)
    noise = mechanism.noise_multiplier * clip * run_deviation(plan) / batch / math.sqrt(plan.steps)
    curvature = max(curvature, slope + scatter)
    along = min(max(along, ALONG[0] * curvature), ALONG[1] * curvature)
    square = slope + scatter / batch + (noise / kept) ** 2  # of what a direction is taken by
    rate = slope / (square * curvature + STEEP * (directions - 1) * slope * along)
    if size:
        rate = min(
            rate, MOVED * size * _decay(schedule) / math.sqrt(plan.steps * directions * square)
        )
    return rate / kept


class Rate(NamedTuple):
    """The rate of the first step.

    Attributes:
      value: alpha.
      chosen: whether it was, also in place of a given one.
      said: of a given one, for the screen; "" for nothing.
    """

    value: float
    chosen: bool = False
    said: str = ""


def decide_rate(
    config: DPZeroConfig, plan: PrivacyPlan, moves_fresh_head: Callable[[], bool]
) -> Rate:
    """Chooses a run's learning rate where none is given, or one as a first-order script has it.

    Args:
      config: the user's.
      plan: of the run, calibrated.
      moves_fresh_head: whether all that is trained is a fresh head, in a script whose rate is not final.
    """
    given = config.learning_rate
    if given is None:
        return Rate(learning_rate(plan, config.lr_scheduler_type), chosen=True)
    settled = config.method != "dpzero" or config.noise_distribution != "gaussian"
    if settled or config.update_rule != "sgd" or not given or not plan.mechanism.private:
        return Rate(given)
    ours = learning_rate(plan, config.lr_scheduler_type)
    share = given / ours
    if share * LOST < 1 and not config.learning_rate_is_final and moves_fresh_head():
        return Rate(
            ours,
            chosen=True,
            said=RATE_OF_HEAD.format(f"{given:g}", f"{share:.2g}", f"{ours:.2g}"),
        )
    if 1 / FAR <= share <= FAR or "num_directions" not in config.chosen:
        return Rate(given)
    return Rate(given, said=RATE_FAR_OFF.format(f"{given:g}", f"{ours:.2g}", f"{share:.2g}"))
