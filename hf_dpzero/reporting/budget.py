"""The budget in numbers for logs and results: a meter of what is spent, and the entries of metrics."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan
    from hf_dpzero.reporting.privacy_report import PrivacyReport


def budget_metrics(report: PrivacyReport) -> dict[str, float]:
    """What `train` returns, and `save_metrics` writes, of a report.

    Returns:
      `epsilon` (of the completed steps), `delta`, and `target_epsilon` where there is one; nothing for a
      run that is not private, which claims nothing.
    """
    if not report.private:
        return {}
    aim = {} if report.target_epsilon is None else {"target_epsilon": report.target_epsilon}
    return {"epsilon": report.epsilon, "delta": report.delta, **aim}


class BudgetMeter:
    """A cheap upper bound on the epsilon spent so far, for progress bars and logs.

    The plan is evaluated lazily on a grid of about `points` steps and every answer is rounded up to
    the next grid point, so it never understates; it is exact on the grid and at the last step.

    Args:
      plan: the plan that runs; `plan.epsilon` is called at most `points` times.
      delta: the delta of the run.
      points: grid points, >= 1.
    """

    def __init__(self, plan: PrivacyPlan, delta: float, points: int = 20) -> None:
        if points < 1:
            raise ValueError(f"points={points} must be at least 1.")
        self._steps = plan.steps
        self._points = min(points, max(plan.steps, 1))
        self._epsilon_at = functools.cache(lambda step: plan.epsilon(delta, at=step))

    def at(self, step: int) -> float:
        """An upper bound on `plan.epsilon(delta, at=step)` for 0 <= step <= plan.steps.

        Raises:
          ValueError: `step` is not within the plan, whose budget says nothing about it.
        """
        steps = self._steps
        if not 0 <= step <= steps:
            raise ValueError(f"step={step} is outside 0..{steps}, the steps of the plan.")
        if step == 0:
            return 0.0
        index = -(-step * self._points // steps)  # the first grid point at or after `step`
        return self._epsilon_at(-(-index * steps // self._points))
