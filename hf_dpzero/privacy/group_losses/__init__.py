"""Group-robust training: losses of groups, released privately, and the weights that follow from them.

`base.py` has the definitions, the sensitivities and why the ways below are sound.

| group_weights | module | batches |
|---|---|---|
| balanced | `noised.py` | any |
| per_step | `noised.py` | any |
| prefix_sum | `noised.py` | fixed_batches, full_batch |
| vertex | `vertex.py` | fixed_batches, full_batch |
"""

from hf_dpzero.privacy.group_losses.base import (
    BudgetedGroups,
    GroupLosses,
    GroupPlayer,
    metric_keys,
    places,
)
from hf_dpzero.privacy.group_losses.noised import BalancedGroups, PerStepGroups, PrefixSumGroups
from hf_dpzero.privacy.group_losses.vertex import VertexGroups

__all__ = [
    "GROUP_LOSSES",
    "BalancedGroups",
    "BudgetedGroups",
    "GroupLosses",
    "GroupPlayer",
    "PerStepGroups",
    "PrefixSumGroups",
    "VertexGroups",
    "metric_keys",
    "places",
]

GROUP_LOSSES: dict[str, type[GroupLosses]] = {
    kind.name: kind for kind in (BalancedGroups, PerStepGroups, PrefixSumGroups, VertexGroups)
}
"""Every release by name."""
