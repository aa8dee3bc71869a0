"""The experiments of the online federated paper: accuracy of each noise under each calibration.

Each noise has a small grid of server steps; the best is chosen on another draw of data and noise
(public, not counted) and run on fresh draws. Logistic regression runs the whole grid on all draws.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.correlated.factorization import MAX_DENSE_ROUNDS, Factorization
from scripts.studies.harness import Row, philox
from scripts.studies.online_federated import logistic, network
from scripts.studies.online_federated.algorithm import (
    DENSE,
    NOISES,
    Cells,
    Federation,
    Oracle,
    Stream,
    calibrated,
    increments,
    paper_column_bound,
    paper_deviation,
    paper_tree_norm,
    simulate,
    true_epsilon,
)

Array = NDArray[Any]
Calibration = Literal["exact", "convex", "paper", "over tau"]

MAX_NORM = 12.0
"""Of features under the convex calibration: they have norms of 10.2 +- 0.8."""
EVALUATIONS = 50
TAIL = 0.8


class Point(NamedTuple):
    """One setting of an experiment, in which all noises are run.

    Attributes:
      experiment: "logistic" or "digits".
      local_steps: tau.
      calibration: "exact" (Gaussian mechanism, sensitivity 2 B_g), "convex" (the same with 2 B_g / tau,
        proven for logistic regression), "paper" (Lemma IV.8, with Eq. 8 for Toeplitz noise and all
        nodes of the tree), "over tau" (2 B_g / tau without a proof: not private).
      epsilon, delta: what the calibration is for.
    """

    experiment: str
    local_steps: int
    calibration: Calibration
    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run.

    Attributes:
      records, digit_records: of each learner; R = records / tau.
      learners, dimension: n and d of logistic regression.
      heterogeneity: (alpha, beta) of the synthetic data.
      widths: filters, hidden, second of the network.
      steps, digit_steps: grids of etilde, times the clip.
      digit_clip: B_g of the digits; logistic regression has 1.
      seeds, digit_seeds, tuning_seeds, digit_tuning_seeds: draws of everything.
      noises, digit_noises: keys of `NOISES`, the noiseless run first.
      targets: (tau, calibration, epsilon, delta) of logistic regression.
      digit_targets: (tau, calibration, epsilon) of the digits, at delta = 1e-3.
    """

    fields: ClassVar = Point._fields

    records: int = 5000
    digit_records: int = 5000
    learners: int = 20
    dimension: int = 100
    heterogeneity: tuple[float, float] = (0.1, 0.1)
    widths: tuple[int, int, int] = (4, 16, 10)
    steps: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    digit_steps: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    digit_clip: float = 0.3
    seeds: int = 10
    digit_seeds: int = 5
    tuning_seeds: int = 10
    digit_tuning_seeds: int = 3
    noises: tuple[str, ...] = tuple(NOISES)
    digit_noises: tuple[str, ...] = ("noiseless", "independent", "tree", "optimized", "toeplitz")
    targets: tuple[tuple[int, Calibration, float, float], ...] = (
        (5, "exact", 0.5, 1e-3),
        (5, "exact", 2.0, 1e-3),
        (5, "exact", 2.0, 1e-5),
        (5, "convex", 0.5, 1e-3),
        (5, "convex", 2.0, 1e-3),
        (5, "paper", 0.5, 1e-3),
        (5, "paper", 2.0, 1e-3),
        (1, "exact", 0.5, 1e-3),
        (1, "exact", 2.0, 1e-3),
        (25, "exact", 0.5, 1e-3),
        (25, "exact", 2.0, 1e-3),
        (25, "convex", 0.5, 1e-3),
        (25, "convex", 2.0, 1e-3),
    )
    digit_targets: tuple[tuple[int, Calibration, float], ...] = (
        (5, "exact", 2.0),
        (10, "exact", 2.0),
        (1, "exact", 2.0),
        (5, "over tau", 2.0),
        (10, "over tau", 2.0),
        (1, "exact", 16.0),
    )

    def points(self) -> list[Point]:
        """All settings."""
        first = [Point("logistic", *target) for target in self.targets]
        return first + [Point("digits", *target, 1e-3) for target in self.digit_targets]

    def measure(self, *point: Any) -> list[Row]:
        """A row for each noise and step of a setting."""
        return Setting(self, Point(*point)).rows()


QUICK = Study(
    records=1000,
    digit_records=300,
    seeds=3,
    digit_seeds=2,
    tuning_seeds=2,
    digit_tuning_seeds=1,
    targets=((5, "exact", 2.0, 1e-3), (5, "convex", 2.0, 1e-3), (5, "paper", 2.0, 1e-3)),
    digit_targets=((5, "exact", 16.0), (10, "over tau", 2.0)),
)
"""1,000 clients a learner in logistic regression, 300 images: about 15 seconds."""


@functools.lru_cache(maxsize=32)
def made(name: str, rounds: int) -> Factorization | None:
    """`NOISES`, kept for the next point with as many rounds."""
    make = NOISES[name]
    return make(rounds) if make else None


class World(NamedTuple):
    """Data of some seeds: local steps, records, x^0 [S, d], and x [C, S, d] -> accuracy [C, S]."""

    oracle: Oracle
    records: Iterator[Any]
    start: Array
    accuracy: Callable[[Array], Array]


class Cell(NamedTuple):
    """A noise, its server step and its deviation V."""

    noise: str
    step: float
    deviation: float


@dataclass(frozen=True)
class Setting:
    """A point of a study; runs cells of it."""

    study: Study
    point: Point

    @property
    def federation(self) -> Federation:
        """Algorithm 1 of the point."""
        study, tau = self.study, self.point.local_steps
        if self.point.experiment == "logistic":
            return Federation(rounds=study.records // tau, local_steps=tau, learners=study.learners)
        return Federation(
            rounds=study.digit_records // tau,
            local_steps=tau,
            learners=network.CLASSES,
            clip=study.digit_clip,
        )

    def noises(self) -> list[str]:
        """Names of what is run: those that need R x R matrices only for few rounds."""
        study, few = self.study, self.federation.rounds <= MAX_DENSE_ROUNDS
        names = study.noises if self.point.experiment == "logistic" else study.digit_noises
        return [name for name in names if few or name not in DENSE]

    def sensitivity(self, step: float) -> float:
        """Of one message, under the exact or convex calibration."""
        federation = self.federation
        if self.point.calibration == "convex":
            return federation.convex_sensitivity(step, logistic.Logistic(MAX_NORM).smoothness)
        return federation.sensitivity()

    def deviation(self, noise: Factorization | None, step: float) -> float:
        """V by the point's calibration; 0 without noise."""
        _, tau, calibration, epsilon, delta = self.point
        if noise is None:
            return 0.0
        if calibration == "paper":
            norm = {
                "tree": paper_tree_norm(noise.rounds),
                "toeplitz": paper_column_bound(noise.rounds),
            }.get(noise.name, noise.sensitivity)
            return paper_deviation(epsilon, delta, self.federation.sensitivity() * norm)
        v = calibrated(epsilon, delta, self.sensitivity(step) * noise.sensitivity)
        return v / tau if calibration == "over tau" else v

    def true_epsilon(self, cell: Cell) -> float:
        """What the cell really gives, by the exact Gaussian mechanism."""
        noise = made(cell.noise, self.federation.rounds)
        whole = self.sensitivity(cell.step) * noise.sensitivity if noise else 1.0
        return true_epsilon(cell.deviation, self.point.delta, whole)

    def grid(self) -> list[Cell]:
        """All noises and steps; without steps at which the calibration has no proof."""
        logistic_ = self.point.experiment == "logistic"
        steps = self.study.steps if logistic_ else self.study.digit_steps
        cells = []
        for name in self.noises():
            noise = made(name, self.federation.rounds)
            for step in (s / self.federation.clip for s in steps):
                try:
                    cells.append(Cell(name, step, self.deviation(noise, step)))
                except ValueError:
                    continue
        return cells

    def world(self, seeds: Sequence[int]) -> World:
        """Fresh data for each seed."""
        study, federation = self.study, self.federation
        generators = [philox(seed, 0) for seed in seeds]
        rounds, tau = federation.rounds, federation.local_steps
        if self.point.experiment == "logistic":
            populations = [
                logistic.Population.of(g, study.learners, study.dimension, *study.heterogeneity)
                for g in generators
            ]
            test = logistic.draw(populations, generators, 100)
            return World(
                logistic.Logistic(MAX_NORM if self.point.calibration == "convex" else math.inf),
                logistic.stream(populations, generators, rounds, tau),
                np.zeros((len(seeds), study.dimension), np.float32),
                lambda x: logistic.accuracy(x, test),
            )
        model = network.Network(*study.widths)
        pairs = [network.digits(g) for g in generators]
        start = np.stack([model.initial(g) for g in generators])
        tests = network.Images(
            *(np.stack(part) for part in zip(*(t for _, t in pairs), strict=True))
        )
        records = network.stream([train for train, _ in pairs], generators, rounds, tau)
        return World(model, records, start, lambda x: model.accuracy(x, tests))

    def measure(self, cells: Sequence[Cell], seeds: Sequence[int]) -> tuple[Array, Array]:
        """Runs cells on seeds."""
        world, federation = self.world(seeds), self.federation
        rounds = federation.rounds
        names = list(dict.fromkeys(cell.noise for cell in cells))
        noises = all_increments([made(n, rounds) for n in names], rounds, world.start, seeds)
        columns = Cells(
            np.array([cell.step for cell in cells]),
            np.array([names.index(cell.noise) for cell in cells]),
            np.array([cell.deviation for cell in cells]),
        )
        every = max(1, rounds // EVALUATIONS)
        stream, at, found = Stream(world.records), [], []
        models = simulate(federation, world.oracle, stream, noises, columns, world.start)
        for r, x in enumerate(models, start=1):
            if r % every == 0:
                at.append(r)
                found.append(world.accuracy(x))
        return np.array(at), np.stack(found)

    def rows(self) -> list[Row]:
        """Tunes and measures: a JSON-safe row for each cell.

        `chosen` marks the best step of a noise on the tuning seeds; `shared` the steps that Toeplitz
        noise has chosen, for all noises.
        """
        cells, study, digits = self.grid(), self.study, self.point.experiment == "digits"
        tuning = study.digit_tuning_seeds if digits else study.tuning_seeds
        at, found = self.measure(cells, range(tuning))
        tuned = dict(zip(cells, found[at >= TAIL * at[-1]].mean(axis=(0, 2)), strict=True))
        best = {
            n: max((c for c in cells if c.noise == n), key=tuned.__getitem__) for n in self.noises()
        }
        shared = best["toeplitz"].step if "toeplitz" in best else None
        wanted, seeds = cells, study.seeds
        if digits:
            wanted = [c for c in cells if c in best.values() or c.step == shared]
            seeds = study.digit_seeds
        at, found = self.measure(wanted, range(1000, 1000 + seeds))
        tail = found[at >= TAIL * at[-1]].mean(axis=0)
        return [
            {
                **self.point._asdict(),
                "noise": cell.noise,
                "rounds": self.federation.rounds,
                "step": cell.step,
                "deviation": cell.deviation,
                "true_epsilon": _finite(self.true_epsilon(cell)) if cell.deviation else None,
                "chosen": cell == best[cell.noise],
                "shared": cell.step == shared,
                "accuracy": tail[i].tolist(),
                "at": at.tolist(),
                "curve": found[:, i].mean(axis=1).round(4).tolist(),
                "spread": found[:, i].std(axis=1, ddof=1).round(4).tolist(),
            }
            for i, cell in enumerate(wanted)
        ]


def all_increments(
    noises: Sequence[Factorization | None], rounds: int, start: Array, seeds: Sequence[int]
) -> Array:
    """(b^{r+1} - b^r) xi of each noise with one xi ~ N(0, I) a seed: [K, R, S, d]."""
    found = np.empty((len(noises), rounds, *start.shape), np.float32)
    for s, seed in enumerate(seeds):
        xi = philox(seed, 1).standard_normal((rounds, start.shape[1]), dtype=np.float32)
        for k, noise in enumerate(noises):
            found[k, :, s] = increments(noise, xi)
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
