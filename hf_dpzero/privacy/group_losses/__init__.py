"""Group-robust training: losses of groups, released privately, and the weights that follow from them.

`base.py` has the definitions, the sensitivities and why the ways of `releases.py` are sound: `balanced`
and `per_step` for any batches, `prefix_sum` and `vertex` for fixed_batches and full_batch.
"""

from hf_dpzero.privacy.group_losses.base import (
    BudgetedGroups,
    GroupLosses,
    GroupPlayer,
    metric_keys,
    places,
)
from hf_dpzero.privacy.group_losses.releases import (
    BalancedGroups,
    PerStepGroups,
    PrefixSumGroups,
    VertexGroups,
)

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
