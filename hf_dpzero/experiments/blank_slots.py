"""How much of a private zeroth-order run's forward passes stands empty, from public settings alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.training.fixed_shapes import NARROWEST, bucket, slots


def blank_slots(plan: PrivacyPlan, args: Any, longest: int, of_one_width: bool) -> dict[str, Any]:
    """Rows of a forward pass, and the share of them that no example takes.

    Microbatches are filled up with blanks in each width by itself (`training.fixed_shapes`). How rows
    spread over widths is private, so the share is given for the best and for an even spread; the
    columns that pad a row to its width follow from its length and are not counted.

    Args:
      plan: of the run.
      args: `DPZeroConfig`; one process is meant.
      longest: tokens of the longest row that the settings allow.
      of_one_width: stored features, images.

    Returns:
      `slots`, `widths` and `blank_share`: [of one width, evenly over all widths]; empty for runs without
      fixed shapes.
    """
    if args.first_order or not plan.mechanism.private:
        return {}
    rows = slots(plan.sampler.expected_batch_size, args.physical_batch_size, not of_one_width)
    widths = {bucket(n, longest, longest) for n in range(min(NARROWEST, longest), longest + 1)}
    most = 1 if of_one_width else len(widths)
    return {
        "slots": rows,
        "widths": most,
        "blank_share": [_share(plan, rows, 1), _share(plan, rows, most)],
    }


def _share(plan: PrivacyPlan, rows: int, widths: int) -> float:
    """1 - B / (b E[passes]), where each width has passes for a 1/W share of the batch."""
    from scipy.stats import binom

    sampler: Any = plan.sampler
    expected, n = sampler.expected_batch_size, sampler.num_examples
    drawn = isinstance(sampler, PoissonSampler)  # others have batches of one size
    trials, of_width = (n, expected / n / widths) if drawn else (round(expected), 1.0 / widths)
    # E[ceil(N / b)] is the sum over j of P(N > j b), N binomial
    passes = float(binom.sf(np.arange(0, trials, rows), trials, of_width).sum())
    return 1.0 - expected / (rows * widths * passes)


def in_words(found: dict[str, Any]) -> str:
    """A line on `blank_slots` for the screen; "" where there is nothing to say."""
    if found.get("slots", 1) == 1:
        return ""
    best, even = (f"{100 * share:.0f} %" for share in found["blank_share"])
    spread = f", {even} where they spread evenly over {found['widths']} widths"
    return (
        f"forward passes have {found['slots']} rows; {best} of these are blank where all examples have "
        f"one width{spread * (found['widths'] > 1)} (from public settings: lengths are not looked at)"
    )
