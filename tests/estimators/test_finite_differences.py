"""Finite differences: the equation, exact restoring, shapes, and what passes through."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from estimator_bench import Batch, token_batch, us
from torch import Tensor, nn
from whole_directions import direction_vector

from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import FrozenPrefix
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import batch_size, evaluation_mode
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace


class Quadratic(nn.Module):
    """f(theta; x) = 1/2 ||theta - x||^2: its finite difference along u is (theta - x) . u exactly."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.linspace(-1, 1, dimension))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.theta - x).double().square().sum(dim=1)


def quadratic_loss(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["x"])


def rows(count: int, dimension: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(count, dimension, generator=generator)}


def estimator(
    model: nn.Module,
    objective: Callable[[nn.Module, Batch], Tensor],
    smoothing: float = 1e-3,
    **settings: Any,
) -> FiniteDifferences:
    space = ParameterSpace.from_model(model, smoothing=smoothing, **settings)
    space.snap_()
    return FiniteDifferences(model, space, objective, smoothing)


def settled(estimate: FiniteDifferences, batches: list[Batch], chosen: list[Direction]) -> Tensor:
    found = estimate(batches, chosen)
    estimate.space.settle_()
    return found


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
def test_a_quadratic_is_differentiated_exactly(distribution):
    """x[i, k] = (theta - x_i) . u_k; losses are float32, so to 2^-24 |f| / smoothing = 2e-3."""
    model, batch = Quadratic(40), rows(6, 40)
    estimate = estimator(model, quadratic_loss, smoothing=2e-2, distribution=distribution)
    found = settled(estimate, [batch], us(3))
    assert found.dtype == torch.float64
    assert found.shape == (6, 3)
    theta = model.theta.detach().double()
    vectors = [direction_vector(u, distribution, [(0, 40)]).double() for u in us(3)]
    expected = (theta - batch["x"].double()) @ torch.stack(vectors, dim=1)
    assert float((found - expected).abs().max()) < 100 * 2.0**-24 / 2e-2
    assert float(expected.abs().mean()) > 1


def test_microbatches_are_concatenated_in_order():
    estimate = estimator(Quadratic(40), quadratic_loss)
    batch = rows(7, 40)
    whole = settled(estimate, [batch], us(2))
    parts = [{"x": batch["x"][a:b]} for a, b in [(0, 3), (3, 4), (4, 7)]]
    assert torch.equal(settled(estimate, parts, us(2)), whole)


def test_microbatches_of_one_and_eight_agree_on_a_transformer(tiny_bert):
    """Matrix products of other shapes round differently: losses of about 1 agree to 2^-24 times the
    square root of the some thousand terms on the way, 4e-6, so x to 4e-6 / smoothing = 4e-3."""
    estimate = estimator(tiny_bert(), select_objective(tiny_bert()))
    batch = token_batch(8)
    eight = settled(estimate, [batch], us(2))
    ones = settled(estimate, [pick(batch, [i]) for i in range(8)], us(2))
    assert float((eight - ones).abs().max()) < 4e-3
    assert float(eight.abs().mean()) > 0.02


def pick(batch: Batch, indices: list[int]) -> Batch:
    return {name: value[indices] for name, value in batch.items()}


def test_parameters_stand_at_minus_lambda_u_k_and_settle_to_theta():
    estimate = estimator(Quadratic(40), quadratic_loss)
    before = estimate.space.tensors[0].detach().clone()
    three = us(3)
    estimate([rows(2, 40)], three)
    assert estimate.space.position == ((three[-1], -1e-3),)
    assert not torch.equal(estimate.space.tensors[0], before)
    estimate.space.settle_()
    assert torch.equal(estimate.space.tensors[0], before)


def test_an_empty_batch_touches_nothing():
    calls: list[int] = []

    def counted(model: nn.Module, inputs: Batch) -> Tensor:
        calls.append(1)
        return quadratic_loss(model, inputs)

    estimate = estimator(Quadratic(40), counted)
    before = estimate.space.tensors[0].detach().clone()
    found = estimate([], us(3))
    assert found.shape == (0, 3)
    assert found.dtype == torch.float64
    assert not calls
    assert estimate.space.position == ()
    assert torch.equal(estimate.space.tensors[0], before)


@pytest.mark.parametrize(
    ("at", "error"), [(1, ValueError), (3, KeyboardInterrupt), (6, MemoryError)]
)
def test_an_exception_in_any_forward_leaves_theta(at, error):
    calls: list[int] = []

    def failing(model: nn.Module, inputs: Batch) -> Tensor:
        calls.append(1)
        if len(calls) == at:
            raise error("boom")
        return quadratic_loss(model, inputs)

    model = Quadratic(40).train()
    estimate = estimator(model, failing)
    before = model.theta.detach().clone()
    with pytest.raises(error, match="boom"):
        estimate([rows(2, 40), rows(1, 40)], us(2))
    assert len(calls) == at
    assert torch.equal(model.theta, before)
    assert estimate.space.position == ()
    assert model.training


@pytest.mark.parametrize(
    "wrong",
    [
        lambda losses: losses.mean(),
        lambda losses: losses[:, None],
        lambda losses: losses[:1],
        lambda losses: losses.expand(2, -1),
    ],
)
def test_a_loss_that_is_not_per_example_is_refused(wrong):
    model = Quadratic(40)
    estimate = estimator(model, lambda m, inputs: wrong(quadratic_loss(m, inputs)))
    before = model.theta.detach().clone()
    with pytest.raises(ValueError, match=r"\[3\]|\[B\]|per.example"):
        estimate([rows(3, 40)], us(1))
    assert torch.equal(model.theta, before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_reach_the_mechanism_as_they_are(value):
    """One bad example: its row is not finite (inf - inf is NaN), the others are untouched."""

    def bad(model: nn.Module, inputs: Batch) -> Tensor:
        losses = quadratic_loss(model, inputs)
        losses[1] = value
        return losses

    good = settled(estimator(Quadratic(40), quadratic_loss), [rows(3, 40)], us(2))
    found = settled(estimator(Quadratic(40), bad), [rows(3, 40)], us(2))
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], good[[0, 2]])


def test_gradients_are_never_recorded():
    seen: list[bool] = []

    def spying(model: nn.Module, inputs: Batch) -> Tensor:
        losses = quadratic_loss(model, inputs)
        seen.append(losses.requires_grad)
        return losses

    estimator(Quadratic(40), spying)([rows(2, 40)], us(1))
    assert seen == [False, False]


def test_dropout_is_off_inside_and_modes_come_back():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)), nn.Linear(2, 2))
    model.train()
    model[1].eval()  # a part that its owner keeps in eval mode
    modes = [m.training for m in model.modules()]
    with evaluation_mode(model):
        assert not any(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(KeyError), evaluation_mode(model):
        raise KeyError
    assert [m.training for m in model.modules()] == modes


def test_batch_size_is_the_first_tensors_leading_dimension():
    assert batch_size({"scale": torch.tensor(2.0), "x": torch.zeros(5, 2)}) == 5
    with pytest.raises(ValueError, match=r"\['scale'\] holds no tensor with a batch dimension"):
        batch_size({"scale": torch.tensor(2.0)})


def test_a_model_whose_parameters_were_replaced_is_refused():
    model = Quadratic(4)
    estimate = estimator(model, quadratic_loss)
    model.theta = nn.Parameter(model.theta.detach().clone())
    with pytest.raises(RuntimeError, match="replaced"):
        estimate([rows(2, 4)], us(1))


def two_layers(*dtypes: torch.dtype) -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3).to(dtype) for dtype in dtypes))


FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((FLOAT, FLOAT), "whole_model"),
        ((BFLOAT, BFLOAT), "layerwise"),
        ((FLOAT, HALF), "layerwise"),
    ],
)
def test_auto_depends_on_the_trainable_dtypes(dtypes, expected):
    estimate = estimator(two_layers(*dtypes), quadratic_loss)
    assert estimate.strategy == expected
    assert (estimate.visits is None) == (expected == "whole_model")


def test_an_unknown_strategy_is_refused():
    model = two_layers(FLOAT)
    space = ParameterSpace.from_model(model, smoothing=1e-3)
    with pytest.raises(ValueError, match="strategy='modulewise' is not known"):
        FiniteDifferences(model, space, quadratic_loss, 1e-3, strategy="modulewise")


@pytest.mark.parametrize("part", ["whole", "module"])
def test_compiled_models_are_moved_as_a_whole(part):
    model = two_layers(BFLOAT, BFLOAT)
    compiled: Any = torch.compile(model, backend="eager") if part == "whole" else model
    if part == "module":
        model[0].compile(backend="eager")
    space = ParameterSpace.from_model(compiled, smoothing=1e-3)
    model[0].requires_grad_(False)
    assert FrozenPrefix(model).worthwhile
    chosen = FiniteDifferences(compiled, space, quadratic_loss, 1e-3)
    assert (chosen.strategy, chosen.prefix) == ("whole_model", None)
    for strategy in ("layerwise", "stacked"):
        with pytest.raises(ValueError, match="compiled code does not follow: use strategy='whole"):
            FiniteDifferences(compiled, space, quadratic_loss, 1e-3, strategy=strategy)


def test_whole_model_moves_once_per_sign_whatever_the_number_of_microbatches():
    estimate = estimator(Quadratic(40), quadratic_loss)
    moves, move = [], estimate.space.move_to_
    estimate.space.move_to_ = lambda position: (moves.append(position), move(position))  # type: ignore[method-assign]
    estimate([rows(2, 40), rows(1, 40), rows(3, 40)], us(2))
    assert moves == [((u, s * 1e-3),) for u in us(2) for s in (1.0, -1.0)]
