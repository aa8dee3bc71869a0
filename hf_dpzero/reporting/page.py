"""`report.html`: a run's privacy report for a reader without tools. Its text is `report_template.html`.

One file without scripts or anything from elsewhere, and with the facts alone that the report, the
trajectory and the public results hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.private_evaluations import PrivateEvaluation, together
from hf_dpzero.reporting.public import public_results
from hf_dpzero.reporting.wording import delta_words, relation_words, round_up

if TYPE_CHECKING:
    from hf_dpzero.ledger.trajectory import Trajectory

PAGE_FILE = "report.html"
TEMPLATE = Path(__file__).with_name("report_template.html")

BUDGET_AT, MOST_POINTS = (0, 1, 2, 5, 10, 15), 300
"""Twentieths of a plan that epsilon is drawn at, where a run's meter asked; most points of a curve."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 650, 10, 170  # pixels of a chart's frame
_SPEEDS = ("runtime", "per_second", "time")
_DIGESTS = {"base_model_digest": "base model", "frozen_digest": "weights that stay as they are"}


class Chart(NamedTuple):
    """A curve over steps, in pixels; ticks have their texts."""

    title: str
    points: list[tuple[float, float]]
    ticks_x: list[tuple[float, str]]
    ticks_y: list[tuple[float, str]]


def report_page(
    report: PrivacyReport,
    trajectory: Trajectory,
    *,
    history: Sequence[Mapping[str, Any]] = (),
    results: Mapping[str, Any] | None = None,
    evaluations: Sequence[PrivateEvaluation] = (),
    recipe: str = "",
) -> str:
    """The page of a run: claim, epsilon, releases and evaluations over steps, limits, settings, digests.

    Args:
      report: agrees with the trajectory; its sentences are quoted word for word.
      trajectory: of the run.
      history: the trainer's log; of its entries the evaluations are shown.
      results: `eval_*` and `zero_shot_*` numbers at the end.
      evaluations: of private rows, on record.
      recipe: YAML text of public settings, shown as it is.

    Returns:
      HTML; all that is inserted is escaped.
    """
    import jinja2

    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
    curves = _evaluated(history, results or {}, report)
    return template.render(
        report=report,
        epsilon=round_up(report.epsilon) if report.private else None,
        delta=delta_words(report.delta),
        neighbours=relation_words(report.neighboring_relation, report.privacy_unit),
        unit=relation_words("one {unit}", report.privacy_unit),
        terms=report.other_terms,
        words=lambda epsilon: epsilon if isinstance(epsilon, str) else round_up(epsilon),
        budget=_budget(report, trajectory) if report.private else None,
        released=_released(trajectory),
        metrics=curves,
        charts=[_chart(f"evaluation: {name}", c) for name, c in curves.items() if len(c) > 1],
        evaluations=evaluations,
        together=together(report, evaluations) if evaluations else "",
        digests=[
            ("these weights", report.weights_digest),
            ("trajectory", trajectory.digest()),
            *((label, trajectory.header.get(name)) for name, label in _DIGESTS.items()),
        ],
        recipe=recipe,
        frame=(_LEFT, _TOP, _RIGHT - _LEFT, _BOTTOM - _TOP),
    )


def _budget(report: PrivacyReport, trajectory: Trajectory) -> Chart:
    """Epsilon of the first steps, at the report's delta; without the choice of settings."""
    plan, delta = PrivacyPlan.from_dict(trajectory.header["plan"]), report.delta
    steps = [-(-plan.steps * twentieths // 20) for twentieths in BUDGET_AT]
    taken = dict.fromkeys([*(step for step in steps if step < report.steps), report.steps])
    curve = [(step, plan.epsilon(delta, at=step)) for step in taken]
    return _chart("epsilon after so many steps", curve, 0.0, shown=round_up)


def _released(trajectory: Trajectory) -> Chart | None:
    """Root mean square of the released numbers along the directions; None without such numbers."""
    if not trajectory.header["replayable"] or not trajectory.releases:
        return None
    count = trajectory.num_directions
    sizes = [math.hypot(*r.values[:count]) / math.sqrt(count) for r in trajectory.releases]
    each = -(-len(sizes) // MOST_POINTS)
    means = [
        (first + each, sum(part) / len(part))
        for first in range(0, len(sizes), each)
        if (part := sizes[first : first + each])
    ]
    of = f", mean of {each} steps" if each > 1 else ""
    return _chart(f"root mean square of a step's {count} released numbers{of}", means)


def _evaluated(
    history: Sequence[Mapping[str, Any]], results: Mapping[str, Any], report: PrivacyReport
) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each metric in the order of steps; step 0 is the untrained model."""
    last = report.steps if report.shipped_step is None else report.shipped_step
    found = [(0, _metrics(results, "zero_shot_"))]
    found += [(entry.get("step", -1), _metrics(entry, "eval_")) for entry in history]
    curves: dict[str, dict[int, float]] = {}
    for step, metrics in [*found, (last, _metrics(results, "eval_"))]:
        for name, value in metrics.items() if 0 <= step <= report.steps else ():
            curves.setdefault(name, {})[step] = value
    return {name: sorted(curve.items()) for name, curve in curves.items()}


def _metrics(entry: Mapping[str, Any], prefix: str) -> dict[str, float]:
    public = public_results(entry)
    return {
        name.removeprefix(prefix): value
        for name, value in public.items()
        if name.startswith(prefix) and not name.endswith(_SPEEDS)
    }


def _chart(
    title: str,
    curve: Sequence[tuple[int, float]],
    *bounds: float,
    shown: Callable[[float], str] = "{:.4g}".format,
) -> Chart:
    """Scales a curve into the frame; `bounds` are values that the axis holds at least."""
    values = [*(value for _, value in curve), *bounds]
    low, high, last = min(values), max(values), max(curve[-1][0], 1)
    if low == high:
        low, high = low - 0.5, high + 0.5

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * step / last

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low)

    return Chart(
        title,
        [(x(step), y(value)) for step, value in curve],
        [(x(step), str(step)) for step in dict.fromkeys((0, last // 2, last))],
        [(y(value), shown(value)) for value in (low, (low + high) / 2, high)],
    )
