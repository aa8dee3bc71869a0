"""A `DPZeroConfig` as a privacy plan: sampler, mechanism and schedules, calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from transformers.utils import logging

from hf_dpzero.privacy.events import Accountant
from hf_dpzero.privacy.group_losses import GROUP_LOSSES, BudgetedGroups, GroupLosses, VertexGroups
from hf_dpzero.privacy.mechanisms import MECHANISMS, mechanism_from_dict
from hf_dpzero.privacy.mechanisms.base import DenseNoise, Relation
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import Sampler, sampler_from_dict
from hf_dpzero.reporting.caveats import weak_claims
from hf_dpzero.reporting.provenance import earlier_plans
from hf_dpzero.settings.defaults import CLASSIC
from hf_dpzero.settings.schedules import check_steps, factors_of, noise_schedule_of
from hf_dpzero.settings.setting import settings_of

if TYPE_CHECKING:
    from hf_dpzero.settings.config import DPZeroConfig

logger = logging.get_logger(__name__)

LEAST_LEFT = 0.01
"""Share of a total epsilon: where earlier runs left less, a run says so."""


def plan_of(config: DPZeroConfig, num_examples: int, dimension: int | None = None) -> PrivacyPlan:
    """Makes the plan of a run, calibrated if a target was given: see `DPZeroConfig.plan`."""
    fixed = _mechanism(config, num_examples)
    if dimension is not None and issubclass(MECHANISMS[config.method], DenseNoise):
        fixed["dimension"] = dimension
    plan = _calibrated(config, num_examples, fixed)
    if config.clipping == "adaptive":
        # Calibrated twice: z of the whole step, found first, does not depend on how it is shared out
        # between the sum and the count, and the count's default noise follows from z.
        z = plan.mechanism.effective_noise_multiplier
        own = config.clipping_config
        count_noise = own.count_noise or max(plan.mechanism.expected_batch_size / 20, z)
        fixed |= {
            "name": f"{config.method}-adaptive",
            "clip_quantile": own.quantile,
            "clip_learning_rate": own.learning_rate,
            "clip_count_noise": count_noise,
        }
        fixed.pop("distribution", None)
        plan = _calibrated(config, num_examples, fixed)
    check_steps(plan)
    target = config.target_epsilon or 0.0  # where noise is given the report tells
    for claim in weak_claims(plan, target, config.delta(num_examples)) if plan.private else ():
        logger.warning_once(claim)
    return plan


def _calibrated(
    config: DPZeroConfig, num_examples: int, mechanism: Mapping[str, Any]
) -> PrivacyPlan:
    steps = config.steps(num_examples)
    plan = PrivacyPlan(
        sampler=sampler_of(config, num_examples),
        mechanism=mechanism_from_dict(mechanism),
        steps=steps,
        relation=cast(Relation, config.neighboring_relation),
        accountant=cast(Accountant, config.accountant),
        after=earlier_plans(config.extends_run),
        noise_schedule=noise_schedule_of(config, steps),
        clip_schedule=factors_of("schedules.clip", config.schedules.clip),
        correlation=config.correlated_noise.correlation(config.first_order),
        groups=groups_of(config),
    )
    if config.target_epsilon is None or config.not_private:
        return plan
    return plan.calibrate(epsilon=config.target_epsilon, delta=config.delta(num_examples))


def extension_warning(plan: PrivacyPlan, target: float | None, delta: float) -> str:
    """What to say of a run whose earlier runs left it next to nothing of the budget; "" of others.

    A target that is taken for this run's own, and given as that of the run it extends, leaves the
    rounding of the first calibration: noise that nothing is learned through.

    Args:
      plan: of the run, calibrated.
      target: epsilon of all runs together; None where the noise was given.
      delta: of the target.

    Returns:
      A sentence if less than a hundredth of the target was left.
    """
    if target is None or not plan.after:
        return ""
    spent = plan.epsilon(delta, at=0)
    if target - spent >= LEAST_LEFT * target:
        return ""
    return (
        f"target_epsilon={target:g} is the total with the runs that this one extends, which spent "
        f"{spent:.5g} of it: what is left asks for a noise multiplier of "
        f"{plan.mechanism.noise_multiplier:.3g}. Give the epsilon of all runs together."
    )


def sampler_of(config: DPZeroConfig, num_examples: int) -> Sampler:
    """The sampler of a `DPZeroConfig` for n rows; a B above n is n."""
    size, cap = config.expected_batch_size, config.max_batch_size
    if config.sampling == "full_batch":
        size = num_examples
    elif size is not None and size > num_examples:
        logger.warning_once(
            f"expected_batch_size={size:g} is more than the {num_examples} rows: each step takes "
            "them all."
        )
        size = num_examples
    settings = {
        "name": config.sampling,
        "num_examples": num_examples,
        "expected_batch_size": size,
    }
    return sampler_from_dict(settings | ({} if cap is None else {"max_batch_size": cap}))


def _mechanism(config: DPZeroConfig, num_examples: int) -> dict[str, Any]:
    """The method's mechanism by name and fields, for `mechanism_from_dict`; its clip fixed."""
    batch = sampler_of(config, num_examples).expected_batch_size
    values: dict[str, Any] = {"name": config.method, "expected_batch_size": batch}
    if not config.not_private:
        values |= {"clip": config.clip, "noise_multiplier": config.noise_multiplier or 0.0}
        values["rows_per_unit"] = config.rows_per_unit
    if not config.first_order:
        # Until a model decides on K any will do: a row's K differences are one clipped vector.
        values["num_directions"] = config.num_directions or CLASSIC["num_directions"]
    if config.method == "dpzero":
        values["distribution"] = config.noise_distribution
    if config.clipping == "automatic":
        values |= {"clipping": "automatic", "clip_stability": config.clipping_config.stability}
    if config.clipping == "averaged":
        own = {"clipping": "averaged"} if config.first_order else {"name": "dpzero-averaged"}
        values |= {**own, "clip_groups": config.clipping_config.groups}
    return values


def groups_of(config: DPZeroConfig) -> GroupLosses | None:
    """What `group_robust` says of groups; None without its column.

    Raises:
      ValueError: a setting that is missing, or of no effect or sense.
    """
    asked = config.group_robust
    if asked.column is None:
        for field, _ in settings_of(asked):
            if (value := getattr(asked, field.name)) != field.default:
                raise ValueError(
                    f"group_robust.{field.name}={value!r} without group_robust.column: name the column "
                    f"of train_dataset that holds each row's group, or leave {field.name} out."
                )
        return None
    if not isinstance(asked.shares, Mapping) or not asked.shares:
        raise ValueError(
            f"group_robust.shares={asked.shares!r} with group_robust.column={asked.column!r}: give "
            "every group's name and public share, {urban: 0.8, rural: 0.2}, from a source outside of "
            "the private rows (a census, say). Counted on these, both would be published without noise."
        )
    for name, share in asked.shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise ValueError(
                f"group_robust.shares gives {name!r} the share {share!r}: give a number in (0, 1]."
            )
    kind = GROUP_LOSSES[asked.weights]
    values: dict[str, Any] = {
        "names": tuple(map(str, asked.shares)),
        "shares": tuple(map(float, asked.shares.values())),
        "loss_bound": asked.loss_bound,
    }
    if not issubclass(kind, VertexGroups):
        values["rate"] = asked.rate
    elif asked.rate is None:
        values["draws"] = asked.draws
    else:
        raise ValueError(
            f"group_robust.rate={asked.rate} with group_robust.weights='vertex', whose rate follows "
            "from the budget (each draw costs in proportion to its square): set "
            "group_robust.budget, or use other weights."
        )
    if issubclass(kind, BudgetedGroups):
        values["budget"] = asked.budget
    return kind(**values)
