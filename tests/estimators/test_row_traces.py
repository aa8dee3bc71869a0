"""Digests of all bits of a forward pass, one an example."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import tiny_model
from torch import Tensor, nn

from hf_dpzero.estimators.row_traces import Traced
from hf_dpzero.objectives.heads import sequence_classification_objective

ROWS = 5


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (ROWS, 7), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.arange(ROWS) % 2,
    }


class Nudged(nn.Linear):
    """Returns one row's first output moved by one unit in the last place, or another sign of zero."""

    row: int | None = None
    zero = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        here = torch.zeros_like(y, dtype=torch.bool)
        if self.row is not None:
            here[self.row, 0] = True
        if self.zero:
            return torch.where(here, -0.0, torch.zeros_like(y))
        return torch.where(here, torch.nextafter(y, torch.ones(())), y)


def with_nudge() -> nn.Module:
    model = tiny_model().eval()
    head = Nudged(16, 2)
    with torch.no_grad():
        for old, new in zip(model.classifier.parameters(), head.parameters(), strict=True):
            new.copy_(old * 1e-3)
    model.classifier = head
    return model


@pytest.mark.parametrize("row", range(ROWS))
def test_a_bit_that_does_not_reach_the_loss_changes_its_row_and_no_other(row: int):
    model = with_nudge()
    losses, traced = [], []
    for model.classifier.row in (None, row):
        losses.append(sequence_classification_objective(model, batch()))
        traced.append(Traced(sequence_classification_objective)(model, batch()))
    assert torch.equal(*losses)  # logits of 1e-4 beside log 2
    assert (traced[0] != traced[1]).tolist() == [i == row for i in range(ROWS)]


def test_digests_are_of_all_layers_and_move_with_their_rows():
    model, given = tiny_model().eval(), batch()
    traced = Traced(sequence_classification_objective)
    found = traced(model, given)
    assert found.dtype == torch.float32 and found.shape == (ROWS,)
    assert (found == found.round()).all() and (found >= 0).all() and (found < 2**24).all()
    assert torch.equal(traced(model, given), found) and found.unique().numel() == ROWS
    turned = {name: value.roll(2, 0) for name, value in given.items()}
    assert torch.equal(traced(model, turned), found.roll(2))
    for module in model.modules():
        assert not module._forward_hooks
    with torch.no_grad():
        model.bert.encoder.layer[0].intermediate.dense.bias[3] += 1e-6
    assert not torch.equal(traced(model, given), found)


def test_nan_and_zero_have_one_digest():
    model = with_nudge()
    model.classifier.zero = True
    plain = Traced(sequence_classification_objective)(model, batch())
    model.classifier.row = 2
    assert torch.equal(Traced(sequence_classification_objective)(model, batch()), plain)

    def payload(bits: int):
        return lambda model, inputs: torch.full((ROWS,), bits, dtype=torch.int32).view(
            torch.float32
        )

    one, other = (Traced(payload(bits))(nn.Identity(), batch()) for bits in (0x7FC00000, -0x3FFFFF))
    assert torch.equal(one, other)


class Positions(nn.Module):
    """What it returns is of the text's positions, or has the batch second."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.transposed else x


def test_what_may_be_of_positions_is_left_out():
    """As many tokens as rows: embeddings of positions, and outputs that have the batch second."""
    ids = torch.randint(5, 50, (ROWS, ROWS), generator=torch.Generator().manual_seed(1))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(50, 8), nn.Embedding(ROWS, 8)
            self.second = Positions(transposed=True)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.words(ids) + self.places(torch.arange(ROWS))
            return self.second(hidden).sum(dim=(0, 2))

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return model(inputs["input_ids"])

    model = Model()
    found = Traced(loss)(model, {"input_ids": ids})
    assert torch.equal(Traced(loss)(model, {"input_ids": ids.roll(1, 0)}), found.roll(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to(dtype)
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(2)).to(dtype)

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return 0.0 * model(inputs["x"])[:, 0].float()

    found = Traced(loss)(model, {"x": x})
    assert torch.equal(Traced(loss)(model, {"x": x.flip(0)}), found.flip(0))
    x[1, 0] = 2.0 * x[1, 0]  # another exponent: the upper bits
    assert (Traced(loss)(model, {"x": x}) != found).tolist() == [i == 1 for i in range(ROWS)]


def test_copies_are_traced_under_vmap():
    model, given = tiny_model().eval(), batch()
    parameters = dict(model.named_parameters())
    stacked = {n: torch.stack([p, p * 1.25]) for n, p in parameters.items()}

    def run(parameters: dict[str, Tensor]) -> Tensor:
        def loss(_: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            out = torch.func.functional_call(model, parameters, kwargs={**inputs, "labels": None})
            return nn.functional.cross_entropy(out.logits, inputs["labels"], reduction="none")

        return Traced(loss)(model, given)

    with torch.no_grad():
        both = torch.func.vmap(run)(stacked)
        turned = torch.func.vmap(run)({n: p.flip(0) for n, p in stacked.items()})
    assert torch.equal(both.flip(0), turned) and (both[0] != both[1]).all()
