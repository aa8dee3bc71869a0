"""Ghost clipping: norms without gradients, where they are taken, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("opacus")

from opacus.grad_sample import GradSampleHooksFastGradientClipping
from test_per_example_gradients import (
    batch_of,
    check_against_naive_loop,
    clipped_sum,
    in_double,
    norm,
)
from tiny_runs import build

from hf_dpzero import DPZeroConfig, DPZeroTrainer
from hf_dpzero.estimators import ghost_clipping
from hf_dpzero.estimators import per_example_gradients as estimators
from hf_dpzero.estimators.ghost_clipping import Products
from hf_dpzero.estimators.per_example_gradients import (
    GhostGradients,
    PerExampleGradients,
    per_example_gradients,
)
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.privacy.mechanisms.gradient import DPSGD

Batch = Mapping[str, Tensor]


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def looked_up(tokens: int, seed: int) -> Products:
    ids = torch.randint(0, 8, (3, tokens), generator=torch.Generator().manual_seed(seed))
    return Products(ids, floats(3, tokens, 90, seed=seed + 1))


def multiplied(tokens: int, seed: int) -> Products:
    return Products(floats(3, tokens, 8, seed=seed), floats(3, tokens, 90, seed=seed + 1))


USES = {
    "linear": [multiplied(5, 0)],
    "one token": [multiplied(1, 0)],
    "embedding": [looked_up(12, 2)],
    "two linears": [multiplied(5, 0), multiplied(6, 4)],
    "two embeddings": [looked_up(5, 0), looked_up(4, 6)],
    "tied": [multiplied(6, 8), looked_up(7, 10)],
    "tied, twice": [looked_up(2, 0), multiplied(6, 8), looked_up(7, 10), multiplied(2, 3)],
}


@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_the_norm_of_all_uses_of_a_weight_is_that_of_their_summed_gradient(uses):
    """Written out here with one-hot rows in float64; cross terms between uses included."""
    weight = nn.Parameter(torch.zeros(8, 90))
    total = torch.zeros(3, 8, 90, dtype=torch.float64)
    for use in uses:
        left = use.left
        rows = left if left.is_floating_point() else nn.functional.one_hot(left, 8)
        total += torch.einsum("btn,btm->bnm", rows.double(), use.right.double())
    assert not ghost_clipping.is_small(weight, uses)
    squares, scale = ghost_clipping.squared_norms(ghost_clipping.joined(uses))
    torch.testing.assert_close(squares, total.square().sum((1, 2)), rtol=1e-6, atol=0)
    assert bool((scale >= squares.sqrt()).all())  # the triangle inequality
    weights = torch.tensor([0.5, 0.0, 2.0])
    added = torch.ones(8, 90, dtype=torch.float64)
    for use in ghost_clipping.joined(uses):
        use.add_weighted_(added, slice(None), weights.double())
    expected = 1 + (weights.double()[:, None, None] * total).sum(0)
    torch.testing.assert_close(added, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "without"), [(18, True), (19, False)])
def test_a_weight_smaller_than_the_tables_takes_its_gradient(tokens, without):
    """720 numbers against 2 T^2: 648 of 18 tokens, 722 of 19 (Bu et al. 2022)."""
    weight = nn.Parameter(torch.zeros(8, 90))
    assert ghost_clipping.is_small(weight, [multiplied(tokens, 0)]) != without


@pytest.mark.parametrize("tokens", [64, 500])
def test_norms_are_as_good_as_the_clips_margin_asks(tokens):
    """A relative 2^-17, twice that squared; Opacus' own rule agrees to 1e-4."""
    use = Products(floats(2, tokens, 768), floats(2, tokens, 768, seed=1))
    truth = (use.left.double().mT @ use.right.double()).square().sum((1, 2))
    squares, _ = ghost_clipping.squared_norms([use.scaled()])
    torch.testing.assert_close(squares, truth, rtol=2.0**-18, atol=0)

    layer = nn.Linear(768, 768, bias=False)
    rule = GradSampleHooksFastGradientClipping.NORM_SAMPLERS[nn.Linear]
    opacus = rule(layer, [use.right], use.left)[layer.weight]
    torch.testing.assert_close(squares.sqrt(), opacus.double(), rtol=1e-4, atol=0)


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for t in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(t, Tensor):  # expanded ones have small storage
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return output


def test_no_per_example_gradient_of_a_large_weight_is_ever_held():
    """The largest tensor is a weight's gradient; dense ones are 6 times as large."""
    largest = {}
    batch = {"ids": torch.randint(0, 40, (6, 4), generator=torch.Generator().manual_seed(2))}
    for kind in (PerExampleGradients, GhostGradients):
        model = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 50))
        with Largest() as seen:
            clipped_sum(kind(model, token_loss), batch, 1.0)
        largest[kind] = seen.numel
    assert largest[GhostGradients] == 50 * 64
    assert largest[PerExampleGradients] == 6 * 50 * 64


def token_loss(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["ids"]).square().mean(dim=(1, 2))


@pytest.mark.parametrize("bad", [(), (1,), (0, 1, 2, 3)])
def test_one_forward_pass_with_or_without_broken_examples(tiny_bert, bad):
    model, calls = tiny_bert(), []
    plain = select_objective(model)

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        calls.append(len(inputs["labels"]))
        return plain(model, inputs) * torch.where(inputs["broken"], torch.nan, 1.0)

    broken = torch.tensor([i in bad for i in range(4)])
    totals, _ = GhostGradients(model, objective).weighted_sum(
        [{**batch_of(), "broken": broken}], torch.ones_like
    )
    assert calls == [4]
    assert all(bool(t.isfinite().all()) for t in totals)


@pytest.mark.parametrize("left_over", [1e-2, 1e-4, 1e-6])
def test_a_gradient_whose_tokens_cancel_is_not_lost_in_rounding(left_over):
    """Tokens come in pairs of opposite sign; T^2 products of size 1 cannot tell what remains."""
    half = floats(3, 2, 64)
    noise = floats(3, 2, 64, seed=1) * left_over
    batch = {"x": torch.cat([half, half + noise], dim=1)}
    sign = torch.tensor([1.0, 1.0, -1.0, -1.0])

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        return (model(inputs["x"]) * sign.to(inputs["x"])[:, None]).sum(dim=(1, 2))

    model = nn.Linear(64, 50, bias=False)
    expected = [norm(g) for g in in_double(model, objective, batch)]
    _, norms = GhostGradients(model, objective).weighted_sum([batch], torch.ones_like)
    rounding = 3e-7 / left_over  # of the gradient itself: float32 sums of numbers of size 1
    assert norms.tolist() == pytest.approx(expected, rel=rounding)
    assert max(expected) < 100 * left_over


def test_what_cancels_altogether_has_no_gradient():
    """Its norm is exactly 0 alone, and finite weights stay finite."""
    row = floats(2, 1, 64)
    batch = {"x": torch.cat([row, row], dim=1)}

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        out = model(inputs["x"])
        return (out[:, 0] - out[:, 1]).sum(dim=1)

    model = nn.Linear(64, 50)
    totals, norms = GhostGradients(model, objective).weighted_sum([batch], torch.ones_like)
    assert norms.tolist() == [0.0, 0.0]
    assert not any(t.any() for t in totals)


class Weighed(nn.Module):
    """sum_t c_t layer(x_t): an example picks its tokens' gradients itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def weighed_objective(model: Any, inputs: Batch) -> Tensor:
    return (model.layer(inputs["x"]) * inputs["c"].unsqueeze(2)).sum(dim=(1, 2))


def contributions(model: nn.Module, batch: Batch, clip: float) -> list[float]:
    """||sum with the example - sum without it|| of examples 0 and 1."""
    weigh = DPSGD(clip=clip, noise_multiplier=1.0, expected_batch_size=1).weights

    def total(rows: list[int]) -> list[Tensor]:
        part = {name: v[rows] for name, v in batch.items()}
        return GhostGradients(model, weighed_objective).weighted_sum([part], weigh)[0]

    everyone = list(range(len(batch["c"])))
    full, found = total(everyone), []
    for i in (0, 1):
        rest = total([n for n in everyone if n != i])
        found.append(norm([a.double() - b.double() for a, b in zip(full, rest, strict=True)]))
    return found


@pytest.mark.parametrize(("tokens", "width", "out"), [(4, 1, 1), (8, 2, 1), (4, 32, 40)])
@pytest.mark.parametrize("size", [1e5, 1e6, 1e7])
def test_huge_tokens_that_cancel_move_the_sum_by_no_more_than_the_clip(tokens, width, out, size):
    """A second, weighted backward pass moves it by up to 14 clips; weights both small and large."""
    model = Weighed(nn.Linear(width, out))
    generator = torch.Generator().manual_seed(1)
    x = 0.3 * torch.rand(6, tokens, width, generator=generator)
    c = 1e3 * torch.rand(6, tokens, generator=generator)
    x[0], c[0, ::2], c[0, 1::2] = 0.3, size, -size
    assert max(contributions(model, {"x": x, "c": c}, clip=1.0)) < 1 + 2.0**-14


@pytest.mark.parametrize("small", [(1e3, 1e-22), (1e18, 1e-22), (1e-22, 1e18), (1e-19, 1e22)])
def test_numbers_whose_squares_leave_float32_are_measured(small):
    """1e-22^2 is 0 in float32, and 1e22^2 infinite."""
    model = Weighed(nn.Linear(64, 64, bias=False))
    batch = {"x": small[0] * floats(3, 4, 64), "c": small[1] * floats(3, 4, seed=1)}
    expected = [norm(g) for g in in_double(model, weighed_objective, batch)]
    mechanism = DPSGD(clip=min(expected) / 2, noise_multiplier=1.0, expected_batch_size=1)
    one = {name: torch.cat([v[:1], 0 * v[:1]]) for name, v in batch.items()}
    totals, norms = GhostGradients(model, weighed_objective).weighted_sum([one], mechanism.weights)
    assert norms.tolist() == [pytest.approx(expected[0], rel=1e-4), 0.0]
    assert norm(totals) == pytest.approx(mechanism.radius, rel=1e-4)


def test_a_microbatch_of_one_adds_the_gradient_that_was_measured(tiny_bert):
    """Bit for bit plain autograd's, times the weight of its norm."""
    model, batch = tiny_bert(), {name: v[:1] for name, v in batch_of().items()}
    objective = select_objective(model)
    loss = objective(model, batch).sum()
    own = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    totals, _ = GhostGradients(model, objective).weighted_sum(
        [batch], lambda norms: torch.full_like(norms, 0.5)
    )
    for total, g in zip(totals, own, strict=True):
        assert torch.equal(total, torch.zeros_like(total) if g is None else 0.5 * g)


@pytest.mark.parametrize(
    ("how", "limit", "expected"),
    [
        ("dense", 0, PerExampleGradients),
        ("ghost", 1 << 40, GhostGradients),
        ("auto", 4 * 15 * 8, GhostGradients),  # 15 parameters, 8 examples, 4 bytes
        ("auto", 4 * 15 * 8 + 1, PerExampleGradients),
    ],
)
def test_auto_is_dense_while_the_gradients_of_a_microbatch_are_few(
    monkeypatch, how, limit, expected
):
    monkeypatch.setattr(estimators, "DENSE_BYTES", limit)
    model = nn.Sequential(nn.Linear(7, 9).requires_grad_(False), nn.Linear(2, 5))
    found = per_example_gradients(model, token_loss, how, microbatch_size=8)
    assert type(found) is expected


FROZEN_HALF = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 5).bfloat16().requires_grad_(False))


@pytest.mark.parametrize(
    ("model", "autocast", "tf32", "why"),
    [
        (nn.Linear(2, 5).bfloat16(), False, False, "weight is bfloat16"),
        (FROZEN_HALF, False, False, r"1\.weight is bfloat16"),  # gradients come through it
        (nn.Linear(2, 5), True, False, "autocast"),
        (nn.Linear(2, 5), False, True, "TF32"),
    ],
)
def test_what_is_coarser_than_the_clips_margin_is_refused_and_avoided(
    monkeypatch, model, autocast, tf32, why
):
    monkeypatch.setattr(estimators, "DENSE_BYTES", 0)
    gradients = GhostGradients(nn.Linear(2, 5), token_loss)
    monkeypatch.setattr(estimators, "rounds_products", lambda: tf32)
    with pytest.raises(ValueError, match=f"{why}.*per_example_gradients: dense"):
        per_example_gradients(model, token_loss, "ghost", 8, autocast)
    found = per_example_gradients(model, token_loss, "auto", 8, autocast)
    assert type(found) is PerExampleGradients
    if tf32:  # allowed after the start
        with pytest.raises(ValueError, match=r"TF32.*per_example_gradients: dense"):
            clipped_sum(gradients, {"x": floats(3, 2)}, 1.0)


def test_settings_and_layers_that_ghost_cannot_serve_are_refused():
    with pytest.raises(ValueError, match="per_example_gradients='fast' is not one of auto, dense"):
        per_example_gradients(nn.Linear(2, 5), token_loss, "fast", 8)

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return model(inputs["x"]).float().sum(dim=1)

    with pytest.raises(ValueError, match="Linear computes in half precision.*: dense, or float32"):
        clipped_sum(GhostGradients(nn.Linear(2, 5), objective), {"x": floats(3, 2)}, 1.0)


def test_a_layer_that_computes_in_float64_is_refused_in_words():
    model = nn.Sequential(nn.Linear(64, 50))
    layer = model[0]
    layer.forward = lambda x: nn.functional.linear(x.double(), layer.weight.double())

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        return model(inputs["x"]).float().sum(dim=(1, 2))

    with pytest.raises(ValueError, match="a Linear computes in float64.*per_example_gradients: de"):
        clipped_sum(GhostGradients(model, objective), {"x": floats(3, 2, 64)}, 1.0)
    layer.bias.requires_grad_(False)
    assert norm(clipped_sum(PerExampleGradients(model, objective), {"x": floats(3, 2, 64)}, 1.0))


def test_layers_that_opacus_has_gradients_but_no_norms_for():
    """Convolutions and group norms hold their own per-example gradients for a moment."""
    model = nn.Sequential(nn.Conv1d(6, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(24, 5))

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        return model(inputs["x"]).exp().sum(dim=1)

    check_against_naive_loop(model, objective, {"x": floats(5, 6, 5)}, GhostGradients)


def test_a_run_is_the_same_with_ghost_clipping(tmp_path):
    """Same batches, same noise; the clipped sums differ by float32 rounding only."""
    found = {}
    for how, kind in (("dense", PerExampleGradients), ("ghost", GhostGradients)):
        trainer = build(
            tmp_path / how, method="dp-sgd", clipping="adaptive", clip=0.5, max_steps=4,
            learning_rate=0.1, performance={"per_example_gradients": how},
        )  # fmt: skip
        start = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        assert type(trainer.step.gradients) is kind
        found[how] = [p.detach() - s for p, s in zip(trainer.model.parameters(), start)]
    assert norm(found["dense"]) > 0.01
    difference = [a - b for a, b in zip(found["ghost"], found["dense"], strict=True)]
    assert norm(difference) < 1e-4 * norm(found["dense"])


class TimeMajor(nn.Module):
    """`[T, B, h]` inside, as nn.Transformer's default; 6 tokens divide by every microbatch below."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.layer(x.unsqueeze(-1).transpose(0, 1)).tanh().sum(dim=(0, 2))


@pytest.mark.parametrize(("how", "rows"), [("ghost", 1), ("ghost", 2), ("dense", 12)])
def test_a_run_tries_the_attribution_before_its_first_step(tmp_path, how, rows):
    """Whatever the number of rows that the data set has; nothing reaches the ledger."""
    x = floats(rows, 6)
    data = [{"x": row, "labels": torch.zeros(())} for row in x]
    config = DPZeroConfig(
        output_dir=str(tmp_path), method="dp-sgd", noise_multiplier=1.0,
        performance={"per_example_gradients": how},
        clip=0.1, learning_rate=0.1, max_steps=2, sampling="full_batch", expected_batch_size=rows,
        per_device_train_batch_size=2, use_cpu=True, remove_unused_columns=False, report_to=[],
    )  # fmt: skip
    trainer = DPZeroTrainer(
        TimeMajor(), config, train_dataset=data,
        compute_per_example_loss=lambda model, inputs: model(inputs["x"]).square(),
    )  # fmt: skip
    with pytest.raises(
        ValueError,
        match=r"layer \(Linear\)(: what it sees does not grow| sees rows that cannot be attributed)",
    ):
        trainer.train()
    assert not list(tmp_path.rglob("*.ledger"))
