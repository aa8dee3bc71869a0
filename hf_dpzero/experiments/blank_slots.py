"""How much of a private zeroth-order run's forward passes stands empty, from public settings alone."""

from __future__ import annotations

from typing import Any

from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.training.pass_sizes import (
    PassSizes,
    expected_passes,
    one_size,
    pass_cost,
    pass_sizes,
)


def blank_slots(
    plan: PrivacyPlan, args: Any, longest: int | None, parameters: int, low_precision: bool
) -> dict[str, Any]:
    """Rows of forward passes, and the share of them that no example takes.

    A microbatch is filled up with blanks in each width by itself (`training.fixed_shapes`). How rows
    spread over widths is private: each width is taken to be equally likely, as `pass_sizes` does. The
    columns that pad a row to its width follow from its length and are not counted.

    Args:
      plan: of the run.
      args: `DPZeroConfig`; one process, on the device that is here.
      longest: tokens of the longest row that the settings allow; None where rows have one shape.
      parameters: of the model.
      low_precision: whether it computes in less than float32.

    Returns:
      `rows_of_a_pass` by width ("any" where rows have one shape) and `blank_share`; empty for runs
      without fixed shapes.
    """
    if args.first_order or not plan.mechanism.private:
        return {}
    expected, most = plan.sampler.expected_batch_size, args.physical_batch_size
    if longest is None:
        rows: dict[Any, int] = {"any": one_size(expected, most)}
    else:
        cost = pass_cost(args.device.type, parameters, low_precision)
        sizes: PassSizes = pass_sizes(expected, most, longest, cost)
        rows = {str(width): count for width, count in sizes.rows.items()}
    each = expected / len(rows)
    slots = sum(count * expected_passes(each, [count])[0] for count in rows.values())
    return {"rows_of_a_pass": rows, "blank_share": 1.0 - expected / slots}


def in_words(found: dict[str, Any]) -> str:
    """A line on `blank_slots` for the screen; "" where every row has a pass of its own."""
    rows = found.get("rows_of_a_pass", {})
    if max(rows.values(), default=1) == 1:
        return ""
    share = f"{100 * found['blank_share']:.0f} % of them blank"
    if "any" in rows:
        return f"forward passes have {rows['any']} rows, {share}"
    sizes = ", ".join(f"{count} of {width} tokens" for width, count in rows.items())
    return (
        f"forward passes have {sizes}; {share} where each width is equally likely (lengths are private "
        "and not looked at; columns that pad a row to its width come on top, fewer than its own)"
    )
