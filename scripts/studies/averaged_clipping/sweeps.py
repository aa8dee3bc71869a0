"""Tables of the averaged-clipping study on one problem: theorems' parameters; groups and steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from scripts.markdown import table
from scripts.studies.averaged_clipping import algorithm as averaged_clipping
from scripts.studies.averaged_clipping.algorithm import (
    LINEAR,
    Array,
    Cells,
    Descent,
    calibrated,
    true_epsilon,
)
from scripts.studies.averaged_clipping.heavy_tails import DIMENSION, RADIUS, draw, optimum
from scripts.studies.averaged_clipping.parameters import (
    Parameters,
    Problem,
    constrained,
    hoelder,
    paper_calibration,
    restarted,
    unconstrained,
)
from scripts.studies.averaged_clipping.study import METHODS, TUNING_SEED, Study
from scripts.studies.harness import interval, pcg64

NOISE, EPSILON = "laplace", 1.0
GROUPS = (1, 4, 16, 64)


def shown_epsilon(epsilon: float | None) -> str:
    """Three digits, or ∞ for an infinite epsilon (null in a results file).

    The accounting of computed noise ends where its finite tails would tell runs apart
    (`privacy.discretization`): from about 95 at the size of the study.

    >>> shown_epsilon(1.2345), shown_epsilon(None)
    ('1.23', '∞')
    """
    return "∞" if epsilon is None or epsilon == math.inf else f"{epsilon:.3g}"


def theorem_table(study: Study) -> str:
    """What the theorems' parameters ask for and reach, linear regression, constants as published.

    With noise of variance 2, sigma^2 at the start is, with w = x - x*,
    E ||2 xi (<xi, w> - e)||^2 - ||2 w||^2 = 4 (d + 1) R^2 + 8 d.
    """
    noises = ("Eq. 9 noise / λ", "its true ε", "needed noise / λ")
    head = ("theorem", "N", "m", "λ", "γ", *noises, "excess, Eq. 9", "excess, correct")
    problem = Problem(
        smoothness=LINEAR.smoothness, distance=RADIUS, dimension=DIMENSION,
        variance=4 * (DIMENSION + 1) * RADIUS**2 + 8 * DIMENSION,
        num_examples=study.num_examples, epsilon=EPSILON, delta=study.delta,
    )  # fmt: skip
    makers: dict[str, Callable[[], Parameters]] = {
        "3 (CC)": lambda: constrained(problem),
        "4 (UC)": lambda: unconstrained(problem),
        "6 (R-AClip)": lambda: restarted(problem, strong_convexity=LINEAR.smoothness),
        "7 (ν = 1)": lambda: hoelder(problem, 1.0, LINEAR.smoothness, accuracy=0.1),
    }
    lines = []
    for name in study.theorems:
        try:
            lines.append([name, *_theorem_row(study, makers[name]())])
        except ValueError as error:
            lines.append([name, f"refused: {str(error).split(':')[0]}", *[""] * 8])
    return table(head, lines)


def _theorem_row(study: Study, parameters: Parameters) -> list[str]:
    descent, rate, clip = parameters
    n, delta = study.num_examples, study.delta
    published = paper_calibration(descent, n, EPSILON, delta)
    needed = calibrated(descent, n, EPSILON, delta)
    cells = [(rate, clip, published), (rate, clip, needed)]
    excess = [_excess(study, descent, cells, seed).tolist() for seed in study.seeds]
    risks = [str(interval(values)) for values in zip(*excess, strict=True)]
    spent = true_epsilon(descent, n, published, delta)
    shown = [
        str(descent.steps * descent.stages),
        str(descent.batch_size),
        *(f"{v:.3g}" for v in (clip, rate, published)),
        shown_epsilon(spent),
        f"{needed:.3g}",
    ]
    return shown + risks


def sweeps(study: Study) -> list[Descent]:
    """More groups, fewer examples in a batch, more steps; per-example clipping beside each."""
    steps, m = study.schedules[min(1, len(study.schedules) - 1)]
    grouped = [Descent(steps=steps, batch_size=m, groups=k) for k in GROUPS]
    smaller = [(f * steps, m // part) for f in study.step_factors for part in (4, 20)]
    others = [(clipping, pair) for pair in smaller for clipping in ("averaged", "per_example")]
    return [
        *grouped,
        Descent(clipping="per_example", steps=steps, batch_size=m),
        *(Descent(clipping=c, steps=n, batch_size=b) for c, (n, b) in others),  # type: ignore[arg-type]
    ]


def sweep_table(study: Study) -> str:
    """Excess risk of linear regression with the best of the study's clips and rates for each row."""
    noise_name = "noise / λ on the release"
    head = ("clipping", "k", "steps x batch", noise_name, "λ", "γ", "excess risk")
    lines = []
    for descent in sweeps(study):
        sigma = calibrated(descent, study.num_examples, EPSILON, study.delta)
        spec = METHODS["DP-SGD" if descent.clipping == "per_example" else "UC"]
        grid = [
            (rate / LINEAR.smoothness, clip, sigma)
            for rate, clip in itertools.product(spec.rates, spec.clips)
        ]
        scores = _excess(study, descent, grid, TUNING_SEED)
        best = grid[int(np.nan_to_num(scores, nan=np.inf).argmin())]
        values = [float(_excess(study, descent, [best], s)[0]) for s in study.seeds]
        k = descent.groups if descent.clipping == "averaged" else "–"
        shown = (f"{v:.3g}" for v in (sigma / descent.divisor, best[1], best[0]))
        size = f"{descent.steps} x {descent.batch_size}"
        lines.append([descent.clipping.replace("_", "-"), k, size, *shown, interval(values)])
    return table(head, lines)


def _excess(
    study: Study, descent: Descent, grid: Sequence[tuple[float, float, float]], seed: int
) -> Array:
    """Excess risk of (rate, clip, noise multiplier) on one draw, [P]."""
    data = draw(LINEAR, NOISE, study.num_examples, pcg64(seed, 0))
    generator = pcg64(seed, 1)
    x = averaged_clipping.run(LINEAR, data, descent, Cells(*np.array(grid).T), generator)
    return np.asarray(((x - optimum()) ** 2).sum(axis=1))
