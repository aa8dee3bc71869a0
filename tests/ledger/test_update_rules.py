"""Update rules: each against its textbook dense form, and through ledger, replay and resume.

`python tests/ledger/test_update_rules.py` re-records `golden/update_rules.json`; do that only with a
change that is meant to alter numbers, and say why in the changelog.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_trajectory import header_for as header_of
from torch import nn
from whole_directions import direction_vector

from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.ledger import replay as updates
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import (
    UPDATE_RULES,
    Term,
    UpdateRule,
    default_window,
    replay,
    space_from_header,
    terms_of,
)
from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "update_rules.json"
KEY = 0x00112233445566778899AABBCCDDEEFF
RULES = [UpdateRule(), UpdateRule("momentum", momentum=0.8, window=5)]


def update_terms(rule: UpdateRule, releases: Sequence[Release], count: int) -> list[Term]:
    """The terms of the last release's update, from nothing but the releases."""
    return updates.update_terms(rule, count, releases, len(releases) - 1)


by_name = attrgetter("name")


def releases_of(
    values: Sequence[Sequence[float]], rates: Sequence[float] = (0.1,)
) -> list[Release]:
    return [
        Release(t, tuple(row), learning_rate=rates[t % len(rates)]) for t, row in enumerate(values)
    ]


def drawn(steps: int, count: int = 1, seed: int = 0, mean: float = 0.0) -> list[tuple[float, ...]]:
    """Released values that float32 represents."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    rows = (mean + generator.normal(size=(steps, count))).astype(np.float32)
    return [tuple(float(v) for v in row) for row in rows]


def dense(terms: Sequence[Any], vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The update of these terms, [d]; vectors [T, K, d]."""
    assert len({(term.step, term.query) for term in terms}) == len(terms)
    return sum(term.coefficient * vectors[term.step, term.query] for term in terms)


def signs(steps: int, count: int, layout: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    """Directions [T, K, d] of parameters that start at these places and have these sizes."""
    us = [[Direction(KEY, t, k) for k in range(count)] for t in range(steps)]
    rows = [[direction_vector(u, "rademacher", layout).numpy() for u in row] for row in us]
    return np.array(rows, np.float64)


# ---------------------------------------------------------------- sgd and momentum


@pytest.mark.parametrize("rule", [UpdateRule(), UpdateRule("momentum", 0.9, 30)], ids=by_name)
def test_a_rule_is_torch_sgd_with_its_momentum(rule: UpdateRule):
    steps, count, dimension, rates = 30, 2, 40, (0.1, 0.05, 0.2)
    values, us = drawn(steps, count), signs(steps, count, [(0, dimension)])
    releases = releases_of(values, rates)
    theta = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=1.0, momentum=rule.momentum)
    found = np.zeros(dimension)
    for t in range(steps):
        theta.grad = torch.from_numpy(np.tensordot(values[t], us[t], axes=1))
        optimizer.param_groups[0]["lr"] = rates[t % 3]
        optimizer.step()
        found += dense(update_terms(rule, releases[: t + 1], count), us)
        assert np.abs(found - theta.detach().numpy()).max() < 1e-12
    assert np.abs(found).max() > 0.1


def test_the_default_window_leaves_out_one_percent():
    for beta in (0.05, 0.3, 0.5, 0.9, 0.95, 0.99):
        window = default_window(beta)
        assert beta**window <= 1e-2 < beta ** (window - 1)
        assert UpdateRule("momentum", beta).window == window
        kept = sum(beta**age for age in range(window)) * (1 - beta)
        assert 0.99 <= kept < 1.0


# ---------------------------------------------------------------- every rule


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_extreme_releases_give_finite_updates(rule: UpdateRule):
    """Terms of zero are left out, but never those of the present release."""
    for value, t in itertools.product((0.0, -0.0, 1e-45, 3e38, -3e38), range(12)):
        terms = update_terms(rule, releases_of([(value, value)] * 12)[: t + 1], 2)
        assert all(math.isfinite(c) for _, _, c in terms)
        if not value:
            assert [(s, k, abs(c)) for s, k, c in terms] == [(t, 0, 0.0), (t, 1, 0.0)]


class Counted(list):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)

    def __iter__(self):
        raise AssertionError("a whole run is read for one step")


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_a_step_reads_its_window_and_no_more(rule: UpdateRule):
    releases = Counted(releases_of(drawn(500)))
    for t in range(500):
        before = releases.reads
        updates.update_terms(rule, 1, releases, t)
        assert releases.reads - before <= rule.window + 2


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_nothing_but_public_numbers_reaches_a_rule(rule: UpdateRule):
    """Signature-level: there is no argument through which data, a loss or a weight could come."""
    assert Release._fields == ("step", "values", "learning_rate")
    taken = list(inspect.signature(updates.update_terms).parameters)
    assert taken == ["rule", "num_directions", "releases", "step"]
    assert list(inspect.signature(rule.weights).parameters) == ["step"]


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_what_is_not_a_coefficient_and_what_comes_later_changes_nothing(rule: UpdateRule):
    """The count that an adaptive clip follows is the K + 1-th value of a record."""
    releases = releases_of(drawn(20, 3))
    others = [r._replace(values=(*r.values[:2], 7.0)) for r in releases]
    later = [*others[:10], *releases_of([(9.0, 9.0, 9.0)] * 20)[10:]]
    plain = [r._replace(values=r.values[:2]) for r in releases]
    found = [update_terms(rule, given[:10], 2) for given in (releases, others, plain)]
    assert found[0] == found[1] == found[2]
    assert updates.update_terms(rule, 2, later, 9) == found[0]
    assert {query for _, query, _ in found[0]} == {0, 1}


def test_arithmetic_is_the_same_on_every_machine():
    """No power, exponential or `sum` of floats (compensated from Python 3.12 on) in an update."""
    tree = ast.parse(Path(updates.__file__).read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inside = [n for f in functions if f.name != "default_window" for n in ast.walk(f)]
    assert len(functions) > 10 and len(inside) > 200
    called = {ast.unparse(n.func) for n in inside if isinstance(n, ast.Call)}
    assert not any(name.startswith("math.") for name in called)
    assert not called & {"sum", "pow"}
    assert not any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow) for n in inside)


def golden(rule: UpdateRule) -> list[list[float]]:
    """All terms of the last of 30 steps, whose values are given by a formula."""
    values = [(((7 * t + 3) % 11 - 5) / 4, ((5 * t + 1) % 13 - 6) / 8) for t in range(30)]
    releases = releases_of(values, rates=(0.01, 0.003))
    return [list(term) for term in update_terms(rule, releases, 2)]


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_golden_coefficients(rule: UpdateRule):
    """To the last bit on every machine and in every later version, or old logs would not replay."""
    stored = json.loads(GOLDEN.read_text())
    assert set(stored) == set(UPDATE_RULES)
    assert UpdateRule(**json.loads(json.dumps(rule.to_dict()))) == rule
    found = golden(rule)
    assert found == stored[rule.name]
    assert len(found) >= rule.window and all(c for _, _, c in found)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "kalman"}, "update_rule='kalman' is unknown; use one of sgd, momentum"),
        ({"name": "momentum", "momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"name": "momentum", "momentum": -0.1}, "momentum=-0.1 must be"),
        ({"name": "momentum", "momentum": math.nan}, "momentum=nan must be"),
        ({"name": "momentum", "window": 0}, "update_window=0 must be an integer of at least 1"),
        ({"name": "momentum", "window": 2.0}, "update_window=2.0 must be an integer"),
        ({"name": "momentum", "window": True}, "update_window=True must be an integer"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        UpdateRule(**values)


# ---------------------------------------------------------------- in a run


class Quadratic(nn.Module):
    """f(theta; x) = |theta - x|^2 / 2, theta in two tensors of which one is decayed."""

    def __init__(self) -> None:
        super().__init__()
        weight = (torch.arange(20) * 37 % 101 - 50).float() / 64
        self.weight = nn.Parameter(weight.view(4, 5))
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.theta() - x).square().sum(dim=1)

    def theta(self) -> torch.Tensor:
        return torch.cat([self.weight.view(-1), self.bias])


def loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(inputs["x"])


def header_for(rule: UpdateRule, count: int = 3, **changes: Any) -> dict[str, Any]:
    settings = {"num_directions": count, "weight_decay": 0.05, "update_rule": rule.to_dict()}
    return header_of(Quadratic(), **settings, **changes)


class Run:
    """A model, its space and its step, on a ledger."""

    def __init__(
        self, trajectory: Trajectory, state: dict[str, Any] | None = None, **settings: Any
    ):
        self.model, self.trajectory = Quadratic(), trajectory
        if state is not None:
            self.model.load_state_dict(state["model"])
        self.space = space_from_header(self.model, trajectory.header)
        if state is None:
            self.space.snap_()
        else:
            self.space.load_state_dict(state["space"])
        self.step = ZerothOrderStep(
            mechanism=ScalarMechanism(
                clip=4.0,
                noise_multiplier=0.5,
                expected_batch_size=4,
                num_directions=trajectory.num_directions,
            ),
            space=self.space,
            differences=FiniteDifferences(self.model, self.space, loss, 1e-3),
            noise=InsecureSeededNoise(5),
            trajectory=trajectory,
            **settings,
        )

    def take(self, start: int, stop: int) -> Run:
        for t in range(start, stop):
            generator = torch.Generator().manual_seed(t)
            batch = {"x": torch.randn(4, 32, generator=generator)}
            self.step(t, [batch], learning_rate=[0.02, 0.01][t % 2])
        self.space.settle_()
        return self

    def state(self) -> dict[str, Any]:
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"model": model, "space": self.space.state_dict()}


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_a_deferred_update_is_the_same(rule: UpdateRule):
    header = header_for(rule)
    runs = [Run(Trajectory(header), defer=defer).take(0, 12) for defer in (False, True)]
    assert runs[0].trajectory.releases == runs[1].trajectory.releases
    assert digest_model(runs[0].model) == digest_model(runs[1].model)


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_resuming_in_the_middle_is_going_straight_on(tmp_path: Path, rule: UpdateRule):
    """From a checkpoint of step 6, and from one of step 3 with a ledger that is ahead of it."""
    straight = Run(Trajectory(header_for(rule))).take(0, 12)
    states = []
    path = tmp_path / "t.ledger"
    first = Run(Trajectory.create(path, header_for(rule)))
    for start, stop in ((0, 3), (3, 6)):
        states.append(first.take(start, stop).state())
    first.trajectory.close()
    for start, state in ((3, states[0]), (6, states[1])):
        opened = Trajectory.open(path, header_for(rule))
        resumed = Run(opened, state).take(start, 12)
        opened.close()
        assert opened.releases == straight.trajectory.releases
        assert digest_model(resumed.model) == digest_model(straight.model)


def test_replay_of_momentum_is_the_equation():
    """m <- beta m + g; theta <- (1 - lr wd) theta - lr m, in float64 beside it, K = 3."""
    rule, wd, count = UpdateRule("momentum", momentum=0.8, window=40), 0.05, 3
    trajectory = Trajectory(header_for(rule), releases_of(drawn(40, count), rates=(0.01, 0.003)))
    model = Quadratic()
    replay(model, trajectory)
    us = signs(40, count, [(0, 20), (32, 12)])
    base = Quadratic().theta().detach().double().numpy()
    theta, m, decayed = base, np.zeros(32), np.array([1.0] * 20 + [0.0] * 12)
    for t, values, rate in trajectory.releases:
        m = 0.8 * m + np.tensordot(values, us[t], axes=1)
        theta = (1 - rate * wd * decayed) * theta - rate * m
    found = model.theta().detach().double().numpy()
    assert np.abs(theta - base).max() > 0.05
    assert np.abs(found - theta).max() < 40 * (40 * count + 1) * 2.0**-23  # roundings to the grid


# ---------------------------------------------------------------- logs


def test_steps_without_an_update_are_named():
    trajectory = Trajectory(header_for(UpdateRule()), releases_of(drawn(3, 3)))
    with pytest.raises(LedgerError, match="step 3 has no update: the last release is of 2"):
        terms_of(trajectory, 3)
    trajectory.header["update_rule"] = {"name": "lion"}
    with pytest.raises(LedgerError, match="the header's update_rule='lion' is unknown"):
        terms_of(trajectory, 0)


def test_updates_that_are_out_of_range_change_nothing():
    """A rule's sum of coefficients may pass what single releases would not: refused as a whole."""
    huge = 2.0**100
    trajectory = Trajectory(
        header_for(UpdateRule("momentum"), 1), [Release(0, (huge,), 0.9), Release(1, (huge,), 0.9)]
    )
    model = Quadratic()
    with pytest.raises(ValueError, match="nothing was changed. Lower learning_rate"):
        replay(model, trajectory)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({rule.name: golden(rule) for rule in RULES}, indent=1) + "\n")
