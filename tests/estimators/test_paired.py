"""How a doubled batch is divided between the signs and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dpzero.estimators.exactness_checks import make_exact
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.paired import NotPairable, halves, joined
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace

# ---------------------------------------------------------------- arguments and outputs


def numbered(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def test_what_has_the_batch_first_is_divided_and_the_rest_goes_to_both():
    whole, tokens, shared = numbered(6, 2), numbered(12, 3), numbered(1, 5)
    number, flag = torch.tensor(2.0), "flag"
    arguments = ((whole, [shared, number]), {"tokens": tokens, "flag": flag, "none": None})
    first, second, divided = halves(arguments, rows=3)
    assert divided
    (a, [b, c]), kwargs = first
    assert torch.equal(a, whole[:3])
    assert b is shared
    assert c is number
    assert torch.equal(kwargs["tokens"], tokens[:6])
    assert kwargs["flag"] is flag
    (a, _), kwargs = second
    assert torch.equal(a, whole[3:])
    assert torch.equal(kwargs["tokens"], tokens[6:])


def test_rows_of_one():
    """With one row a half, a leading dimension of 2 is divided and one of 1 is not."""
    first, second, divided = halves((numbered(2, 3), numbered(1, 3)), rows=1)
    assert divided
    assert first[0].shape == second[0].shape == (1, 3)
    assert first[1] is second[1]
    assert torch.equal(joined(first[0], second[0], 1, divided), numbered(2, 3))


def test_nothing_to_divide():
    first, second, divided = halves(((numbered(1, 5), None), {"k": 3}), rows=4)
    assert not divided
    assert first == second


@pytest.mark.parametrize("shape", [(9, 9), (3, 2), (0, 2), (7,)])
def test_other_leading_dimensions_are_refused(shape: tuple[int, ...]):
    with pytest.raises(NotPairable, match=r"3 rows; use strategy='layerwise'"):
        halves((torch.zeros(shape),), rows=3)


def test_nested_outputs_are_joined():
    first, second = ({"a": (numbered(3, 2), None)}, {"a": (numbered(3, 2) + 10, None)})
    out = joined(first, second, rows=3, divided=True)
    assert torch.equal(out["a"][0], torch.cat([numbered(3, 2), numbered(3, 2) + 10]))
    assert out["a"][1] is None


def test_outputs_that_depend_on_the_sign_alone_are_repeated():
    """A position embedding of [1, T] ids: rows of the first half get plus, of the second minus."""
    plus, minus = numbered(1, 4), numbered(1, 4) + 100
    out = joined(plus, minus, rows=3, divided=False)
    assert out.shape == (6, 4)
    assert torch.equal(out, torch.cat([plus] * 3 + [minus] * 3))


@pytest.mark.parametrize(
    ("first", "second", "divided"),
    [
        (torch.zeros(()), torch.zeros(()), True),  # a loss has no rows
        (torch.zeros(4, 2), torch.zeros(4, 2), True),
        (torch.zeros(3, 2), torch.zeros(3, 2), False),
        ((torch.zeros(3),), [torch.zeros(3)], True),
        ((torch.zeros(3), 1), (torch.zeros(3), 2), True),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(first: Any, second: Any, divided: bool):
    with pytest.raises(NotPairable, match=r"returns|structure"):
        joined(first, second, rows=3, divided=divided)


# ---------------------------------------------------------------- models


def squares(model: nn.Module, inputs: Any) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(dim=1)


class SequenceFirst(nn.Module):
    """Hands its layer [T, B, h]: the leading dimension is not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Flattened(nn.Module):
    """Hands its layer the tokens of all rows, and a normalisation a tensor of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x.flatten(0, 1)).view(x.shape))


def paired(model: nn.Module, strategy: str = "paired") -> FiniteDifferences:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    space = ParameterSpace.from_model(model, smoothing=1e-2)
    space.snap_()
    return FiniteDifferences(model, space, squares, 1e-2, strategy=strategy)


@pytest.mark.parametrize("length", [3, 4])  # 4 = 2 x 2 rows, so that it is divided, and wrongly
def test_a_batch_that_is_not_first_is_found_out(length: int):
    estimate = paired(SequenceFirst())
    with pytest.raises(ValueError, match="strategy='paired'.*use 'whole_model'"):
        make_exact(estimate, {"x": numbered(2, length, 4).cos()}, Direction(3, 0))
    assert estimate.space.settled


def test_flattened_tokens_are_fine():
    batch = {"x": numbered(2, 5, 4).cos()}
    estimate = paired(Flattened())
    assert make_exact(estimate, batch, Direction(3, 0)) == []
    expected = paired(Flattened(), "whole_model")([batch], [Direction(3, 0)])
    assert torch.equal(estimate([batch], [Direction(3, 0)]), expected)
    assert float(expected.abs().mean()) > 0.01


def test_the_objective_sees_each_row_twice_and_runs_once():
    seen = []

    def spied(model: nn.Module, inputs: Any) -> Tensor:
        seen.append({name: tuple(value.shape) for name, value in inputs.items()})
        return squares(model, inputs)

    estimate = paired(Flattened())
    estimate.objective = spied
    shared = torch.zeros(7)
    estimate([{"x": numbered(2, 5, 4).cos(), "shared": shared}], [Direction(3, 0)])
    assert seen == [{"x": (4, 5, 4), "shared": (7,)}]
