"""Tables 2 and 4 of the averaged-clipping paper on synthetic data, correctly accounted and with Eq. 9.

Each method has a small grid of schedules, clips and learning rates; the best cell is chosen on another
draw of the data (public, not counted), then run on fresh draws. The grids have the same size for all
variants of averaged clipping, and a smaller one for the baselines.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from scripts.studies.averaged_clipping import algorithm as averaged_clipping
from scripts.studies.averaged_clipping import catoni_holland
from scripts.studies.averaged_clipping.algorithm import (
    Array,
    Cells,
    Data,
    Descent,
    Objective,
    calibrated,
    true_epsilon,
)
from scripts.studies.averaged_clipping.heavy_tails import (
    DIMENSION,
    NOISES,
    OBJECTIVES,
    Yardstick,
    draw,
)
from scripts.studies.averaged_clipping.parameters import paper_calibration
from scripts.studies.harness import Row, pcg64

THEOREMS = ("3 (CC)", "4 (UC)", "6 (R-AClip)", "7 (ν = 1)")
Calibration = Literal["correct", "paper"]
CALIBRATIONS: tuple[Calibration, ...] = ("correct", "paper")

POPULATION = 200_000
TUNING_EXAMPLES = 20_000  # of the population, to make a shortlist of cells
SHORTLIST = 12  # compared on the whole population
TUNING_SEED, POPULATION_SEED = 0, 10_001


class Schedule(NamedTuple):
    """N steps over all stages, expected batches of m (DP-GD: all examples)."""

    steps: int
    batch_size: int


class Method(NamedTuple):
    """A method of the tables: its setting of `Descent`, and its grid.

    DP-GD's clips are factors of the scale s of the theory. Learning rates are in units of 1/L.
    `noise_on_mean` is DP-SGD as the authors' published script runs it: Eq. 9's noise, meant for a
    clipped mean, on the mean of the clipped gradients, so m times as much on their sum.
    """

    stages: int
    projected: bool
    per_example: bool
    rates: tuple[float, ...]
    clips: tuple[float, ...]
    noise_on_mean: bool = False


_RATES, _CLIPS = (0.02, 0.06, 0.2, 0.6, 2.0), (0.03, 0.1, 0.3, 1.0)
METHODS = {
    "baseline": Method(1, False, False, _RATES, _CLIPS),
    "CC": Method(1, True, False, _RATES, _CLIPS),
    "UC": Method(1, False, False, _RATES, _CLIPS),
    "R-AClip": Method(4, False, False, _RATES, _CLIPS),
    "DP-SGD": Method(1, False, True, (0.06, 0.2, 0.6, 2.0), (1.0, 3.0, 10.0)),
    "DP-GD": Method(1, False, True, (0.2, 0.6, 1.0), (0.03, 0.1, 0.3)),
    "DP-SGD, noise x m": Method(1, False, True, _RATES, (0.3, 1.0, 3.0), noise_on_mean=True),
}
"""Name -> method; "baseline" is UC without noise."""

COLUMNS: dict[Calibration, tuple[str, ...]] = {
    "correct": ("baseline", "CC", "UC", "R-AClip", "DP-SGD", "DP-GD"),
    "paper": ("CC", "UC", "R-AClip", "DP-SGD", "DP-SGD, noise x m"),
}
"""Methods of each calibration: Eq. 9 is not for the baseline and DP-GD."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run.

    Attributes:
      num_examples: n; delta is 1/n.
      epsilons: targets.
      seeds: a draw of the data and of all randomness each.
      schedules: (N, m) of the stochastic methods.
      full_batch_steps: T of DP-GD.
      objectives, noises: keys of `OBJECTIVES` and `NOISES`.
      theorems: whose own parameters are run.
      step_factors: how many times the steps the smaller batches of the sweep are given.
    """

    fields: ClassVar = ("calibration", "objective", "noise", "method")

    num_examples: int = 100_000
    epsilons: tuple[float, ...] = (0.5, 0.75, 1.0, 2.0)
    seeds: tuple[int, ...] = tuple(range(1, 11))
    schedules: tuple[tuple[int, int], ...] = ((1000, 200), (3000, 200), (8000, 50))
    full_batch_steps: tuple[int, ...] = (10, 25)
    objectives: tuple[str, ...] = tuple(OBJECTIVES)
    noises: tuple[str, ...] = tuple(NOISES)
    theorems: tuple[str, ...] = THEOREMS
    step_factors: tuple[int, ...] = (1, 10)

    @property
    def delta(self) -> float:
        """1/n."""
        return 1 / self.num_examples

    def points(self) -> list[tuple[Calibration, str, str, str]]:
        """(calibration, objective, noise, method)."""
        pairs = [(o, n) for o in self.objectives for n in self.noises]
        return [
            (calibration, objective, noise, method)
            for calibration in CALIBRATIONS
            for objective, noise in pairs
            for method in COLUMNS[calibration]
        ]

    def measure(
        self, calibration: Calibration, name: str, noise: str, method: str
    ) -> Iterator[Row]:
        """A row for each epsilon; it is null for the baseline, as JSON knows no infinity."""
        yardstick = yardstick_of(name, noise)
        point = Point(self, calibration, OBJECTIVES[name], noise, method, yardstick)
        for row in point.rows():
            yield {k: None if v == math.inf else v for k, v in row.items()}


@functools.cache
def yardstick_of(name: str, noise: str) -> Yardstick:
    """The excess risk of an objective under a noise."""
    return Yardstick.of(OBJECTIVES[name], noise, POPULATION, POPULATION_SEED)


QUICK = Study(
    num_examples=20_000,
    epsilons=(0.5, 2.0),
    seeds=(1, 2, 3),
    schedules=((300, 200),),
    full_batch_steps=(10,),
    objectives=("linear",),
    noises=("laplace", "chi2"),
    theorems=("3 (CC)", "4 (UC)", "7 (ν = 1)"),
    step_factors=(1,),
)
"""20,000 examples, 300 steps of 200, without Theorem 6 and its 114,000 steps: about 20 seconds."""


class Choice(NamedTuple):
    """One cell of a grid with its noise."""

    schedule: Schedule
    rate: float
    clip: float
    epsilon: float
    noise: float


@dataclass(frozen=True)
class Point:
    """A method on a problem under a calibration; runs cells of it.

    The constrained variant is told ||x*||, the radius of its ball around the start.
    """

    study: Study
    calibration: Calibration
    objective: Objective
    noise: str
    method: str
    yardstick: Yardstick

    def descent(self, schedule: Schedule) -> Descent:
        """The stochastic algorithm on a schedule."""
        spec, distance = METHODS[self.method], float(np.linalg.norm(self.yardstick.best))
        return Descent(
            clipping="per_example" if spec.per_example else "averaged",
            steps=max(1, schedule.steps // spec.stages),
            batch_size=schedule.batch_size,
            stages=spec.stages,
            radius=distance if spec.projected else math.inf,
        )

    def schedules(self) -> list[Schedule]:
        """The schedules of the grid."""
        if self.method == "DP-GD":
            return [Schedule(t, self.study.num_examples) for t in self.study.full_batch_steps]
        return [Schedule(*pair) for pair in self.study.schedules]

    def epsilons(self) -> tuple[float, ...]:
        """Targets; infinity for the baseline."""
        return (math.inf,) if self.method == "baseline" else self.study.epsilons

    def noise_multiplier(self, schedule: Schedule, epsilon: float) -> float:
        """Deviation of the noise on the sum over the clip, by the point's calibration."""
        n, delta = self.study.num_examples, self.study.delta
        if epsilon == math.inf:
            return 0.0
        if self.method == "DP-GD":
            plan = catoni_holland.plan(n, schedule.steps)
            return float(plan.calibrate(epsilon=epsilon, delta=delta).mechanism.noise_multiplier)
        descent = self.descent(schedule)
        if self.calibration == "correct":
            return calibrated(descent, n, epsilon, delta)
        factor = descent.batch_size if METHODS[self.method].noise_on_mean else 1
        return factor * paper_calibration(descent, n, epsilon, delta)

    def true_epsilon(self, choice: Choice) -> float:
        """What the choice really gives at delta = 1/n."""
        if self.calibration == "correct":
            return choice.epsilon
        descent = self.descent(choice.schedule)
        return true_epsilon(descent, self.study.num_examples, choice.noise, self.study.delta)

    def grid(self, schedule: Schedule) -> list[Choice]:
        """All cells of a schedule, for all epsilons."""
        spec = METHODS[self.method]
        n, steps = self.study.num_examples, schedule.steps
        scale = catoni_holland.default_scale(n, DIMENSION, steps) if self.method == "DP-GD" else 1
        return [
            Choice(
                schedule,
                rate / self.objective.smoothness,
                clip * scale,
                epsilon,
                self.noise_multiplier(schedule, epsilon),
            )
            for epsilon, rate, clip in itertools.product(self.epsilons(), spec.rates, spec.clips)
        ]

    def run(self, choices: Sequence[Choice], data: Data, seed: int) -> Array:
        """Outputs [P, d] of choices with one schedule, on data."""
        values = np.array([(c.rate, c.clip, c.noise) for c in choices]).T
        cells, generator = Cells(*values), pcg64(seed, 1)
        schedule = choices[0].schedule
        if self.method == "DP-GD":
            return catoni_holland.run(self.objective, data, schedule.steps, cells, generator)
        return averaged_clipping.run(self.objective, data, self.descent(schedule), cells, generator)

    def draw(self, seed: int) -> Data:
        """A data set."""
        generator = pcg64(seed, 0)
        return draw(self.objective, self.noise, self.study.num_examples, generator)

    def tune(self) -> list[Choice]:
        """The best choice for each epsilon, on the public draw."""
        data, found = self.draw(TUNING_SEED), []
        for schedule in self.schedules():
            choices = self.grid(schedule)
            x = self.run(choices, data, TUNING_SEED)
            found += list(zip(self.yardstick.excess(x, TUNING_EXAMPLES), choices, x, strict=True))
        best = []
        for epsilon in self.epsilons():
            cells = sorted((f for f in found if f[1].epsilon == epsilon), key=lambda f: f[0])
            excess = self.yardstick.excess(np.stack([x for _, _, x in cells[:SHORTLIST]]))
            best.append(cells[int(excess.argmin())][1])
        return best

    def measure(self, choices: Sequence[Choice]) -> Array:
        """Excess risk and train loss over that at 0, of each choice and seed: [P, seeds, 2]."""
        found = np.zeros((len(choices), len(self.study.seeds), 2))
        for s, seed in enumerate(self.study.seeds):
            data = self.draw(seed)
            initial = self.objective.mean_loss(np.zeros((1, DIMENSION)), data)[0]
            for schedule in dict.fromkeys(c.schedule for c in choices):
                at = [i for i, c in enumerate(choices) if c.schedule == schedule]
                x = self.run([choices[i] for i in at], data, seed)
                found[at, s, 0] = self.yardstick.excess(x)
                found[at, s, 1] = self.objective.mean_loss(x, data) / initial
        return found

    def rows(self) -> list[Row]:
        """Tunes and measures: a JSON-safe row for each epsilon."""
        choices = self.tune()
        measured = self.measure(choices)
        return [
            {
                "calibration": self.calibration,
                "objective": self.objective.name,
                "noise": self.noise,
                "method": self.method,
                "epsilon": choice.epsilon,
                "true_epsilon": self.true_epsilon(choice),
                "steps": choice.schedule.steps,
                "batch_size": choice.schedule.batch_size,
                "rate": choice.rate,
                "clip": choice.clip,
                "noise_multiplier": choice.noise,
                "excess": figures[:, 0].tolist(),
                "loss_ratio": figures[:, 1].tolist(),
            }
            for choice, figures in zip(choices, measured, strict=True)
        ]
