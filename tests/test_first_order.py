"""Per-example gradients against a loop that differentiates one example at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("opacus")

from hf_dpzero.first_order import PerExampleGradients
from hf_dpzero.objectives import select_objective

Batch = Mapping[str, Tensor]


def batch_of(rows: int = 4, language: bool = False) -> dict[str, Tensor]:
    """Rows of 7 tokens, the second one padded after 4; classes, or tokens to predict."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 64, (rows, 7), generator=generator)
    mask = torch.ones_like(ids)
    ids[1:2, 4:], mask[1:2, 4:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100) if language else torch.arange(rows) % 2
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def opt_classifier() -> nn.Module:
    from transformers import OPTConfig, OPTForSequenceClassification

    config = OPTConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        max_position_embeddings=40, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return OPTForSequenceClassification(config).eval()


@pytest.fixture(params=["bert", "roberta", "opt", "opt-lm", "bert-mlm"])
def case(request: Any) -> tuple[nn.Module, Callable[..., Tensor], dict[str, Tensor]]:
    """(model, objective, batch) of every kind that the bench and the trainer meet."""
    fixtures = {"bert": "tiny_bert", "roberta": "tiny_roberta", "opt-lm": "tiny_opt",
                "bert-mlm": "tiny_masked_lm"}  # fmt: skip
    kind = request.param
    model = opt_classifier() if kind == "opt" else request.getfixturevalue(fixtures[kind])()
    return model, select_objective(model), batch_of(language="lm" in kind)


def gradients_one_by_one(model: nn.Module, objective: Any, batch: Batch) -> list[list[Tensor]]:
    """grad f(theta; xi_i) for each i by plain autograd, zeros where the loss does not depend."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    for i in range(batch["input_ids"].shape[0]):
        loss = objective(model, {name: value[i : i + 1] for name, value in batch.items()}).sum()
        own = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append(
            [torch.zeros_like(p) if g is None else g for g, p in zip(own, parameters, strict=True)]
        )
    return found


def norm(gradient: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradient))


def clipped_one_by_one(examples: list[list[Tensor]], clip: float) -> list[Tensor]:
    factors = [min(1.0, clip / norm(g)) for g in examples]
    return [
        sum(f * g for f, g in zip(factors, column, strict=True))
        for column in zip(*examples, strict=True)
    ]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
def test_the_clipped_sum_is_that_of_single_examples(case: Any, microbatch_size: int | None):
    model, objective, batch = case
    examples = gradients_one_by_one(model, objective, batch)
    norms = sorted(norm(g) for g in examples)
    clip = (norms[0] + norms[-1]) / 2  # some are clipped, some are not
    assert norms[0] < clip < norms[-1]
    found = PerExampleGradients(model, objective).clipped_sum(batch, clip, microbatch_size)
    assert all(part.dtype == torch.float32 for part in found)
    assert_close(found, clipped_one_by_one(examples, clip))


def test_every_examples_gradient_is_its_own(case: Any):
    model, objective, batch = case
    found = PerExampleGradients(model, objective).per_example(batch)
    for i, expected in enumerate(gradients_one_by_one(model, objective, batch)):
        own = [torch.zeros_like(e) if g is None else g[i] for g, e in zip(found, expected)]
        assert_close(own, expected)


def test_one_example_moves_the_sum_by_at_most_the_clip(case: Any):
    model, objective, batch = case
    one = {name: value[:1] for name, value in batch.items()}
    found = PerExampleGradients(model, objective).clipped_sum(one, clip=1e-3)
    assert norm(found) == pytest.approx(1e-3, rel=1e-4)  # and its own norm is larger: not zero


def test_an_empty_batch_gives_zeros(tiny_bert: Any):
    model = tiny_bert()
    empty = {name: value[:0] for name, value in batch_of().items()}
    found = PerExampleGradients(model, select_objective(model)).clipped_sum(empty, 1.0)
    assert all(not part.any() for part in found)
    assert [part.shape for part in found] == [p.shape for p in model.parameters()]


def test_an_example_without_a_finite_gradient_counts_as_zero(tiny_bert: Any):
    model, batch = tiny_bert(), batch_of()
    plain = select_objective(model)

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        bad = (inputs["input_ids"] == batch["input_ids"][2]).all(dim=1)
        return plain(model, inputs) * torch.where(bad, torch.inf, 1.0)

    expected = gradients_one_by_one(model, plain, batch)
    del expected[2]
    found = PerExampleGradients(model, objective).clipped_sum(batch, 0.5)
    assert_close(found, clipped_one_by_one(expected, 0.5))


def test_frozen_parameters_are_left_out(tiny_bert: Any):
    model = tiny_bert()
    for name, p in model.named_parameters():
        p.requires_grad_("classifier" in name)
    gradients = PerExampleGradients(model, select_objective(model))
    assert gradients.names == ["classifier.weight", "classifier.bias"]
    examples = gradients_one_by_one(model, select_objective(model), batch_of())
    expected = clipped_one_by_one(examples, 0.1)
    assert_close(gradients.clipped_sum(batch_of(), 0.1), expected)


@pytest.mark.parametrize("broken", [False, True])
def test_the_model_is_left_as_it_was(tiny_opt: Any, broken: bool):
    model = tiny_opt().train()
    before = copy.deepcopy(model)
    plain = select_objective(model)

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        losses = plain(model, inputs)
        if broken:
            raise RuntimeError("no loss today")
        return losses

    gradients = PerExampleGradients(model, objective)
    if broken:
        with pytest.raises(RuntimeError, match="no loss today"):
            gradients.clipped_sum(batch_of(language=True), 1.0)
    else:
        gradients.clipped_sum(batch_of(language=True), 1.0)
    for now, then in zip(model.modules(), before.modules(), strict=True):
        assert now.__dict__.keys() == then.__dict__.keys()
        assert now.training and not now._forward_hooks and not now._backward_hooks
    for now, then in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, then) and now.grad is None
        assert vars(now) == vars(then)


# ---------------------------------------------------------------- refusals


class Toy(nn.Module):
    """Two linear layers; `how` says how the second one's weight is used."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "outside":
            return F.linear(x, self.second.weight)
        if self.how == "both":
            return self.second(x) + F.linear(x, self.second.weight)
        if self.how == "for_all":
            return x + self.second(x.mean(dim=0, keepdim=True))
        return self.second(x)


def toy_objective(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["x"]).square().sum(dim=1)


TOY_BATCH = {"x": torch.linspace(-1, 1, 15).reshape(5, 3)}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("outside", "second.weight has per-example gradients of shape NoneType"),
        ("both", "second.weight: the per-example gradients do not add up"),
        ("for_all", "a Linear sees 1 rows in a batch of 5 examples"),
    ],
)
def test_weights_used_in_other_ways_are_refused(how: str, message: str):
    with pytest.raises(ValueError, match=message):
        PerExampleGradients(Toy(how), toy_objective).clipped_sum(TOY_BATCH, 1.0)
    PerExampleGradients(Toy("plain"), toy_objective).clipped_sum(TOY_BATCH, 1.0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Scale(), r"0 \(Scale\) owns trainable parameters"),
        (nn.BatchNorm1d(3), r"0 \(BatchNorm1d\)"),
        (nn.Embedding(5, 3, max_norm=1.0), r"0 \(Embedding\)"),
    ],
)
def test_layers_without_per_example_gradients_are_refused_by_name(layer: nn.Module, message: str):
    with pytest.raises(ValueError, match=message):
        PerExampleGradients(nn.Sequential(layer), toy_objective)
    for p in layer.parameters():
        p.requires_grad_(False)
    PerExampleGradients(nn.Sequential(layer, nn.Linear(3, 3)), toy_objective)  # frozen is fine


def test_an_embedding_that_does_more_than_look_up_is_refused():
    batch = {"x": torch.arange(4)}
    with pytest.raises(ValueError, match="ScaledEmbedding does more than look up rows"):
        PerExampleGradients(ScaledEmbedding(5, 3), toy_objective).clipped_sum(batch, 1.0)


def test_settings_that_mean_nothing_are_refused():
    gradients = PerExampleGradients(Toy("plain"), toy_objective)
    for clip in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            gradients.clipped_sum(TOY_BATCH, clip)
    with pytest.raises(ValueError, match="microbatch_size=0"):
        gradients.clipped_sum(TOY_BATCH, 1.0, microbatch_size=0)
    with pytest.raises(ValueError, match="no parameter is trainable"):
        PerExampleGradients(Toy("plain").requires_grad_(False), toy_objective)


def test_a_mean_over_the_batch_is_refused():
    def mean(model: nn.Module, inputs: Batch) -> Tensor:
        return toy_objective(model, inputs).mean()

    with pytest.raises(ValueError, match="never a mean over the batch"):
        PerExampleGradients(Toy("plain"), mean).clipped_sum(TOY_BATCH, 1.0)
