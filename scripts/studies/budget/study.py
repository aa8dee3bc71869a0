"""Figure 1 of Hong, Wang and Zhou 2022: dynamic against uniform noise as N grows, resumably.

For each data set, N and T: gamma is chosen on auxiliary random data of the same size, which costs no
privacy, then all arms run on the private data from the same starts with the same noise, so that their
differences are those of schedules. T is chosen on the auxiliary data too, or, as the paper does without
accounting for it, on the private data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.schedules import Exponential, quadratic_influence
from scripts.studies.budget import algorithm as budget
from scripts.studies.budget.network import SOURCES, Network, Split, train
from scripts.studies.harness import Row, philox

Floats = NDArray[Any]

EPSILON, DELTA = 4.0, 1e-8
RATE, CLIP, BETA = 0.1, 4.0, 0.9
ARMS = {
    "uniform": "uniform",
    "exp": "exp, tuned",
    "gd_dynamic": "GD-dynamic",
    "momentum_uniform": "momentum, uniform",
    "momentum_dynamic": "momentum-dynamic, as printed",
    "momentum_exact": "momentum, exact bound",
    "momentum_exp": "momentum, exp",
    "momentum_quadratic": "momentum, quadratic",
}
"""Key -> label. Those with momentum are compared with uniform noise under momentum."""
BUDGETS = ("zcdp", "tight")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run.

    Attributes:
      sizes: data set -> N.
      steps: T.
      seeds: runs of each arm: starts and noise; the data stay.
      tuning_seeds: runs on the auxiliary data for each candidate.
      ratios: candidates for the noise of the first step over that of the last, from which gamma is.
      hidden: units of the network; the paper has 1000.
      influence_points: steps whose influence is estimated (Figure 1, left), at the first T and N that
        is at least `influence_size`.
      influence_seeds: runs for each of them, with the extra noise and with its negative.
      influence_size: N.
    """

    fields: ClassVar = ("source", "examples", "steps")

    sizes: dict[str, tuple[int, ...]]
    steps: tuple[int, ...] = (50, 100, 150)
    seeds: int = 30
    tuning_seeds: int = 10
    ratios: tuple[float, ...] = (1.2, 1.5, 2.0, 3.0, 5.0)
    hidden: int = 64
    influence_points: int = 10
    influence_seeds: int = 24
    influence_size: int = 240

    def points(self) -> list[tuple[str, int, int]]:
        """(data set, N, T) of the comparison; ("influence of ...", N, T) of the left panel."""
        size, steps = self.influence_size, self.steps[len(self.steps) // 2]
        left = [(f"influence of {name}", size, steps) for name in ("auxiliary", *self.sizes)]
        return left + [
            (s, n, t) for s, sizes in self.sizes.items() for n in sizes for t in self.steps
        ]

    def measure(self, source: str, examples: int, steps: int) -> list[Row]:
        """The influence of steps, or all arms."""
        left, _, name = source.partition("influence of ")
        work = estimate_influence if name else compare_arms
        return [work(self, name or left, examples, steps)]


FULL = Study(sizes={"digits": (120, 180, 240), "gaussians": (250, 500, 1000, 2000)})
QUICK = Study(
    sizes={"digits": (120, 240), "gaussians": (250, 500)},
    steps=(50, 100), seeds=6, tuning_seeds=4, ratios=(1.5, 3.0), hidden=16,
    influence_points=4, influence_seeds=4, influence_size=120,
)  # fmt: skip
"""Few runs of a small network: that everything works, in a few seconds."""


@dataclass(frozen=True)
class Bench:
    """One data set, its network, and P starts and noises that all arms share."""

    split: Split
    network: Network
    start: Floats
    key: tuple[int, ...]

    @classmethod
    def of(cls, study: Study, source: str, examples: int, runs: int) -> Bench:
        """The data are those of seed 0; each run draws a start of its own."""
        split = SOURCES[source](examples, 0)
        network = Network(split.train.x.shape[1], study.hidden)
        key = (list(SOURCES).index(source), examples)
        starts = philox(*key, 0)
        return cls(split, network, np.stack([network.initial(starts) for _ in range(runs)]), key)

    def losses(self, sigma: Floats, total: float, beta: float = 0.0) -> tuple[Floats, Floats]:
        """Train loss and test accuracy of all runs, float64 [P] each, under sigma_t [T] and R."""
        noise = philox(*self.key, 1)
        theta = train(
            self.network, self.split.train, self.start, np.tile(sigma, (len(self.start), 1)),
            lambda _: noise.standard_normal(self.start.shape, dtype=np.float32),
            rate=RATE, clip=CLIP, budget=total, beta=beta,
        )  # fmt: skip
        loss = self.network.loss(theta, self.split.train)
        return loss, self.network.accuracy(theta, self.split.test)


def total_budget(kind: str) -> float:
    """R of (4, 1e-8)-DP: "zcdp" is the paper's .3927, "tight" the exact .5134."""
    return (budget.zcdp_budget if kind == "zcdp" else budget.tight_budget)(EPSILON, DELTA)


def ratio_gamma(ratio: float, steps: int) -> float:
    """gamma under which exp noise falls by this ratio from the first to the last step."""
    return float(ratio ** (-4 / (steps - 1)))


def sigma_of(arm: str, steps: int, total: float, tuned: float, theory: float) -> Floats:
    """An arm's sigma_t, float64 [T].

    "momentum_exact" follows the exact coefficients of Theorem 4.6, "momentum_quadratic" the exact loss
    on one coordinate whose loss contracts by gamma a step.
    """
    if arm == "momentum_exact":
        return budget.optimal_multipliers(budget.momentum_influence(steps, theory, BETA), total)
    if arm == "momentum_quadratic":
        q = quadratic_influence(np.array([1 - math.sqrt(tuned)]), 1.0, steps, BETA)
        return budget.optimal_multipliers(np.log(q), total)
    schedules = {
        "exp": Exponential(gamma=tuned),
        "momentum_exp": Exponential(gamma=tuned),
        "gd_dynamic": Exponential(gamma=theory),
        "momentum_dynamic": budget.PrintedMomentum(gamma=theory, beta=BETA),
    }
    return budget.multipliers_for(schedules.get(arm), steps, total)


def compare_arms(study: Study, source: str, examples: int, steps: int) -> Row:
    """One point: gamma from auxiliary data, then all arms on the data under both budgets."""
    public = Bench.of(study, "auxiliary", examples, study.tuning_seeds)
    total = total_budget("zcdp")
    quiet = np.full(steps, 1e-9)
    first = public.network.loss(public.start, public.split.train).mean()
    theory = float((public.losses(quiet, math.inf)[0].mean() / first) ** (1 / steps))

    def public_loss(ratio: float) -> float:
        schedule = Exponential(gamma=ratio_gamma(ratio, steps))
        sigma = budget.multipliers_for(schedule, steps, total)
        return float(public.losses(sigma, total)[0].mean())

    ratio = min(study.ratios, key=public_loss)
    tuned = ratio_gamma(ratio, steps)
    private = Bench.of(study, source, examples, study.seeds)
    arms: Row = {}
    for arm in ARMS:
        beta = BETA if arm.startswith("momentum") else 0.0
        loss, _ = public.losses(sigma_of(arm, steps, total, tuned, theory), total, beta)
        arms[arm] = {"auxiliary_loss": float(loss.mean())}
        for kind in BUDGETS:
            sigma = sigma_of(arm, steps, total_budget(kind), tuned, theory)
            measured = np.round(private.losses(sigma, total_budget(kind), beta), 6).tolist()
            arms[arm][kind] = dict(zip(("loss", "accuracy"), measured, strict=True))
    return {
        "source": source, "examples": examples, "steps": steps, "arms": arms,
        "ratio": ratio, "gamma_tuned": tuned, "gamma_theory": theory,
    }  # fmt: skip


def estimate_influence(study: Study, source: str, examples: int, steps: int) -> Row:
    """q_t by retraining: what twice the noise variance in step t alone adds to the final loss.

    With the extra noise and with its negative, beside a run without it, on the same noise otherwise.
    A least-squares line through log q_t gives gamma.
    """
    bench = Bench.of(study, source, examples, study.influence_seeds)
    sigma = budget.multipliers_for(None, steps, total_budget("zcdp"))
    at = np.unique(np.linspace(0, steps - 1, study.influence_points).astype(int))
    plain = bench.losses(sigma, math.inf)[0]
    q = np.array([_added_loss(bench, sigma, int(t), plain) for t in at])
    mean, error = q.mean(axis=1), q.std(axis=1, ddof=1) / math.sqrt(q.shape[1])
    good = mean > 0
    slope = np.polyfit(at[good], np.log(mean[good]), 1)[0] if good.sum() > 1 else math.nan
    return {
        "source": f"influence of {source}", "examples": examples, "steps": steps,
        "at": (at + 1).tolist(), "influence": mean.tolist(), "error": error.tolist(),
        "gamma": float(math.exp(-slope)),
    }  # fmt: skip


def _added_loss(bench: Bench, sigma: Floats, step: int, plain: Floats) -> Floats:
    """[P], loss units per unit of sigma_t^2."""
    added = np.zeros(len(plain))
    for sign in (1.0, -1.0):
        noise, extra = philox(*bench.key, 1), philox(*bench.key, 2)
        shift = np.float32(sign) * extra.standard_normal(bench.start.shape, dtype=np.float32)

        def draw(t: int, noise: Any = noise, shift: Floats = shift) -> Floats:
            drawn = noise.standard_normal(bench.start.shape, dtype=np.float32)
            return np.asarray(drawn + shift if t == step else drawn)

        rows = np.tile(sigma, (len(plain), 1))
        theta = train(
            bench.network, bench.split.train, bench.start, rows, draw, rate=RATE, clip=CLIP
        )
        added += bench.network.loss(theta, bench.split.train) / 2
    return (added - plain) / sigma[step] ** 2


def summary(results: Sequence[Row], kind: str, chosen_on: str = "auxiliary") -> list[Row]:
    """A row for each data set, N and arm, at the arm's best T."""
    rows = []
    compared = [r for r in results if "arms" in r]
    for source, examples in dict.fromkeys((r["source"], r["examples"]) for r in compared):
        here = [r for r in compared if (r["source"], r["examples"]) == (source, examples)]

        def score(row: Row, arm: str) -> float:
            found = row["arms"][arm]
            private = chosen_on == "private"
            return float(np.mean(found[kind]["loss"] if private else found["auxiliary_loss"]))

        best = {arm: min(here, key=lambda r: score(r, arm)) for arm in ARMS}
        for arm, own in best.items():
            base = "momentum_uniform" if arm.startswith("momentum") else "uniform"
            row: Row = {"source": source, "examples": examples, "arm": arm, "steps": own["steps"]}
            for what in ("loss", "accuracy"):
                values = np.array(own["arms"][arm][kind][what])
                difference = values - np.array(best[base]["arms"][base][kind][what])
                row[what], row[f"{what}_se"] = _mean_error(values)
                row[f"{what}_gain"], row[f"{what}_gain_se"] = _mean_error(difference)
            rows.append(row)
    return rows


def _mean_error(values: Floats) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
