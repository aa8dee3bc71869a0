"""Measurements on the saddle point paper: gaps against n and dimension, DP-SCO, synthetic data.

The runs draw from seeded generators, so that they can be repeated: nothing here is a private release.
The epsilons are those that the same plans have with secure draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hf_dpzero.papers import synthetic_data
from hf_dpzero.papers.saddle_point import solve
from hf_dpzero.papers.saddle_point_parameters import (
    Calibration,
    Problem,
    anytime,
    bias_reduced_descent,
    mirror_descent,
)
from hf_dpzero.papers.saddle_point_plans import Plan
from hf_dpzero.privacy.noise import InsecureSeededNoise
from scripts.studies.harness import Row, pcg64
from scripts.studies.saddle_point import releases
from scripts.studies.saddle_point.problems import Bilinear, LeastSquares, SmoothGame
from scripts.studies.saddle_point.text_table import Table, text_table

RELEASES = ("laplace histogram", "gaussian histogram", "gaussian answers")
STEP_FACTORS = (0.25, 1.0, 4.0)
"""Steps of Algorithm 5 over the theorem's, under the corrected account."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run.

    Attributes:
      epsilon, delta: the target; below 1, where the paper's calibration is defined.
      seeds: problem, examples and draws each.
      sizes: n of the bilinear games, `dimension` vertices each.
      dimension: of them.
      dimensions: d of the bilinear games with `fixed_size` examples.
      fixed_size: their n.
      smooth_sizes: n of the smooth games (Algorithms 1 and 3).
      regression_sizes: n of least squares with 200 vertices (Algorithm 4).
      query_sizes: n of random queries on 128 cells (Algorithm 5).
      texts: folder with train.jsonl for the table of sentences; "" leaves that part out.
    """

    fields: ClassVar = ("part", "size", "method")

    epsilon: float = 0.9
    delta: float = 1e-6
    seeds: tuple[int, ...] = (1, 2, 3)
    sizes: tuple[int, ...] = (10_000, 30_000, 100_000, 300_000, 1_000_000)
    dimension: int = 50
    dimensions: tuple[int, ...] = (10, 30, 100, 300, 1000)
    fixed_size: int = 100_000
    smooth_sizes: tuple[int, ...] = (10_000, 100_000, 300_000)
    regression_sizes: tuple[int, ...] = (100_000, 300_000)
    query_sizes: tuple[int, ...] = (1_000, 5_000, 20_000, 100_000)
    texts: str = ""

    def points(self) -> list[tuple[str, int, str]]:
        """(part, n or d, method), each a row; the small ones first."""
        table = (
            [("table", size, m) for size in (0, 1) for m in query_methods()] if self.texts else []
        )
        points = [
            *(("n", n, m) for n in self.sizes for m in ("paper", "corrected", "uncapped")),
            *(("dimension", d, m) for d in self.dimensions for m in ("paper", "corrected")),
            *(("smooth", n, m) for n in self.smooth_sizes for m in SMOOTH),
            *(("regression", n, m) for n in self.regression_sizes for m in REGRESSION),
            *(("queries", n, m) for n in self.query_sizes for m in query_methods()),
            *table,
        ]
        return sorted(points, key=lambda point: point[1])

    def measure(self, part: str, size: int, method: str) -> list[Row]:
        """The row of a point."""
        return [Point(self, part, size, method).row()]


QUICK = Study(
    seeds=(1, 2),
    sizes=(10_000, 30_000),
    dimensions=(10, 100),
    fixed_size=20_000,
    smooth_sizes=(10_000, 30_000),
    regression_sizes=(20_000,),
    query_sizes=(1_000, 20_000),
)
"""Up to 30,000 examples and two seeds: about 20 seconds."""

SMOOTH = ("second", "first", "bilinear", "bias-reduced", "bias-reduced, paper")
"""Algorithm 1 with the parameters of three theorems, Algorithm 3 under both calibrations."""

REGRESSION = ("second", "first", "second, paper")
"""Algorithm 4."""


def query_methods() -> list[str]:
    """Algorithm 5 under both calibrations, with other numbers of steps, and the plain releases."""
    more = [f"corrected, {f:g} T" for f in STEP_FACTORS if f != 1]
    return ["paper", "corrected", *more, *RELEASES]


@dataclass(frozen=True)
class Point:
    """One row to measure."""

    study: Study
    part: str
    size: int
    method: str

    def row(self) -> Row:
        """The part's measurement, JSON-safe."""
        measures: dict[str, Callable[[], Row]] = {
            "n": lambda: self._bilinear(self.size, self.study.dimension),
            "dimension": lambda: self._bilinear(self.study.fixed_size, self.size),
            "smooth": self._smooth,
            "regression": self._regression,
            "queries": self._random_queries,
            "table": self._table,
        }
        key = {"part": self.part, "size": self.size, "method": self.method}
        return {**key, **measures[self.part]()}

    def _problem(self, num_examples: int, dimensions: tuple[int, int], **norms: float) -> Problem:
        target = {"epsilon": self.study.epsilon, "delta": self.study.delta}
        return Problem(num_examples=num_examples, dimensions=dimensions, **target, **norms)

    def _bilinear(self, num_examples: int, dimension: int) -> Row:
        problem = self._problem(num_examples, (dimension, dimension))
        calibration: Calibration = "paper" if self.method == "paper" else "corrected"
        plan = mirror_descent(problem, "bilinear", calibration)
        if self.method == "uncapped":
            tau = math.sqrt(2 * problem.log_dimension / (5 * plan.steps))
            plan = replace(plan, step_size=tau)

        def game(seed: int) -> Bilinear:
            return Bilinear(num_examples, (dimension, dimension), seed)

        return self._gaps(plan, game)

    def _smooth(self) -> Row:
        shape, calibration = (20, 20), "paper" if self.method.endswith("paper") else "corrected"
        example = SmoothGame(1, shape)
        problem = self._problem(
            self.size, shape, lipschitz=example.lipschitz, smoothness=4.0, second_order=6.0
        )
        if self.method.startswith("bias-reduced"):
            levels = pcg64(self.size, 9)
            try:
                plan: Plan = bias_reduced_descent(problem, levels, calibration)  # type: ignore[arg-type]
            except ValueError as error:
                return {"refused": str(error)}
        else:
            plan = mirror_descent(problem, self.method)  # type: ignore[arg-type]
        return self._gaps(plan, lambda seed: SmoothGame(self.size, shape, seed=seed))

    def _gaps(self, plan: Plan, game: Callable[[int], Any]) -> Row:
        gaps, uniform = [], []
        for seed in self.study.seeds:
            oracle = game(seed)
            found = solve(oracle, plan, InsecureSeededNoise(seed))
            gaps.append(oracle.gap(found.x, found.y))
            uniform.append(oracle.gap(*(np.full(d, 1 / d) for d in plan.dimensions)))
        return {**self._facts(plan), "values": gaps, "uniform": uniform}

    def _facts(self, plan: Plan) -> Row:
        return {
            "num_examples": plan.num_examples,
            "dimensions": list(plan.dimensions),
            "steps": len(plan.batch_sizes),
            "vertices": getattr(plan, "vertices", None),
            "step_size": plan.step_size,
            "true_epsilon": plan.epsilon(self.study.delta),
        }

    def _regression(self) -> Row:
        smoothness, _, calibration = self.method.partition(", ")
        problem = self._problem(self.size, (200, 1), lipschitz=2.0)
        plan = anytime(problem, smoothness, calibration or "corrected")  # type: ignore[arg-type]
        values, uniform = [], []
        for seed in self.study.seeds:
            oracle = LeastSquares(self.size, 200, seed=seed)
            values.append(oracle.excess(solve(oracle, plan, InsecureSeededNoise(seed)).x))
            uniform.append(oracle.excess(np.full(200, 1 / 200)))
        return {**self._facts(plan), "refresh": plan.refresh, "values": values, "uniform": uniform}

    def _random_queries(self) -> Row:
        def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
            draw = pcg64(seed, 5)
            queries = draw.choice([-1.0, 1.0], (100, 128))
            return queries, draw.choice(128, self.size, p=draw.dirichlet(np.full(128, 0.1)))

        return self._answers(drawn, 128)

    def _table(self) -> Row:
        table: Table = text_table(Path(self.study.texts))
        if self.size == 0:
            table = table.without("letter")
        queries, cells = table.marginals(), table.cells
        return self._answers(lambda _: (queries, cells), table.num_cells)

    def _answers(self, drawn: Callable[[int], Any], num_cells: int) -> Row:
        """Largest error over the queries on the sample, for each seed."""
        values: list[float] = []
        uniform: list[float] = []
        facts: Row = {}
        for seed in self.study.seeds:
            queries, cells = drawn(seed)
            shares = synthetic_data.histogram(cells, num_cells)
            found, facts = self._released(queries, cells, seed)
            values.append(float(np.abs(queries @ shares - found).max()))
            uniform.append(float(np.abs(queries @ (shares - 1 / num_cells)).max()))
        facts |= {"num_examples": len(cells), "dimensions": [num_cells, len(queries)]}
        return {**facts, "values": values, "uniform": uniform}

    def _released(self, queries: Any, cells: Any, seed: int) -> tuple[np.ndarray, Row]:
        """Answers to the queries by the method, and what it was."""
        epsilon, delta, noise = self.study.epsilon, self.study.delta, InsecureSeededNoise(seed)
        if self.method in RELEASES:
            return self._plain(queries, cells, noise), {"true_epsilon": epsilon}
        calibration, _, factor = self.method.partition(", ")
        sizes = (len(cells), queries.shape[1], 2 * len(queries))
        target = {"epsilon": epsilon, "delta": delta, "calibration": calibration}
        plan = synthetic_data.parameters(*sizes, **target)  # type: ignore[arg-type]
        if factor:
            steps = max(2, round(plan.steps * float(factor.split()[0])))
            plan = synthetic_data.parameters(*sizes, **target, steps=steps)  # type: ignore[arg-type]
        closed = synthetic_data.with_negations(queries)
        found = synthetic_data.synthesize(closed, cells, plan, noise)
        facts = {"steps": plan.steps, "step_size": plan.step_y, "true_epsilon": plan.epsilon(delta)}
        return queries @ found.weights, facts

    def _plain(self, queries: Any, cells: Any, noise: InsecureSeededNoise) -> np.ndarray:
        epsilon, delta = self.study.epsilon, self.study.delta
        shares, n = synthetic_data.histogram(cells, queries.shape[1]), len(cells)
        if self.method == "gaussian answers":
            return releases.gaussian_answers(queries, shares, n, epsilon, delta, noise)
        target = (epsilon,) if self.method == "laplace histogram" else (epsilon, delta)
        return np.asarray(queries @ releases.noised_histogram(shares, n, noise, *target))
