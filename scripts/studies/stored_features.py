"""DPZero's arithmetic on stored features: the mean of the last steps, and public rows as a guide.

    python -m scripts.studies.stored_features mean --data DATA --output_dir out/stored
    python -m scripts.studies.stored_features guide --data DATA --output_dir out/stored

DATA holds folders sst2 and trec with train.jsonl and validation.jsonl. Rows are encoded once with
all-MiniLM-L6-v2 (the `demo` extra) and kept in OUTPUT_DIR; the head starts at its recipe's label texts.
A step is simulated: central differences of every drawn row along K Rademacher directions, the K-vector
clipped, summed, noised as `PrivacyPlan` says, and averaged; from seeded generators, on no grid. That is
a thousand steps in seconds, where a run of the trainer takes minutes.

`mean` asks whether the mean of the last N weights (`hf-dpzero replay --average_last N`) beats the last.
`guide` gives 64 or 512 labelled public rows, from the training file and in no private batch, to DPZero:
"warm" trains on them first; "mixed" adds their gradient to each update (PAZO-M, Gong and Li 2025);
"spanned" takes 8 gradients of 16 of them, made orthonormal, in place of random directions (PAZO-P).
Settings are those that do best on 1,000 more rows of the training file; the validation file is only
reported on. Writes mean.md or guide.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_dpzero.privacy.mechanisms import mechanism_from_dict
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.recipes.recipe import load_recipe
from scripts.markdown import table

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TEXT = {"sst2": "sentence", "trec": "text"}
SMOOTHING, CLIP, DIRECTIONS = 1e-2, 32.0, 64


class Rows(NamedTuple):
    """Features `[n, H + 1]`, the last of them 1 for the bias, and labels `[n]`."""

    x: Tensor
    y: Tensor

    def __getitem__(self, index):  # type: ignore[override]
        return Rows(self.x[index], self.y[index])


@dataclass(frozen=True)
class Plan:
    """What a simulated run is told; `rate` multiplies the mean over the directions."""

    batch: int
    steps: int
    noise_multiplier: float
    rate: float
    falls: bool = True
    public: Rows | None = None
    public_rate: float = 0.0
    spanned: bool = False


def noise_for(epsilon: float, delta: float, examples: int, batch: int, steps: int) -> float:
    """The noise multiplier of so many Poisson steps at (epsilon, delta), to 0.3 %."""
    low, high = 0.3, 400.0
    while high / low > 1.003:
        middle = (low * high) ** 0.5
        settings = {"name": "dpzero", "clip": 1.0, "noise_multiplier": middle}
        plan = PrivacyPlan(
            sampler=PoissonSampler(num_examples=examples, expected_batch_size=batch),
            mechanism=mechanism_from_dict({**settings, "expected_batch_size": batch}),
            steps=steps,
        )
        low, high = (middle, high) if plan.epsilon(delta) > epsilon else (low, middle)
    return high


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy `[B, K]` of logits `[B, K, L]`."""
    picked = labels[:, None, None].expand(*logits.shape[:2], 1)
    return logits.logsumexp(-1) - logits.gather(-1, picked)[..., 0]


def gradient(weights: Tensor, rows: Rows, scale: float) -> Tensor:
    """Of the mean loss, `[L, H + 1]`."""
    wrong = (scale * rows.x @ weights.T).softmax(-1)
    wrong[torch.arange(len(rows.y)), rows.y] -= 1
    return scale * wrong.T @ rows.x / len(rows.y)


def train(
    rows: Rows, start: Tensor, scale: float, plan: Plan, seed: int, keep: Sequence[int] = (1,)
) -> list[Tensor]:
    """Simulates a run; returns the mean of its last N weights for each N of `keep`."""
    draw = torch.Generator().manual_seed(seed)
    weights, n = start.clone(), len(rows.y)
    sums = {count: torch.zeros_like(start, dtype=torch.float64) for count in keep}
    for step in range(plan.steps):
        batch = rows[torch.rand(n, generator=draw) < plan.batch / n]
        shape = (DIRECTIONS, *start.shape)
        u = torch.randint(0, 2, shape, generator=draw, dtype=torch.float32) * 2 - 1
        public = torch.zeros_like(start)
        if plan.public is not None:
            some = torch.randint(len(plan.public.y), (8, 16), generator=draw)
            each = torch.stack([gradient(weights, plan.public[part], scale) for part in some])
            public = each.mean(0)
        if plan.spanned:  # of length 8, so that the K-vector is as long as that of 64 signs
            u = 8 * torch.linalg.qr(each.flatten(1).T)[0].T.reshape(each.shape)
        moved = SMOOTHING * scale * torch.einsum("bh,klh->bkl", batch.x, u)
        at = (scale * batch.x @ weights.T)[:, None]
        x = (losses(at + moved, batch.y) - losses(at - moved, batch.y)) / (2 * SMOOTHING)
        x = x * (CLIP / x.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)
        noise = plan.noise_multiplier * CLIP * torch.randn(len(u), generator=draw)
        value = (x.sum(0) + noise) / plan.batch
        estimate = torch.tensordot(value, u, 1) / 64  # the mean over signs, or a projection
        left = 1 - step / plan.steps if plan.falls else 1.0
        weights = weights - left * (plan.rate * estimate + plan.public_rate * public)
        for count in keep:
            if step >= plan.steps - count:
                sums[count] += weights
    return [(sums[count] / count).float() for count in keep]


def descend(rows: Rows, start: Tensor, scale: float, rate: float, steps: int) -> Tensor:
    """Gradient descent on public rows, at a rate that falls to 0."""
    weights = start.clone()
    for step in range(steps):
        weights = weights - rate * (1 - step / steps) * gradient(weights, rows, scale)
    return weights


def accuracy(weights: Tensor, rows: Rows) -> float:
    """In %."""
    return 100 * float(((rows.x @ weights.T).argmax(1) == rows.y).double().mean())


# ---------------------------------------------------------------- data


class Data(NamedTuple):
    """Encoded rows of a task, its head's start `[L, H + 1]`, and what logits are multiplied by."""

    train: Rows
    validation: Rows
    start: Tensor
    scale: float


def encoded(task: str, data: Path, output: Path, limit: int) -> Data:
    """Encodes `limit` training rows, drawn by seed 0, and all validation rows; kept in a file."""
    file = output / f"{task}-{limit}.pt"
    if not file.exists():
        found = _encode(task, data, limit)
        torch.save((*(tuple(rows) for rows in found[:2]), *found[2:]), file)
    train, validation, start, scale = torch.load(file)
    return Data(Rows(*train), Rows(*validation), start, scale)


@torch.inference_mode()
def _encode(task: str, data: Path, limit: int) -> Data:
    from hf_dpzero.recipes.models import load_model
    from hf_dpzero.tasks import build_task

    words = [f"--{split}_file={data / task / split}.jsonl" for split in ("train", "validation")]
    recipe = load_recipe(RECIPES / task / "minilm-dpzero.yaml", words)
    model, tokenizer = load_model(recipe.model, build_task(recipe.data))
    model.eval()
    found = []
    for split in ("train", "validation"):
        lines = (data / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        if split == "train":
            rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:limit]]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][TEXT[task]]))
        x = torch.ones(len(rows), model.config.hidden_size + 1)
        for some in (order[i : i + 64] for i in range(0, len(order), 64)):
            texts = [rows[i][TEXT[task]] for i in some]
            tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
            x[some, :-1] = model.embed(**tokens)
        found.append(Rows(x, torch.tensor([row["label"] for row in rows])))
    head = model.classifier
    start = torch.cat([head.weight, head.bias[:, None]], 1).detach().clone()
    return Data(*found, start, float(model.config.logit_scale))


# ---------------------------------------------------------------- the mean of the last steps


def mean_of_last(data: Data, task: str, seeds: Iterable[int], steps: int) -> list[list[str]]:
    """A line for each epsilon and rate: the last weights, and what each mean adds, in points."""
    keep = [1, *(max(2, round(share * steps)) for share in (0.03, 0.1, 0.3, 0.6))]
    rate, lines = {"sst2": 64 * 1.8e-3, "trec": 64 * 2.5e-3}[task], []  # the recipes'
    for epsilon, falls in itertools.product((0.5, 2.0), (False, True)):
        sigma = noise_for(epsilon, 1e-5, len(data.train.y), 512, steps)
        plan = Plan(512, steps, sigma, rate, falls)
        runs = [train(data.train, data.start, data.scale, plan, seed, keep) for seed in seeds]
        found = [[accuracy(weights, data.validation) for weights in run] for run in runs]
        gains = [[run[i] - run[0] for run in found] for i in range(1, len(keep))]
        words = [f"{epsilon:g}", "falls to 0" if falls else "stays"]
        lines.append([task, *words, *map(mean_and_error, [[run[0] for run in found], *gains])])
    return [
        ["task", "epsilon", "rate", "last weights", *(f"mean of {n}" for n in keep[1:])],
        *lines,
    ]


def mean_and_error(values: Sequence[float]) -> str:
    """Of independent runs: mean and standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


# ---------------------------------------------------------------- public rows


def guide(data: Data, task: str, few: bool, seeds: Iterable[int], steps: int) -> list[list[str]]:
    """A line for each arm: the validation accuracy of its best setting on the tuning rows."""
    examples = 500 if few else len(data.train.y) - 1512
    batch, delta = (125, 1e-4) if few else (256, 1e-5)
    sigma = noise_for(0.5, delta, examples, batch, steps)
    rates = (0.0003, 0.001, 0.003, 0.01) if few else (0.01, 0.03, 0.1)
    found: dict[str, dict[tuple[float, ...], list[tuple[float, float]]]] = {}
    for seed in seeds:
        order = torch.randperm(len(data.train.y), generator=torch.Generator().manual_seed(seed))
        tuning, private = data.train[order[512:1512]], data.train[order[1512 : 1512 + examples]]
        run = functools.partial(train, private, scale=data.scale, seed=seed)
        plan = Plan(batch, steps, sigma, 0.0)

        def note(
            arm: str, setting: tuple[float, ...], weights: Tensor, tuning: Rows = tuning
        ) -> None:
            scores = accuracy(weights, tuning), accuracy(weights, data.validation)
            found.setdefault(arm, {}).setdefault(setting, []).append(scores)

        for rate in rates:
            note("no public rows", (rate,), run(data.start, plan=replace(plan, rate=rate))[0])
        for count in (64, 512):
            public = data.train[order[:count]]
            alone = {
                (rate, length): descend(public, data.start, data.scale, rate, length)
                for rate, length in itertools.product((0.03, 0.1, 0.3, 1.0), (10, 50, 200))
            }
            for setting, weights in alone.items():
                note(f"{count}, no private rows", setting, weights)
            warm = max(alone.values(), key=lambda weights: accuracy(weights, tuning))
            for rate in rates:
                here = replace(plan, rate=rate, public=public)
                note(f"{count}, warm", (rate,), run(warm, plan=here)[0])
                for beside in (0.1, 0.5):
                    mixed = replace(here, public_rate=beside)
                    note(f"{count}, mixed", (rate, beside), run(data.start, plan=mixed)[0])
                    note(f"{count}, warm and mixed", (rate, beside), run(warm, plan=mixed)[0])
            for rate in (0.03, 0.1, 0.3, 1.0):
                spanned = replace(plan, rate=rate, public=public, spanned=True)
                note(f"{count}, spanned", (rate,), run(data.start, plan=spanned)[0])
                note(f"{count}, warm and spanned", (rate,), run(warm, plan=spanned)[0])
    title = f"{task}, n = {examples:,}"
    return [["public rows", title], *([arm, _best(each)] for arm, each in found.items())]


def _best(found: dict[tuple[float, ...], list[tuple[float, float]]]) -> str:
    """Mean and error on the validation rows of what does best on the tuning rows."""
    tuned = max(found.values(), key=lambda runs: statistics.mean(tuning for tuning, _ in runs))
    return mean_and_error([score for _, score in tuned])


# ---------------------------------------------------------------- command line


def main() -> None:
    """Reads the command line, runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("mean", "guide"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["sst2", "trec"])
    parser.add_argument("--rows", type=int, default=20_000, help="at most so many training rows")
    parser.add_argument("--steps", type=int, help="default 1000 for mean, 200 for guide")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    given.output_dir.mkdir(parents=True, exist_ok=True)
    seeds, tables = range(given.seeds), []
    for task in given.tasks:
        data = encoded(task, given.data, given.output_dir, given.rows)
        zero = accuracy(data.start, data.validation)
        print(f"{task}: {len(data.train.y):,} training rows, zero-shot {zero:.1f}", flush=True)
        if given.study == "mean":
            parts = [mean_of_last(data, task, seeds, given.steps or 1000)]
        else:
            parts = [guide(data, task, few, seeds, given.steps or 200) for few in (True, False)]
        tables += [table(head, lines) for head, *lines in parts]
        print("\n".join(tables[-len(parts) :]), flush=True)
    (given.output_dir / f"{given.study}.md").write_text("\n".join(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
