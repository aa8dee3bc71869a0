"""`DPZeroConfig`: Hugging Face's TrainingArguments plus the privacy settings, checked together."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from hf_dpzero.directions import check_distribution
from hf_dpzero.estimator import STRATEGIES
from hf_dpzero.mechanisms import NonPrivateMean, ScalarMechanism, VectorMechanism
from hf_dpzero.plan import PrivacyPlan
from hf_dpzero.sampling import (
    FixedSizeSampler,
    FullBatchSampler,
    PoissonSampler,
    Sampler,
    TruncatedPoissonSampler,
)

logger = logging.get_logger(__name__)

METHODS = ("dpzero", "dpgd-0th", "mezo")
SAMPLINGS = ("poisson", "truncated_poisson", "fixed_size_without_replacement", "full_batch")


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class DPZeroConfig(TrainingArguments):
    """Arguments of `DPZeroTrainer`: everything `TrainingArguments` has, and the fields below.

    Either `target_epsilon` (the noise is calibrated) or `noise_multiplier` (the epsilon is
    reported) must be given, unless `method="mezo"`.

    Raises:
      ValueError: a value out of range, or a combination that cannot be accounted.
    """

    method: str = _setting(
        "dpzero", "dpzero (scalar noise), dpgd-0th (Algorithm 1, d-dim noise) or mezo (not private)"
    )
    target_epsilon: float | None = _setting(None, "epsilon that the whole run may spend, > 0")
    target_delta: float | None = _setting(None, "delta in (0, 1); default 1 / (10 n)")
    noise_multiplier: float | None = _setting(
        None, "noise std on the clipped sum in units of clip; instead of target_epsilon"
    )
    clip: float = _setting(50.0, "bound C on one example's finite difference(s), L2 over K")
    smoothing: float = _setting(1e-3, "lambda, the size of the perturbation, > 0")
    direction: str = _setting("rademacher", "rademacher, gaussian or sphere")
    num_directions: int = _setting(1, "K, directions in a step; 2K forward passes")
    expected_batch_size: float = _setting(64, "B, the public expected logical batch size")
    microbatch_size: int | None = _setting(
        None, "examples in one forward pass; default per_device_train_batch_size"
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
    direction_key: int | None = _setting(
        None, "128-bit public key of the directions; default random"
    )
    trainable: str | None = _setting(
        None, "regular expression; only parameters whose name it finds are trained"
    )
    reuse_frozen_prefix: bool = _setting(True, "run frozen first layers once per batch")
    perturbation_strategy: str = _setting(
        "auto", "where the perturbation is during forward passes: " + ", ".join(STRATEGIES)
    )
    defer_updates: bool = _setting(
        True, "make an update in the next step's first pass, or before anyone reads the weights"
    )
    log_private_diagnostics: bool = _setting(
        False, "log un-noised training statistics; the report then says NOT PRIVATE"
    )
    insecure_noise_seed: int | None = _setting(
        None, "reproducible noise for tests; the report then says NOT PRIVATE"
    )
    sampler_key: str | None = _setting(
        None, "64 hex digits, for tests; default secret. Not written to disk from here"
    )
    hub_strategy: str = _setting("end", "only 'end': pushes go through the allow list of hub.push")
    hub_private_repo: bool | None = _setting(True, "make the Hub repository private")
    max_grad_norm: float = _setting(0.0, "unused: there are no gradients; clip bounds examples")

    def __post_init__(self) -> None:
        self._check_privacy_settings()
        self._check_training_settings()
        self.ignore_data_skip = True  # batches are a function of the step: nothing to skip
        super().__post_init__()

    def _check_privacy_settings(self) -> None:
        _choose("method", self.method, METHODS)
        _choose("sampling", self.sampling, SAMPLINGS)
        check_distribution(self.direction)
        _choose("perturbation_strategy", self.perturbation_strategy, STRATEGIES)
        _positive("clip", self.clip)
        _positive("smoothing", self.smoothing)
        _positive("expected_batch_size", self.expected_batch_size)
        _positive("target_epsilon", self.target_epsilon, optional=True)
        self._check_delta()
        if int(self.num_directions) != self.num_directions or self.num_directions < 1:
            raise ValueError(
                f"num_directions={self.num_directions} must be an integer of at least 1."
            )
        if self.method != "mezo" and (self.target_epsilon is None) == (
            self.noise_multiplier is None
        ):
            raise ValueError(
                f"target_epsilon={self.target_epsilon} and noise_multiplier={self.noise_multiplier}: "
                "give exactly one of them (or method='mezo' for a run that is not private)."
            )
        if self.sampling == "truncated_poisson" and self.max_batch_size is None:
            raise ValueError("sampling='truncated_poisson' needs max_batch_size, e.g. 2 B.")
        if self.max_batch_size is not None and self.sampling != "truncated_poisson":
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is for sampling='truncated_poisson'; a cap on "
                f"sampling={self.sampling!r} would not be the sampler that is accounted."
            )
        if self.perturbation_strategy == "paired" and self.method != "mezo":
            raise ValueError(
                "perturbation_strategy='paired' divides a doubled batch in every module, and where "
                "routing depends on the data an example could end up in another's half: it is for "
                "method='mezo' only; use 'auto', 'layerwise' or 'whole_model'."
            )
        if self.method == "dpgd-0th" and self.num_directions != 1:
            raise ValueError(
                f"num_directions={self.num_directions}: dpgd-0th (Algorithm 1) has one direction a "
                "step; set it to 1, or use method='dpzero'."
            )

    def _check_delta(self) -> None:
        laplace = self.noise_distribution == "laplace"
        if self.target_delta is not None and not (
            0 < self.target_delta < 1 or (laplace and self.target_delta == 0)
        ):
            raise ValueError(f"target_delta={self.target_delta} must lie in (0, 1), e.g. 1e-5.")

    def _check_training_settings(self) -> None:
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} would split a "
                "logical batch; leave it at 1 and set microbatch_size (memory) and "
                "expected_batch_size (privacy)."
            )
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"microbatch_size={self.microbatch_size} must be at least 1.")
        if self.fp16:
            raise ValueError(
                "fp16=True: float16 losses are too coarse for finite differences; use bf16=True "
                "(autocast) or float32."
            )
        if (
            self.push_to_hub
            and str(getattr(self.hub_strategy, "value", self.hub_strategy)) != "end"
        ):
            raise ValueError(
                f"hub_strategy={self.hub_strategy!r} would upload output_dir as it is, secrets and "
                "all; leave it at 'end', which ships the allow list of hf_dpzero.hub."
            )
        if self.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True would ship weights that the trajectory does not end "
                "in; evaluate checkpoints on public data and pass the one you want to save_model."
            )
        if self.debug:
            raise ValueError(
                f"debug={self.debug!r} prints statistics of private activations; leave it empty, or "
                "debug on public data with a plain Trainer."
            )
        if self.auto_find_batch_size:
            raise ValueError("auto_find_batch_size=True: set microbatch_size instead.")
        if self.max_grad_norm:
            logger.warning(
                "max_grad_norm=%s is ignored: there are no gradients.", self.max_grad_norm
            )
            self.max_grad_norm = 0.0
        if self.trainable is not None:
            try:
                re.compile(self.trainable)
            except re.error as error:
                raise ValueError(
                    f"trainable={self.trainable!r} is no regular expression: {error}."
                ) from None

    @property
    def physical_batch_size(self) -> int:
        """Examples in one forward pass."""
        return self.microbatch_size or self.per_device_train_batch_size

    def steps(self, num_examples: int) -> int:
        """T: max_steps, or num_train_epochs worth of expected batches."""
        if self.max_steps > 0:
            return self.max_steps
        return max(1, math.ceil(self.num_train_epochs * num_examples / self.expected_batch_size))

    def delta(self, num_examples: int) -> float:
        """target_delta, or 1 / (10 n); warns when delta is above 1/n."""
        delta = self.target_delta
        if delta is None:
            delta = 0.0 if self.noise_distribution == "laplace" else 0.1 / num_examples
        if self.method != "mezo" and delta > 1 / num_examples:
            logger.warning(
                "target_delta=%s is above 1/n = %.3g: a mechanism that publishes one example "
                "outright could satisfy it. Choose delta well below 1/n.",
                delta,
                1 / num_examples,
            )
        return delta

    def plan(self, num_examples: int) -> PrivacyPlan:
        """The privacy plan for a data set of `num_examples`, calibrated if a target was given.

        Raises:
          ValueError: sampler, mechanism and relation together have no sound accounting, the batch
            is larger than the data, or the target cannot be reached.
        """
        sampler = self._sampler(num_examples)
        plan = PrivacyPlan(
            sampler=sampler,
            mechanism=self._mechanism(sampler.expected_batch_size),
            steps=self.steps(num_examples),
            relation=self.neighboring_relation,  # type: ignore[arg-type]
            accountant=self.accountant,  # type: ignore[arg-type]
        )
        if self.target_epsilon is None or self.method == "mezo":
            return plan
        return plan.calibrate(epsilon=self.target_epsilon, delta=self.delta(num_examples))

    def _sampler(self, num_examples: int) -> Sampler:
        if self.sampling == "full_batch":
            return FullBatchSampler(
                num_examples=num_examples, expected_batch_size=float(num_examples)
            )
        batch = self.expected_batch_size
        if self.sampling == "truncated_poisson":
            assert self.max_batch_size is not None
            return TruncatedPoissonSampler(
                num_examples=num_examples,
                expected_batch_size=batch,
                max_batch_size=self.max_batch_size,
            )
        kind = PoissonSampler if self.sampling == "poisson" else FixedSizeSampler
        return kind(num_examples=num_examples, expected_batch_size=batch)

    def _mechanism(self, batch: float) -> ScalarMechanism | VectorMechanism | NonPrivateMean:
        noise = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        if self.method == "mezo":
            return NonPrivateMean(expected_batch_size=batch, num_directions=self.num_directions)
        if self.method == "dpgd-0th":
            return VectorMechanism(
                clip=self.clip, noise_multiplier=noise, expected_batch_size=batch
            )
        return ScalarMechanism(
            clip=self.clip,
            noise_multiplier=noise,
            expected_batch_size=batch,
            num_directions=self.num_directions,
            distribution=self.noise_distribution,  # type: ignore[arg-type]
        )


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}.")


def _positive(name: str, value: float | None, optional: bool = False) -> None:
    if value is None and optional:
        return
    if value is None or not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be a finite number above 0.")
