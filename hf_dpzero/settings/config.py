"""`DPZeroConfig`: Hugging Face's TrainingArguments plus the privacy settings, checked together."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from hf_dpzero.estimators.finite_differences import STRATEGIES
from hf_dpzero.ledger.update_rules import UPDATE_RULES, UpdateRule, make_update_rule
from hf_dpzero.perturbation.directions import check_distribution
from hf_dpzero.privacy.events import ACCOUNTANTS
from hf_dpzero.privacy.mechanisms.base import RELATIONS
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import SAMPLERS
from hf_dpzero.privacy.selection import WORDS
from hf_dpzero.reporting.wording import BLOCK, EXAMPLE
from hf_dpzero.settings import hf_arguments as fields
from hf_dpzero.settings import private_only
from hf_dpzero.settings.correlation_settings import CORRELATIONS, check_correlation
from hf_dpzero.settings.defaults import fill_in
from hf_dpzero.settings.group_settings import GROUP_WEIGHTS, groups_of
from hf_dpzero.settings.kinds import check_scheduler_settings
from hf_dpzero.settings.method_names import FIRST_ORDER, METHODS, NOT_PRIVATE, SGD
from hf_dpzero.settings.plan_of import plan_of, sampler_of
from hf_dpzero.settings.ranges import check_ranges, check_warmup
from hf_dpzero.settings.schedules import factors_of
from hf_dpzero.values import nearest

logger = logging.get_logger(__name__)

CLIPPINGS = {
    "fixed": METHODS,
    "adaptive": ("dpzero", "dp-sgd", "dp-adamw"),
    "automatic": ("dp-sgd", "dp-adamw"),
    "averaged": ("dpzero", "dp-sgd", "dp-adamw"),
}
ON_NO_SIGNAL = ("warn", "stop", "ignore")
GRADIENTS = ("auto", "dense", "ghost")
SAMPLINGS = tuple(SAMPLERS)
ROWS = ("examples", "blocks")


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class DPZeroConfig(private_only.PrivateOnly, TrainingArguments):
    """Arguments of `DPZeroTrainer`: everything `TrainingArguments` has, and the fields below.

    Either `target_epsilon` (the noise is calibrated) or `noise_multiplier` (the epsilon is
    reported) must be given, unless the method is not private (mezo, sgd, adamw).

    Raises:
      ValueError: a value out of range, or a combination that cannot be accounted.
    """

    method: str = _setting(
        "dpzero",
        "zeroth order: dpzero (scalar noise), dpgd-0th (Algorithm 1, d-dim noise), mezo (not "
        "private); first order: dp-sgd, dp-adamw, and sgd, adamw (not private)",
    )
    target_epsilon: float | None = _setting(None, "epsilon that the whole run may spend, > 0")
    target_delta: float | None = _setting(None, "delta in (0, 1); default 1 / (10 n)")
    noise_multiplier: float | None = _setting(
        None, "noise std on the clipped sum in units of clip; instead of target_epsilon"
    )
    learning_rate: float = _setting(
        None,
        "rate of the first step; default: dpzero, from noise, clip, batch and steps (`defaults.py`); "
        "other methods 5e-5",
    )
    clip: float = _setting(
        None, "bound C on one example's finite difference(s), L2 over K; default 50"
    )
    clipping: str = _setting(
        None,
        "default fixed, or, of dpzero without a given clip, adaptive. fixed; adaptive (private "
        "quantile, pays from the same budget); averaged (group means clipped); automatic (each "
        "gradient normalised) for dp-sgd and dp-adamw",
    )
    clip_quantile: float = _setting(0.5, "adaptive: share of examples to leave unclipped")
    clip_learning_rate: float = _setting(0.2, "adaptive: rate of the geometric update of C")
    clip_count_noise: float | None = _setting(
        None,
        "adaptive: noise std on the count of unclipped examples; default B / 20, or the whole "
        "step's noise multiplier where that is larger",
    )
    clip_stability: float = _setting(0.01, "automatic: gamma in C / (norm + gamma)")
    clip_groups: int = _setting(1, "averaged: k, number of fixed groups of examples")
    per_example_gradients: str = _setting(
        "auto",
        "first order: dense, ghost (norms first, then one weighted sum of what was seen) or auto",
    )
    smoothing: float = _setting(1e-3, "lambda, the size of the perturbation, > 0")
    noise_schedule: str | None = _setting(
        None,
        "noise of each step within the same budget: exp(gamma=..), gd(kappa=..), momentum(kappa=.., "
        "beta=..), learning_rate(gamma=..), subsampled(gamma=..), a list or a file; default constant",
    )
    clip_schedule: str | None = _setting(
        None,
        "clip of each step: linear(END), exp(END), END the last step's factor; a list or a file",
    )
    smoothing_schedule: str | None = _setting(None, "like clip_schedule, factors of at most 1")
    noise_correlation: str = _setting(
        "none",
        "noise that cancels over steps; needs sampling fixed_batches, dpzero hold_direction_for. "
        + ", ".join(CORRELATIONS),
    )
    noise_bands: int | None = _setting(
        None, "banded: draws that a step's noise is made of; default 32"
    )
    direction: str = _setting("rademacher", "rademacher, gaussian or sphere")
    num_directions: int = _setting(
        None,
        "K, directions in a step; 2K forward passes; default 1; of dpzero without a given clip, 32 "
        "where evaluations are cheap",
    )
    expected_batch_size: float = _setting(64, "B, the public expected logical batch size")
    microbatch_size: int | None = _setting(
        None, "most examples of one forward pass; default 64, or 32, 16, 1 where memory is short"
    )
    direction_parallel_size: int | None = _setting(
        None, "processes that share the directions of one share of the rows; default from the work"
    )
    sampling: str = _setting("poisson", ", ".join(SAMPLINGS))
    max_batch_size: int | None = _setting(None, "cap on a truncated_poisson batch")
    neighboring_relation: str = _setting(
        "add_or_remove_one", "add_or_remove_one, replace_one or replace_special"
    )
    accountant: str = _setting("pld", "pld, rdp or advanced_composition (the paper's Lemma 2.2)")
    noise_distribution: str = _setting(
        "gaussian", "gaussian, or laplace for pure epsilon (delta 0)"
    )
    hold_direction_for: int = _setting(
        1, "zeroth order: steps that share their directions; noise may be correlated within them"
    )
    direction_key: int | None = _setting(
        None, "128-bit public key of the directions; default random"
    )
    trainable: str | None = _setting(
        None, "regular expression; only parameters whose name it finds are trained"
    )
    update_rule: str = _setting("sgd", "optimiser on the released scalars: sgd or momentum")
    momentum: float = _setting(0.9, "beta of momentum")
    update_window: int | None = _setting(
        None, "past steps that momentum uses; default until beta^W <= 0.01"
    )
    reuse_frozen_prefix: bool = _setting(True, "run frozen first layers once per batch")
    perturbation_strategy: str = _setting(
        "auto", "where the perturbation is during forward passes: " + ", ".join(STRATEGIES)
    )
    defer_updates: bool = _setting(
        True, "make an update in the next step's first pass, or before the weights are read"
    )
    rows_are: str | None = _setting(
        None,
        "what the privacy unit is, a row of train_dataset: examples, or blocks of text that examples "
        "were packed into; must be said where the rows of a language model look packed",
    )
    max_length: int | None = _setting(1024, "most tokens of a row of text (and of the model)")
    on_no_signal: str = _setting(
        "warn",
        "what to do after a quarter of the steps if the releases cannot be told from noise: "
        + ", ".join(ON_NO_SIGNAL),
    )
    group_column: str | None = _setting(
        None,
        "column of train_dataset with each row's group: trains for the group that is worst off",
    )
    group_shares: dict[str, Any] | str | None = _setting(  # noqa: RUF009
        None, "{name: share} of all groups, public: their shares of the population; add up to 1"
    )
    group_weights: str = _setting(
        "per_step",
        "what is released of the groups' losses: nothing (balanced), noisy losses of each step "
        "(per_step), "
        "prefix sums with correlated noise (prefix_sum), drawn groups (vertex)",
    )
    group_loss_bound: float = _setting(
        2.0, "b: losses are clipped to [0, b] for the groups' weights"
    )
    group_rate: float | None = _setting(
        None, "tau of the groups' multiplicative weights; default sqrt(2 log m / T) / b"
    )
    group_budget: float = _setting(0.1, "share of the privacy budget that the groups' losses cost")
    group_draws: int = _setting(1, "vertex: K, groups drawn in a step")
    log_private_diagnostics: bool = _setting(
        False, "log un-noised training statistics; the report then says NOT PRIVATE"
    )
    tuning: str = _setting(
        "none",
        "how the settings were chosen: none, public (on public data) or not_accounted; for the report",
    )
    base_is_public: bool = _setting(
        False,
        "what the model is at the start may be taken as public, though it is not what its name says "
        "or was trained before; the report then says so",
    )
    extends_run: str | None = _setting(
        None, "folder of a finished run to spend more on; target_epsilon is then the total of both"
    )
    insecure_noise_seed: int | None = _setting(
        None, "reproducible noise for tests; the report then says NOT PRIVATE"
    )
    sampler_key: str | None = _setting(
        None, "64 hex digits, for tests; default secret. Not written to disk from here"
    )
    hub_strategy: str = _setting("end", "only 'end': pushes go through the allow list of hub.push")
    hub_private_repo: bool | None = _setting(True, "make the Hub repository private")
    max_grad_norm: float = _setting(
        0.0, "first order: clips the noised gradient too (free); unused without gradients"
    )

    def __post_init__(self) -> None:
        fill_in(self)
        self._check_privacy_settings()
        self._check_training_settings()
        warning = fields.warning(self)
        self.ignore_data_skip = True  # batches are a function of the step: nothing to skip
        if self.method in SGD:
            self.optim = "sgd"
        if not self.first_order:
            self.max_grad_norm = 0.0
        super().__post_init__()
        check_scheduler_settings(self)
        if warning and self.process_index == 0:
            logger.warning_once(warning)

    @property
    def chosen(self) -> frozenset[str]:
        """Settings that are left None, to be chosen for each run (`DPZeroMixin.resolved_args`)."""
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

    def _check_privacy_settings(self) -> None:
        _choose("method", self.method, METHODS)
        _choose("sampling", self.sampling, SAMPLINGS)
        check_distribution(self.direction)
        _choose("perturbation_strategy", self.perturbation_strategy, STRATEGIES)
        _choose("tuning", self.tuning, WORDS)
        _choose("on_no_signal", self.on_no_signal, ON_NO_SIGNAL)
        if self.rows_are is not None:
            _choose("rows_are", self.rows_are, ROWS)
        _choose("accountant", self.accountant, ACCOUNTANTS)
        _choose("neighboring_relation", self.neighboring_relation, RELATIONS)
        _choose("group_weights", self.group_weights, GROUP_WEIGHTS)
        _choose("noise_distribution", self.noise_distribution, ("gaussian", "laplace"))
        _choose("per_example_gradients", self.per_example_gradients, GRADIENTS)
        _choose("noise_correlation", self.noise_correlation, CORRELATIONS)
        check_correlation(self)
        self._check_clipping()
        self._check_direction_settings()
        check_ranges(self)
        if not self.not_private and (self.target_epsilon is None) == (
            self.noise_multiplier is None
        ):
            raise ValueError(
                f"target_epsilon={self.target_epsilon} and noise_multiplier={self.noise_multiplier}: "
                "give exactly one of them (or method='mezo', 'sgd' or 'adamw' for a run that is not "
                "private)."
            )
        groups_of(self)
        if self.sampling == "truncated_poisson" and self.max_batch_size is None:
            raise ValueError("sampling='truncated_poisson' needs max_batch_size, e.g. 2 B.")
        if self.max_batch_size is not None and self.sampling != "truncated_poisson":
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is for sampling='truncated_poisson'; a cap on "
                f"sampling={self.sampling!r} would not be the sampler that is accounted."
            )

    def _check_clipping(self) -> None:
        _choose("clipping", self.clipping, tuple(CLIPPINGS))
        if self.method not in CLIPPINGS[self.clipping]:
            raise ValueError(
                f"clipping={self.clipping!r} with method={self.method!r}: it is for "
                f"{', '.join(CLIPPINGS[self.clipping])}; use clipping='fixed'."
            )
        if self.noise_distribution != "gaussian" and (
            self.method not in ("dpzero", *NOT_PRIVATE) or self.clipping != "fixed"
        ):
            raise ValueError(
                f"noise_distribution={self.noise_distribution!r} is for method='dpzero' with "
                f"clipping='fixed', not for {self.method!r} with {self.clipping!r}: use 'gaussian'."
            )

    def _check_direction_settings(self) -> None:
        """The rule by which released scalars move the weights."""
        _choose("update_rule", self.update_rule, tuple(UPDATE_RULES))
        self._update_rule()
        if self.update_rule != "sgd" and self.method not in ("dpzero", "mezo"):
            raise ValueError(
                f"update_rule={self.update_rule!r} works on released scalars, which "
                f"method={self.method!r} has none of: use 'sgd' (first-order methods take theirs from "
                "optim)."
            )

    def _check_training_settings(self) -> None:
        fields.refuse_fields(self)
        self._check_optimizer()
        if self.trainable is not None:
            try:
                re.compile(self.trainable)
            except re.error as error:
                raise ValueError(
                    f"trainable={self.trainable!r} is no regular expression: {error}."
                ) from None

    def _check_optimizer(self) -> None:
        """adamw and dp-adamw take one of Hugging Face's AdamWs."""
        if self.method in ("adamw", "dp-adamw") and not self.optim_name.startswith("adamw"):
            raise ValueError(
                f"optim={self.optim_name!r} with method={self.method!r}: use one of the adamw "
                "optimizers, or method='dp-sgd' (then optim is sgd)."
            )

    @property
    def physical_batch_size(self) -> int:
        """Examples in one forward pass at most; fewer where memory is short (`pass_memory`)."""
        return self.microbatch_size or 64

    def steps(self, num_examples: int) -> int:
        """T: max_steps, or num_train_epochs of ceil(n / B) steps each, as Trainer counts."""
        if self.max_steps > 0:
            return int(self.max_steps)
        steps = math.ceil(self.num_train_epochs * sampler_of(self, num_examples).steps_per_epoch)
        check_warmup(self, steps)
        return steps

    def delta(self, num_examples: int) -> float:
        """target_delta, or 1 / (10 n); warns once when delta is above 1/n."""
        delta = self.target_delta
        if delta is None:
            delta = 0.0 if self.noise_distribution == "laplace" else 0.1 / num_examples
        if not self.not_private and delta > 1 / num_examples:
            logger.warning_once(
                "target_delta=%s is above 1/n = %.3g: a mechanism that publishes one example "
                "outright could satisfy it. Choose delta well below 1/n.",
                delta,
                1 / num_examples,
            )
        return delta

    def plan(self, num_examples: int, dimension: int | None = None) -> PrivacyPlan:
        """The privacy plan for a data set, calibrated if a target was given.

        Args:
          num_examples: n.
          dimension: d, trainable coordinates; for methods that release d-vectors (`DenseNoise`). None
            stands for 2^27 there.

        Returns:
          The plan.

        Raises:
          ValueError: sampler, mechanism and relation together have no sound accounting, the batch
            is larger than the data, or the target cannot be reached.
        """
        return plan_of(self, num_examples, dimension)

    def _smoothing_schedule(self) -> dict[str, Any]:
        schedule = factors_of("smoothing_schedule", self.smoothing_schedule)
        return {} if schedule is None else {"smoothing_schedule": schedule.to_dict()}

    @property
    def privacy_unit(self) -> str:
        """What one row of the training set is, in the report's words."""
        return BLOCK if self.rows_are == "blocks" else EXAMPLE

    def direction_settings(self) -> dict[str, Any]:
        """The part of a trajectory's header that says what the releases are numbers along."""
        if self.first_order:
            return {"direction": "none", "num_directions": 0, "optim": self.optim_name}
        return {
            "direction": self.direction,
            "num_directions": self.num_directions,
            "smoothing": self.smoothing,
            **self._smoothing_schedule(),
            **(
                {}
                if self.hold_direction_for == 1
                else {"hold_direction_for": self.hold_direction_for}
            ),
            "update_rule": self._update_rule().to_dict(),
        }

    def _update_rule(self) -> UpdateRule:
        return make_update_rule(self.update_rule, self.momentum, self.update_window)

    @property
    def optim_name(self) -> str:
        """The optimizer's name as Hugging Face has it, e.g. "adamw_torch"."""
        return str(getattr(self.optim, "value", self.optim))


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = nearest(str(value), choices)
        hint = f"; did you mean {close!r}?" if close else "."
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}{hint}")
