"""PrivacyPlan: the one place that couples sampler, mechanism, steps and neighbouring relation.

Nobody types a sensitivity or a sample rate twice: the plan reads them from the objects that run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dpzero.privacy.accounting import (
    common_accountant,
    epsilon_of_group,
    epsilon_together,
    gaussian_mu,
    scheduled_parts,
)
from hf_dpzero.privacy.calibration import calibrated_noise_multiplier
from hf_dpzero.privacy.correlated.correlation import (
    Correlation,
    check_correlated,
    correlation_from_dict,
    fixed_batches_part,
    prefix_part,
)
from hf_dpzero.privacy.described import check_count, read
from hf_dpzero.privacy.events import Accountant, Part, StepSpec, check_sound, composed_event
from hf_dpzero.privacy.group_losses import GROUP_LOSSES, GroupLosses
from hf_dpzero.privacy.mechanisms import Mechanism, NotNoised, Relation, mechanism_from_dict
from hf_dpzero.privacy.mechanisms.adaptive import MIN_CLIP_CHANGE, AdaptiveClipping
from hf_dpzero.privacy.mechanisms.base import MIN_NOISE_MULTIPLIER, RELATIONS
from hf_dpzero.privacy.mechanisms.gradient import GradientMechanism
from hf_dpzero.privacy.sampling import (
    FixedBatchesSampler,
    Sampler,
    TruncatedPoissonSampler,
    sampler_from_dict,
)
from hf_dpzero.privacy.schedules import (
    Factors,
    NoiseSchedule,
    check_span,
    factors_from_dict,
    noise_schedule_from_dict,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """A whole run, as far as its privacy is concerned; immutable.

    Attributes:
      sampler: which examples each step sees.
      mechanism: clip, sum, noise, release.
      steps: T, the number of releases planned.
      relation: when two data sets are neighbours. "add_or_remove_one": one example more or less.
        "replace_one": one example exchanged (the DPZero paper's; twice the sensitivity).
        "replace_special": one example exchanged for one that contributes zero.
      accountant: "pld" (tight, default), "rdp", or "advanced_composition" (the paper's Lemma 2.2,
        full batch and replace_one only).
      after: earlier runs on the same data that this one continues from, oldest first: (plan, steps
        completed) each. Every epsilon of the plan is then that of all of them together.
      noise_schedule: the noise multiplier of each step; None for one that stays.
      clip_schedule: factor of the clip in each step; None for one that stays. It costs nothing.
      correlation: of the noise of different steps, for fixed batches; None for independent noise.
      groups: losses of groups that are released beside the steps, for group-robust training.

    Raises:
      ValueError: sampler and mechanism disagree on the batch size, `steps` < 1, or the combination
        has no sound accounting, alone or with the earlier runs; the message says what to use instead.

    >>> from hf_dpzero.privacy.mechanisms import ScalarMechanism
    >>> from hf_dpzero.privacy.sampling import PoissonSampler
    >>> plan = PrivacyPlan(
    ...     sampler=PoissonSampler(num_examples=1024, expected_batch_size=64),
    ...     mechanism=ScalarMechanism(clip=1.0, noise_multiplier=4.84, expected_batch_size=64),
    ...     steps=10_000,
    ... )
    >>> round(plan.epsilon(1e-5), 1)
    6.0
    >>> plan.epsilon(1e-5, at=0)
    0.0
    """

    sampler: Sampler
    mechanism: Mechanism
    steps: int
    relation: Relation = "add_or_remove_one"
    accountant: Accountant = "pld"
    after: tuple[tuple[PrivacyPlan, int], ...] = ()
    noise_schedule: NoiseSchedule | None = None
    clip_schedule: Factors | None = None
    correlation: Correlation | None = None
    groups: GroupLosses | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        if self.sampler.expected_batch_size != self.mechanism.expected_batch_size:
            raise ValueError(
                f"the sampler expects batches of {self.sampler.expected_batch_size}, the mechanism "
                f"divides by {self.mechanism.expected_batch_size}; give both the same "
                "expected_batch_size."
            )
        check_correlated(self)
        if not isinstance(self.mechanism, NotNoised):
            check_sound(self.spec)
        self._check_schedules()
        if self.groups is not None:
            self.groups.check(self)
        if self.after:
            self._check_earlier()

    def _check_schedules(self) -> None:
        if self.clip_schedule is not None and isinstance(self.mechanism, AdaptiveClipping):
            raise ValueError(
                f"clip_schedule={self.clip_schedule} with adaptive clipping: the clip follows the "
                "releases already; use clipping='fixed', or leave the schedule out."
            )
        for name in ("noise_schedule", "clip_schedule"):
            if getattr(self, name) is not None and isinstance(self.mechanism, NotNoised):
                raise ValueError(
                    f"{name}={getattr(self, name)} has nothing to act on: method "
                    f"{self.mechanism.name!r} neither clips nor adds noise. Leave it out."
                )
        if self.noise_schedule is None:
            if self.clip_schedule is not None:
                self.clip_schedule.factors(self.steps)
            return
        if self.accountant == "advanced_composition":
            raise ValueError(
                f"noise_schedule={self.noise_schedule}: accountant='advanced_composition' knows equal "
                "steps only; use accountant='pld'."
            )
        flattest = self.noise_schedule.multipliers(MIN_NOISE_MULTIPLIER, self.log_influence)
        check_span(self.multipliers if self.private else flattest, self.noise_schedule)

    @cached_property
    def multipliers(self) -> np.ndarray:
        """Returns the noise multiplier of each step, in the mechanism's terms, float64 [T]."""
        scale = self.mechanism.noise_multiplier
        if self.noise_schedule is None or not scale:
            return np.full(self.steps, scale)
        return self.noise_schedule.multipliers(scale, self.log_influence)

    @cached_property
    def log_influence(self) -> np.ndarray:
        """Returns log(q_t C_t^2) up to a constant: how much a step's noise counts, float64 [T]."""
        clips = 2 * np.log(self._clip_factors)
        if self.noise_schedule is None:
            return clips
        influence = self.noise_schedule.log_influence(self.steps)
        return influence + clips if self.noise_schedule.weighs_clips else influence

    @cached_property
    def _clip_factors(self) -> np.ndarray:
        clips = self.clip_schedule
        return np.ones(self.steps) if clips is None else clips.factors(self.steps)

    @property
    def scheduled(self) -> Callable[[int], Mechanism] | None:
        """Returns `mechanism_at`, or None where every step has the plan's own mechanism."""
        constant = self.noise_schedule is None and self.clip_schedule is None
        return None if constant else self.mechanism_at

    def mechanism_at(self, step: int) -> Mechanism:
        """Returns the mechanism of a step in 0..steps-1, with the schedules' noise multiplier and clip.

        That is the plan's own one where nothing is scheduled. An adaptive clip is still the first one.
        """
        mechanism, changed = self.mechanism, {}
        if self.noise_schedule is not None:
            changed["noise_multiplier"] = float(self.multipliers[step])
        if self.clip_schedule is not None:
            changed["clip"] = mechanism.clip * float(self._clip_factors[step])
        if changed and isinstance(mechanism, AdaptiveClipping) and mechanism.private:
            ratio = changed["noise_multiplier"] / mechanism.noise_multiplier
            changed["clip_count_noise"] = mechanism.clip_count_noise * ratio
        return replace(mechanism, **changed)  # type: ignore[arg-type]

    @property
    def smallest_clip(self) -> float:
        """Returns the smallest clip of the run; of automatic clipping gamma, where that is smaller."""
        mechanism = self.mechanism
        clip = mechanism.clip * float(min(self._clip_factors))
        if isinstance(mechanism, AdaptiveClipping):
            clip *= MIN_CLIP_CHANGE
        if isinstance(mechanism, GradientMechanism) and mechanism.clipping == "automatic":
            return min(clip, mechanism.clip_stability)
        return clip

    def _check_earlier(self) -> None:
        for plan, steps in self.after:
            if plan.after or not plan.private or not 1 <= steps <= plan.steps:
                raise ValueError(
                    f"an earlier run of {steps} steps of {plan.to_dict()}: it must be private, with at "
                    "least one of its steps done, and the runs before it listed beside it."
                )
            for name, before, now in (
                ("neighboring_relation", plan.relation, self.relation),
                ("number of examples", plan.sampler.num_examples, self.sampler.num_examples),
            ):
                if before != now:
                    raise ValueError(
                        f"{name}={now}, and {before} in the run that is extended: epsilons add up "
                        "for the same private data under the same relation only."
                    )
        if not self.private and isinstance(self.mechanism, NotNoised):
            raise ValueError(
                f"method {self.mechanism.name!r} is not private and extends no private run: use "
                f"{self.mechanism.private_counterpart!r}."
            )
        common_accountant(self._parts(self.steps))  # refuses parts without one

    @property
    def spec(self) -> StepSpec:
        """Returns one step as it is accounted; of fixed batches an epoch, with a correlation the run."""
        cap, mechanism, groups = self.sampler, self.mechanism, self.groups
        joint = groups.num_values if groups is not None and groups.joint else 0
        step = StepSpec(
            sampling=self.sampler.name,
            num_examples=self.sampler.num_examples,
            batch_size=float(self.sampler.expected_batch_size),
            max_batch_size=cap.max_batch_size if isinstance(cap, TruncatedPoissonSampler) else 0,
            distribution=mechanism.distribution,
            noise_multiplier=mechanism.effective_noise_multiplier * self._kept,
            num_directions=mechanism.noise_draws + joint,
            dense_draws=mechanism.dense_draws,
            relation=self.relation,
            accountant=self.accountant,
            sensitivity_replace=self.mechanism.sensitivity_replace
            // self.mechanism.sensitivity_add_remove,
        )
        if isinstance(self.sampler, FixedBatchesSampler):
            return fixed_batches_part(self, step)
        return step

    @property
    def _kept(self) -> float:
        # multiplier of a step's one Gaussian over that of its weights' part
        return 1.0 if self.groups is None else self.groups.kept

    @property
    def values_per_release(self) -> int:
        """Counts the numbers that a step writes to the ledger: the mechanism's, then the groups'."""
        own = self.mechanism.values_per_release
        return own if self.groups is None else own + self.groups.num_values

    @property
    def private(self) -> bool:
        """Says whether epsilon is finite: the mechanism clips and adds noise."""
        return self.mechanism.private

    @property
    def accountant_used(self) -> str:
        """Names the accountant behind the reported epsilon, perhaps a better one than was asked for."""
        return common_accountant(self._parts(self.steps)) if self.private else "none"

    def event(self, at: int | None = None) -> DpEvent:
        """Returns the `dp_accounting` event of the first `at` steps (default: all), 0 <= at <= steps.

        With those of the runs before it, in the convention of the accountant named by
        `accountant_used`. A step with several noises (adaptive clipping) is the one Gaussian that they
        amount to (see `events.py`).
        """
        import dp_accounting as dp

        count = self._count(at)
        if not self.private:
            return dp.NonPrivateDpEvent() if count else dp.NoOpDpEvent()
        parts = [(spec, n) for spec, n in self._parts(count) if n]
        return composed_event(parts) if parts else dp.NoOpDpEvent()

    def epsilon(self, delta: float, at: int | None = None) -> float:
        """Returns epsilon spent at `delta` after `at` steps (default: all), and by the runs before.

        An upper bound.

        Args:
          delta: in [1e-12, 1), or 0 for Laplace noise.
          at: 0 <= at <= steps.

        Returns:
          For at=0 what the runs before have spent, 0.0 without any; infinity if the plan is not private.
        """
        count = self._count(at)
        if count == 0 and not self.after:
            return 0.0
        if not self.private:
            return math.inf
        # A part of the run never costs more than the whole, so the bound for the whole caps it.
        whole = epsilon_together(self._parts(self.steps), delta)
        part = whole if count == self.steps else epsilon_together(self._parts(count), delta)
        return min(part, whole)

    def epsilon_by_relation(self, delta: float, at: int | None = None) -> dict[str, float | str]:
        """Returns what the same noise spends under each relation, or in words why that is not known."""
        found: dict[str, float | str] = {}
        for name in RELATIONS:
            after = tuple((replace(plan, relation=name), done) for plan, done in self.after)
            try:
                found[name] = replace(self, relation=name, after=after).epsilon(delta, at)
            except ValueError as error:
                found[name] = f"not accounted: {error}"
        return found

    def mu(self, at: int | None = None) -> float | None:
        """Returns mu of the one Gaussian that `at` steps and the runs before are; None for others."""
        return gaussian_mu(self._parts(self._count(at))) if self.private else None

    def epsilon_of_group(self, delta: float, examples: int, at: int | None = None) -> float:
        """Returns `epsilon` for so many examples of one person together.

        Raises:
          ValueError: see `accounting.epsilon_of_group`.
        """
        return epsilon_of_group(self._parts(self._count(at)), delta, examples)

    def _parts(self, count: int) -> tuple[Part, ...]:
        earlier = [part for plan, steps in self.after for part in plan.own_parts(steps)]
        return (*earlier, *self.own_parts(count))

    def own_parts(self, count: int | None = None) -> tuple[Part, ...]:
        """Returns the first `count` steps of this run alone (default: all) as the accounting sees them.

        Steps of different noise are grouped, each counted with no more noise than it has
        (`heterogeneous.grouped`).
        """
        count = self._count(count)
        if self.correlation is not None and self.private:
            return ((prefix_part(self, self.spec, count), 1),) if count else ()
        if self.noise_schedule is None or not self.private:
            return self._constant(self.spec, count)
        sensitivity = self.mechanism.sensitivity_add_remove
        return scheduled_parts(self.spec, self.multipliers[:count] / sensitivity * self._kept)

    def _constant(self, spec: StepSpec, count: int) -> tuple[Part, ...]:
        """Returns steps of one kind, as often as an example is in them, and what is released beside."""
        events = min(count, 1) if self.correlation is not None else self.sampler.passes(count)
        parts: tuple[Part, ...] = ((spec, events),)
        if self.groups is None or not spec.noise_multiplier or not count:
            return parts
        beside = self.groups.parts(spec, spec.noise_multiplier, self.sampler, self.steps, count)
        return parts + beside

    def parts_at(self, effective: float) -> tuple[Part, ...]:
        """Returns `own_parts` of the plan with another noise multiplier, over the sensitivity."""
        if self.noise_schedule is None:
            return self._constant(replace(self.spec, noise_multiplier=effective), self.steps)
        scaled = self.noise_schedule.multipliers(
            effective * self.mechanism.sensitivity_add_remove, self.log_influence
        )
        return scheduled_parts(self.spec, scaled / self.mechanism.sensitivity_add_remove)

    def calibrate(self, *, epsilon: float, delta: float) -> PrivacyPlan:
        """Returns the plan with the smallest noise multiplier, to 4e-4, that keeps to the target.

        Guarantee: `plan.calibrate(epsilon=e, delta=d).epsilon(d) <= e`, evaluated before return.

        Args:
          epsilon: target > 0, at the end of all steps; of this run and those before it together.
          delta: as in `epsilon`.

        Raises:
          ValueError: the mechanism has no noise to calibrate, no noise reaches the target, or
            (adaptive clipping) it is more than `clip_count_noise` allows.
        """
        mechanism = self.mechanism
        if isinstance(mechanism, NotNoised):
            raise ValueError(
                f"target epsilon={epsilon} with method {mechanism.name!r}, which has no noise to "
                f"calibrate; use method {mechanism.private_counterpart!r}, or drop the target."
            )
        effective = calibrated_noise_multiplier(
            self.parts_at,
            epsilon=epsilon,
            delta=delta,
            before=self._parts(0) if self.after else (),
        )
        noisy = replace(mechanism, noise_multiplier=self.stated_multiplier(effective))
        plan = replace(self, mechanism=noisy)
        assert plan.epsilon(delta) <= epsilon, "calibration returned a plan over its target"
        return plan

    def stated_multiplier(self, effective: float) -> float:
        """Returns the mechanism's multiplier for a step of one Gaussian of multiplier `effective`."""
        return self.mechanism.sensitivity_add_remove * effective / self._kept

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-safe description; `from_dict` reads it back."""
        earlier = [{"plan": plan.to_dict(), "steps": steps} for plan, steps in self.after]
        optional = {name: getattr(self, name) for name in _OPTIONAL}
        return {
            "sampler": self.sampler.to_dict(),
            "mechanism": self.mechanism.to_dict(),
            "steps": self.steps,
            "relation": self.relation,
            "accountant": self.accountant,
            **({"after": earlier} if earlier else {}),
            **{name: part.to_dict() for name, part in optional.items() if part is not None},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """Reads what `to_dict` described; unknown and missing keys are errors."""
        readers = {"sampler": sampler_from_dict, "mechanism": mechanism_from_dict, **_OPTIONAL}
        known = {*readers, "steps", "relation", "accountant", "after"}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"PrivacyPlan has no fields {unknown}; it has {sorted(known)}.")
        if missing := sorted({"sampler", "mechanism", "steps"} - set(values)):
            raise ValueError(f"PrivacyPlan needs {missing}; the description has {sorted(values)}.")
        fields = {k: readers[k](v) if k in readers else v for k, v in values.items()}
        earlier = ((cls.from_dict(v["plan"]), v["steps"]) for v in values.get("after", ()))
        return cls(**fields | {"after": tuple(earlier)})

    def digest(self) -> str:
        """Returns the SHA-256 (hex) of the canonical JSON, which equal plans share everywhere."""
        # Keys in one order and no spaces: the digest may depend on the plan alone, not on who wrote it.
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def _count(self, at: int | None) -> int:
        count = self.steps if at is None else at
        if not 0 <= count <= self.steps:
            raise ValueError(f"at={at} is outside 0..{self.steps}, the planned steps.")
        return count


_OPTIONAL: dict[str, Callable[[Mapping[str, object]], object]] = {
    "noise_schedule": noise_schedule_from_dict,
    "clip_schedule": factors_from_dict,
    "correlation": correlation_from_dict,
    "groups": lambda values: read(GROUP_LOSSES, "group_robust.weights", values),
}
"""How the parts that not every plan has are read from its description."""
