"""How much of a private zeroth-order run's forward passes stands empty, from public settings alone."""

from __future__ import annotations

from typing import Any

from hf_dpzero.batches.placement import (
    Placement,
    buckets,
    pass_cost,
    public_shares,
    sizes_up_to,
)
from hf_dpzero.privacy.plan import PrivacyPlan


def blank_slots(
    plan: PrivacyPlan, args: Any, longest: int | None, parameters: int, low_precision: bool
) -> dict[str, Any]:
    """Rows of forward passes, and the share of them that no example takes.

    A pass is filled up with blanks in each width by itself (`batches.shapes`). Without public
    rows each width is taken to be equally likely. The columns that pad a row to its width follow from
    its length and are not counted.

    Args:
      plan: of the run.
      args: `DPZeroConfig`; one process, on the device that is here.
      longest: tokens of the longest row that the settings allow; None where rows have one shape.
      parameters: of the model.
      low_precision: whether it computes in less than float32.

    Returns:
      `passes`, expected in a step for one direction and sign, `rows_of_a_pass`, their mean, and
      `blank_share`; empty for runs without fixed shapes.
    """
    if not plan.mechanism.private:
        return {}
    expected, sizes = plan.sampler.expected_batch_size, sizes_up_to(args.physical_batch_size)
    widths = [0] if longest is None else buckets(longest, cut=longest)
    cost = pass_cost(args.device.type, parameters, low_precision)
    placement = Placement(expected, sizes, public_shares([], widths), cost)
    slots, passes = placement.expected_slots(), placement.expected_passes()
    return {
        "passes": passes,
        "rows_of_a_pass": slots / passes,
        "blank_share": 1.0 - expected / slots,
    }


def in_words(found: dict[str, Any]) -> str:
    """A line on `blank_slots` for the screen; "" where every row has a pass of its own."""
    if found.get("rows_of_a_pass", 1.0) <= 1.0:
        return ""
    return (
        f"a step is expected to take {found['passes']:.0f} forward passes for each sign of a direction, "
        f"of {found['rows_of_a_pass']:.0f} rows on average, {100 * found['blank_share']:.0f} % of them "
        "blank, where each width is equally likely (an evaluation set tells better; private lengths are "
        "not looked at)"
    )
