"""Group-robust training: losses of groups, released privately, and the weights that follow from them.

`base.py` has the definitions, the sensitivities and why the ways below are sound.

| group_weights | module | batches |
|---|---|---|
| balanced | `per_step.py` | any |
| per_step | `per_step.py` | any |
| prefix_sum | `prefix_sum.py` | fixed_batches, full_batch |
| vertex | `vertex.py` | fixed_batches, full_batch |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hf_dpzero.privacy.group_losses.base import BudgetedGroups, GroupLosses, GroupPlayer
from hf_dpzero.privacy.group_losses.names import metric_keys, places
from hf_dpzero.privacy.group_losses.per_step import BalancedGroups, PerStepGroups
from hf_dpzero.privacy.group_losses.prefix_sum import PrefixSumGroups
from hf_dpzero.privacy.group_losses.vertex import VertexGroups
from hf_dpzero.privacy.group_losses.words import group_warning, group_words

__all__ = [
    "GROUP_LOSSES",
    "BalancedGroups",
    "BudgetedGroups",
    "GroupLosses",
    "GroupPlayer",
    "PerStepGroups",
    "PrefixSumGroups",
    "VertexGroups",
    "group_losses_from_dict",
    "group_warning",
    "group_words",
    "metric_keys",
    "places",
]

GROUP_LOSSES: dict[str, type[GroupLosses]] = {
    kind.name: kind for kind in (BalancedGroups, PerStepGroups, PrefixSumGroups, VertexGroups)
}
"""Every release by name."""


def group_losses_from_dict(values: Mapping[str, Any]) -> GroupLosses:
    """What `to_dict` described; an unknown name and unknown keys are errors."""
    settings = dict(values)
    name = settings.pop("name", None)
    if name not in GROUP_LOSSES:
        raise ValueError(f"group_weights={name!r} is unknown; use one of {sorted(GROUP_LOSSES)}.")
    known = {field.name for field in dataclasses.fields(GROUP_LOSSES[name])}
    if unknown := sorted(set(settings) - known):
        raise ValueError(
            f"{GROUP_LOSSES[name].__name__} has no fields {unknown}; it has {sorted(known)}."
        )
    return GROUP_LOSSES[name](**settings)
