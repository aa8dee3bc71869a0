"""`DPZeroConfig`: Hugging Face's TrainingArguments plus the privacy settings, checked together."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from hf_dpzero.ledger.replay import UpdateRule
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting.wording import BLOCK, EXAMPLE, unit_words
from hf_dpzero.settings import hf_arguments
from hf_dpzero.settings.defaults import (
    differences_for,
    fill_in,
    forward_saves_nothing,
    take_accumulation,
)
from hf_dpzero.settings.fields import CLIPPINGS, ROWS_PER_UNIT, OwnFields
from hf_dpzero.settings.hf_arguments import refused_fields
from hf_dpzero.settings.nested import ADAMW, FIRST_ORDER, NESTED, NOT_PRIVATE, SGD
from hf_dpzero.settings.plan_of import groups_of, plan_of, sampler_of
from hf_dpzero.settings.schedules import factors_of
from hf_dpzero.settings.setting import describe, out_of_range, ranges_of, refuse, take_numbers

logger = logging.get_logger(__name__)

FINEST_SMOOTHING = 1e-6
"""Below it, rounding in float32 is a large part of a finite difference."""


@dataclass
class DPZeroConfig(OwnFields, TrainingArguments):
    """Arguments of `DPZeroTrainer`: everything `TrainingArguments` has, and the fields listed here.

    Either `target_epsilon` (the noise is calibrated) or `noise_multiplier` (the epsilon is
    reported) must be given, unless the method is not private (mezo, sgd, adamw).

    Raises:
      ValueError: lists all that is refused; what does not go together or cannot be accounted only where
        all values are in range.
    """

    def __post_init__(self) -> None:
        for name, kind in NESTED.items():
            setattr(self, name, kind.read(name, getattr(self, name)))
        parts = [("", self), *((f"{name}.", getattr(self, name)) for name in NESTED)]
        for _, part in parts:
            take_numbers(part)
        accumulated = take_accumulation(self)
        fill_in(self)
        ranges = (out_of_range(part, ranges_of(part), prefix) for prefix, part in parts)
        wrong = [*chain.from_iterable(ranges), *hf_arguments.wrong_values(self)]
        warning = "" if wrong else hf_arguments.warning(self)
        hf_arguments.put_back(self)
        if not wrong:  # these compare and multiply values
            wrong = [*self._budget(), *self._method(), *self._steps()]
        refuse([*wrong, *refused_fields(self)])
        self._warn()
        self.ignore_data_skip = True  # batches are a function of the step: nothing to skip
        if self.method in SGD:
            self.optim = "sgd"
        if not self.first_order:
            self.max_grad_norm = 0.0  # Trainer would take the norm of gradients that nobody made
        super().__post_init__()
        hf_arguments.take_half(self)
        for said in (accumulated, warning):
            if said and self.process_index == 0:
                logger.warning_once(said)

    def to_dict(self) -> dict[str, Any]:
        """As in TrainingArguments; nested settings are dicts, which DPZeroConfig takes again."""
        values: dict[str, Any] = super().to_dict()
        for name in NESTED:
            values[name] = dataclasses.asdict(values[name])
        return values

    accumulated_rows = 0  # of a process, where expected_batch_size was made of accumulation
    clip_left_out = False  # and so adaptive, which clients cannot do together

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """As in TrainingArguments. Every Trainer asks for it when its training starts; scripts may.

        Raises:
          ValueError: a Trainer without `DPZeroMixin` asks, which knows no privacy.
        """
        asks = sys._getframe(1).f_locals.get("self")  # in no other way is it known whose they are
        if hasattr(asks, "create_scheduler") and not hasattr(asks, "privacy_report"):
            raise ValueError(
                f"a {type(self).__name__} was given to a Trainer that would train without privacy: "
                "make a DPZeroTrainer, or put DPZeroMixin first among the parents of your own."
            )
        steps: int = super().get_warmup_steps(num_training_steps)
        return steps

    @property
    def chosen(self) -> frozenset[str]:
        """Settings that are left None, to be chosen for each run (`Run.args`)."""
        names = ("learning_rate", "num_directions")
        return frozenset(name for name in names if getattr(self, name) is None)

    @property
    def first_order(self) -> bool:
        """True if the method takes gradients."""
        return self.method in FIRST_ORDER

    @property
    def not_private(self) -> bool:
        """True if the method neither clips nor adds noise."""
        return self.method in NOT_PRIVATE

    def _budget(self) -> Iterator[str]:
        """Says what has no account, whatever the data."""
        if self.target_delta == 0 and self.noise_distribution != "laplace":
            yield f"target_delta={self.target_delta!r} must be a number in (0, 1), e.g. 1e-5."
        if not self.not_private and (self.target_epsilon is None) == (
            self.noise_multiplier is None
        ):
            yield (
                f"target_epsilon={self.target_epsilon} and noise_multiplier={self.noise_multiplier}: "
                "give exactly one of them (or method='mezo', 'sgd' or 'adamw' for a run that "
                "is not private)."
            )
        yield from self._units()
        truncated = self.sampling == "truncated_poisson"
        if truncated and self.max_batch_size is None:
            yield "sampling='truncated_poisson' needs max_batch_size, e.g. 2 B."
        if self.max_batch_size is not None and not truncated:
            yield (
                f"max_batch_size={self.max_batch_size} is for sampling='truncated_poisson'; a cap on "
                f"sampling={self.sampling!r} would not be the sampler that is accounted."
            )
        correlated = self.correlated_noise.kind
        held = self.method != "dpzero" or self.correlated_noise.hold_direction_for > 1
        if correlated != "none" and not held:
            yield (
                f"correlated_noise.kind={correlated!r} with method='dpzero' and a fresh direction in "
                "each step does harm: the noise of a step lies along its own direction, nearly "
                "orthogonal to those of other steps, so nothing cancels and the noise is only "
                "larger. Set correlated_noise.hold_direction_for, e.g. to 64, or leave "
                "correlated_noise out."
            )
        if correlated != "none" and self.sampling != "fixed_batches":
            yield (
                f"correlated_noise.kind={correlated!r} with sampling={self.sampling!r}: its account "
                "needs to know in which steps an example takes part, and amplification by sampling is "
                "not accounted here for noise that is correlated over steps. Use "
                "sampling='fixed_batches' (each example once an epoch, no amplification claimed)."
            )
        try:  # the groups know best what they need, and are made without any row
            groups_of(self)
        except ValueError as error:
            yield str(error)

    def _units(self) -> Iterator[str]:
        """Says what has no account where several rows are one unit."""
        if self.unit_column is None:
            if self.max_rows_per_unit is not None:
                yield (
                    f"max_rows_per_unit={self.max_rows_per_unit} without unit_column: name the column "
                    "of train_dataset that says whose rows they are, or leave it out."
                )
            return
        if self.clipping == "averaged":
            yield (
                "unit_column with clipping='averaged', which clips means over several units: use "
                "clipping='fixed'; rows of one unit are averaged before the clip as it is."
            )
        if self.group_robust.column is not None:
            yield (
                "unit_column with group_robust.column: rows of one unit may be in several groups, whose "
                "losses have no account then. Leave one of them out."
            )

    @property
    def rows_per_unit(self) -> int:
        """m, rows of a unit in a step at most; 1 where each row is a unit."""
        return 1 if self.unit_column is None else self.max_rows_per_unit or ROWS_PER_UNIT

    def _method(self) -> Iterator[str]:
        """Says which settings the method does not take."""
        method = self.method
        if method not in CLIPPINGS[self.clipping]:
            yield (
                f"clipping={self.clipping!r} with method={method!r}: it is for "
                f"{', '.join(CLIPPINGS[self.clipping])}; use clipping='fixed'."
            )
        scalar = method in ("dpzero", *NOT_PRIVATE) and self.clipping == "fixed"
        if self.noise_distribution != "gaussian" and not scalar:
            yield (
                f"noise_distribution={self.noise_distribution!r} is for method='dpzero' with "
                f"clipping='fixed', not for {method!r} with {self.clipping!r}: use 'gaussian'."
            )
        if self.update_rule != "sgd" and method not in ("dpzero", "mezo"):
            yield (
                f"update_rule={self.update_rule!r} works on released scalars, which "
                f"method={method!r} has none of: use 'sgd' (first-order methods take theirs from "
                "optim)."
            )
        if method in ADAMW and not self.optim_name.startswith("adamw"):
            yield (
                f"optim={self.optim_name!r} with method={method!r}: use one of the adamw "
                "optimizers, or method='dp-sgd' (then optim is sgd)."
            )

    def _steps(self) -> Iterator[str]:
        """Says which settings of the steps contradict each other or cannot be read."""
        yield from forward_saves_nothing(self)
        decay = (self.learning_rate or 0.0) * self.weight_decay
        if decay >= 1:
            yield (
                f"learning_rate={self.learning_rate} times weight_decay={self.weight_decay} is "
                f"{decay:g}: a step would decay the weights through zero; their product must be "
                "below 1."
            )
        try:
            re.compile(self.trainable or "")
        except re.error as error:
            yield f"trainable={self.trainable!r} is no regular expression: {error}."

    def _warn(self) -> None:
        if self.learning_rate == 0:
            logger.warning("learning_rate=0: no step moves the weights, and the budget is spent.")
        if self.smoothing < FINEST_SMOOTHING and not self.first_order:
            logger.warning(
                f"smoothing={self.smoothing} is finer than float32 resolves: losses near 1 are "
                "rounded to 6e-8, so rounding moves a finite difference by about "
                f"{6e-8 / self.smoothing:.2g}, and weights near 1 may not move at all. Use at least "
                "1e-5."
            )
        change = 2 * self.clip * self.smoothing  # beyond 20 it is no bound on a loss at all
        if change > 20 and not self.first_order and not self.not_private:
            logger.warning(
                f"clip={self.clip:g} clips no example whose loss changes by less than {change:.3g} "
                f"between the two ends of a perturbation (2 clip smoothing), and "
                "noise is proportional to clip: nothing else will be seen. The default is 50."
            )

    @property
    def physical_batch_size(self) -> int:
        """Examples in one forward pass at most; fewer where memory is short (`batches.placement`)."""
        return self.microbatch_size or 64

    def steps(self, num_examples: int) -> int:
        """T: max_steps, or num_train_epochs of ceil(n / B) steps each, as Trainer counts."""
        steps = int(self.max_steps)
        if steps < 0:
            epoch = sampler_of(self, num_examples).steps_per_epoch
            steps = math.ceil(self.num_train_epochs * epoch)
        if self.warmup_steps > steps:
            logger.warning_once(
                f"warmup_steps={self.warmup_steps} is more than the run's {steps} steps, so "
                "learning_rate is never reached: lower it, or give a share of the steps, e.g. 0.1."
            )
        return steps

    def delta(self, num_examples: int) -> float:
        """target_delta, or 1 / (10 n)."""
        if self.target_delta is not None:
            return self.target_delta
        return 0.0 if self.noise_distribution == "laplace" else 0.1 / num_examples

    def plan(self, num_examples: int, dimension: int | None = None) -> PrivacyPlan:
        """The privacy plan for a data set, calibrated if a target was given.

        Args:
          num_examples: n.
          dimension: d, trainable coordinates; for methods that release d-vectors (`DenseNoise`). None
            stands for 2^27 there.

        Raises:
          ValueError: sampler, mechanism and relation together have no sound accounting, the batch
            is larger than the data, or the target cannot be reached.
        """
        return plan_of(self, num_examples, dimension)

    @property
    def privacy_unit(self) -> str:
        """What the guarantee is for one of, in the report's words."""
        if self.unit_column is not None:
            return unit_words(self.unit_column)
        return BLOCK if self.rows_are == "blocks" else EXAMPLE

    def direction_settings(self) -> dict[str, Any]:
        """The part of a trajectory's header that says what the releases are numbers along."""
        if self.first_order:
            return {"direction": "none", "num_directions": 0, "optim": self.optim_name}
        settings = {
            "direction": self.direction,
            "num_directions": self.num_directions,
            "differences": differences_for(self, self.num_directions),
            "smoothing": self.smoothing,
        }
        schedule = factors_of("schedules.smoothing", self.schedules.smoothing)
        if schedule is not None:
            settings["smoothing_schedule"] = schedule.to_dict()
        if self.correlated_noise.hold_direction_for != 1:
            settings["hold_direction_for"] = self.correlated_noise.hold_direction_for
        rule = UpdateRule(self.update_rule, self.momentum, self.update_window)
        return {**settings, "update_rule": rule.to_dict()}

    @property
    def optim_name(self) -> str:
        """The optimizer's name as Hugging Face has it, e.g. "adamw_torch"."""
        return str(getattr(self.optim, "value", self.optim))


for _kind, _parent in ((DPZeroConfig, OwnFields), *((kind, kind) for kind in NESTED.values())):
    describe(_kind, _parent)
