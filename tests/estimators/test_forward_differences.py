"""Forward differences: the equation, K + 1 passes, one loss at theta, the same under every strategy."""

from __future__ import annotations

import itertools

import pytest
import torch
from estimator_bench import SMOOTHING, VOCABULARY, Bench, bits, same, seeded, token_batch, us
from tiny_runs import build, config, stopping, tiny_model, weights
from torch import nn
from whole_directions import direction_vector

from hf_dpzero.checks.passes import smallest_clip_and_scale
from hf_dpzero.estimators.finite_differences import FiniteDifferences, passes_of
from hf_dpzero.estimators.precision_diagnostics import measure
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.parallel.mesh import direction_shares

K = 5


def forward(bench: Bench, strategy: str, reuse: bool = False) -> FiniteDifferences:
    return bench.estimator(strategy, reuse, "forward")


@pytest.fixture
def bench() -> Bench:
    return Bench(seeded(lambda: tiny_model(vocab_size=VOCABULARY)))


@pytest.fixture
def batches():
    return [token_batch(3), token_batch(2, seed=1)]


def test_the_difference_is_the_slope_and_half_lambda_of_the_curvature():
    """f = ||theta - x||^2 / 2 has u'Hu = d for signs: x_k = (theta - x)'u_k + lambda d / 2, exactly."""
    model = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 8))
    bench = Bench(model, lambda m, i: 0.5 * (m.weight - i["x"]).double().square().sum(dim=1))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    found = forward(bench, "whole_model")([{"x": x}], us(K))
    bench.space.settle_()
    u = torch.stack(
        [direction_vector(one, "rademacher", [(0, 8)]) for one in us(K)], dim=1
    ).double()
    expected = (model.weight.detach() - x).double() @ u + SMOOTHING * 8 / 2
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("strategy", ["whole_model", "layerwise"])
def test_losses_are_those_of_central_differences_and_of_theta(bench, batches, strategy):
    theta = bits(bench.space.tensors)
    plus, minus = bench.estimator("whole_model").losses(batches, us(K))
    bench.space.settle_()
    at_theta = torch.cat([bench.objective(bench.model, batch) for batch in batches])
    ends = forward(bench, strategy).losses(batches, us(K))
    bench.space.settle_()
    assert torch.equal(ends[0], plus) and torch.equal(ends[1], at_theta[:, None].expand(-1, K))
    assert not torch.equal(ends[1], minus) and same(bench.space.tensors, theta)


def test_stacked_copies_agree_to_rounding_in_groups_too(bench, batches, monkeypatch):
    expected = forward(bench, "whole_model").losses(batches, us(K))
    bench.space.settle_()
    for held in (1 << 30, 1):  # all copies at once; those of a direction and of theta
        monkeypatch.setattr("hf_dpzero.estimators.stacked.STACK_BYTES", held)
        estimate = forward(bench, "stacked")
        found = estimate.losses(batches, us(K))
        assert (estimate.stack.directions_at_once == 1) == (held == 1)
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=0)


def test_a_batch_is_evaluated_once_more_than_there_are_directions(bench, batches):
    calls = itertools.count()
    bench.model.register_forward_pre_hook(lambda *_: (next(calls), None)[1])
    forward(bench, "whole_model")(batches, us(K))
    bench.space.settle_()
    assert next(calls) == len(batches) * passes_of("forward", K) == len(batches) * (K + 1)


def test_losses_of_a_step_are_those_at_theta(bench, batches):
    found, losses = forward(bench, "layerwise").with_losses(batches, us(K))
    at_theta = torch.cat([bench.objective(bench.model, batch) for batch in batches])
    assert torch.equal(losses, at_theta.double()) and found.shape == (5, K)


class Halves:
    """Two processes with the same rows, one after the other."""

    def __init__(self, estimate, batches):
        self.estimate, self.batches = estimate, batches

    def own(self, directions):
        return directions[:2]

    def gathered(self, plus, minus, total):
        ends = self.estimate.losses(self.batches, us(total)[2:])
        return torch.cat([plus, ends[0]], 1), torch.cat([minus, ends[1]], 1)


def test_processes_that_share_directions_find_the_bits_of_one(bench, batches):
    estimate = forward(bench, "whole_model")
    alone = estimate.with_losses(batches, us(K))
    shared = estimate.with_losses(batches, us(K), Halves(estimate, batches))
    assert all(map(torch.equal, alone, shared))


def test_sharing_directions_pays_less_where_each_process_evaluates_theta():
    assert direction_shares(4, 4, lambda rows: 1.0) == 4
    work = {1: 1.0, 2: 0.62, 4: 0.36}.__getitem__  # of the busiest share of the rows
    assert direction_shares(4, 4, work) == 4  # 2 x 1.0 against 8 x 0.36
    assert direction_shares(4, 4, work, differences="forward") == 1  # 2 x 1.0 against 5 x 0.36


# ---- in the trainer


def test_deferred_updates_make_no_difference_and_replay_rebuilds_the_weights(tmp_path):
    ends = []
    for defer in (True, False):
        own = {"num_directions": 4, "differences": "forward", "max_steps": 3, "learning_rate": 1e-3}
        run = build(tmp_path / str(defer), **own, **{"performance.defer_updates": defer})
        run.train()
        ends.append(weights(run.model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert run.trajectory.header["differences"] == "forward"
    fresh = tiny_model()
    replay(fresh, Trajectory.load(tmp_path / "False" / "trajectory.ledger"))
    assert all(torch.equal(weights(fresh)[name], ends[1][name]) for name in ends[1])


def test_the_allowance_for_places_counts_both_losses(tmp_path):
    """(f(theta + lu) - f(theta)) / l moves by twice what (f(theta + lu) - f(theta - lu)) / 2l may."""
    scales = {}
    for kind in ("central", "forward"):
        run = build(tmp_path / kind, num_directions=4, differences=kind).run
        scales[kind] = smallest_clip_and_scale(run)
    assert scales["forward"] == (scales["central"][0], 2 * scales["central"][1])


def test_a_run_does_not_go_on_with_the_other_kind(tmp_path):
    own = {"num_directions": 4, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    build(tmp_path, differences="forward", **own, trainer_settings=stopping(2)).train()
    with pytest.raises(ValueError, match="differences"):
        build(tmp_path, differences="central", **own).train(resume_from_checkpoint=True)


def test_rounding_is_judged_by_central_differences(bench, batches):
    """Curvature is none of it: half of u'Hu lambda would be, of forward differences."""
    central = measure(bench.estimator("whole_model"), batches, "float32")
    estimate = forward(bench, "whole_model")
    assert measure(estimate, batches, "float32") == central and estimate.forward


def test_one_direction_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_directions=1 saves nothing"):
        config(tmp_path, num_directions=1, differences="forward")
