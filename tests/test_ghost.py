"""Ghost clipping: norms without gradients, where they are taken, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("opacus")

from opacus.grad_sample import GradSampleHooksFastGradientClipping
from test_first_order import batch_of, check_against_naive_loop, in_double, norm
from test_trainer import build

from hf_dpzero import ghost
from hf_dpzero.first_order import PerExampleGradients
from hf_dpzero.ghost import GhostGradients, Products, per_example_gradients
from hf_dpzero.objectives import select_objective

Batch = Mapping[str, Tensor]


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- norms of sums of products


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
def test_the_norm_of_all_uses_of_a_weight_is_that_of_their_summed_gradient(uses: list[Products]):
    """Written out here with one-hot rows in float64; cross terms between uses included."""
    weight = nn.Parameter(torch.zeros(8, 90))
    total = torch.zeros(3, 8, 90, dtype=torch.float64)
    for use in uses:
        left = use.left
        rows = left if left.is_floating_point() else nn.functional.one_hot(left, 8)
        total += torch.einsum("btn,btm->bnm", rows.double(), use.right.double())
    squares, scale = ghost._squared_norms(weight, uses)
    torch.testing.assert_close(squares, total.square().sum((1, 2)), rtol=1e-6, atol=0)
    assert bool((scale > 0).all())  # no gradient was taken: its scale would be 0


@pytest.mark.parametrize(("tokens", "without"), [(18, True), (19, False)])
def test_a_weight_smaller_than_the_tables_takes_its_gradient(tokens: int, without: bool):
    """720 numbers against 2 T^2: 648 of 18 tokens, 722 of 19 (Bu et al. 2022)."""
    weight = nn.Parameter(torch.zeros(8, 90))
    squares, scale = ghost._squared_norms(weight, [multiplied(tokens, 0)])
    assert bool((scale > 0).all()) == without
    dense = multiplied(tokens, 0).dense(weight)
    torch.testing.assert_close(squares, dense.double().square().sum((1, 2)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("tokens", [64, 500])
def test_norms_are_as_good_as_the_clips_margin_asks(tokens: int):
    """A relative 2^-17, twice that squared; Opacus' own rule agrees to 1e-4."""
    weight = nn.Parameter(torch.zeros(768, 768))
    use = Products(floats(2, tokens, 768), floats(2, tokens, 768, seed=1))
    truth = (use.left.double().mT @ use.right.double()).square().sum((1, 2))
    squares, _ = ghost._squared_norms(weight, [use])
    torch.testing.assert_close(squares, truth, rtol=2.0**-18, atol=0)

    layer = nn.Linear(768, 768, bias=False)
    rule = GradSampleHooksFastGradientClipping.NORM_SAMPLERS[nn.Linear]
    opacus = rule(layer, [use.right], use.left)[layer.weight]
    torch.testing.assert_close(squares.sqrt(), opacus.double(), rtol=1e-4, atol=0)


# ---------------------------------------------------------------- what it costs


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for t in output if isinstance(output, (tuple, list)) else [output]:
            if (
                isinstance(t, Tensor) and t.untyped_storage().nbytes() > 0
            ):  # expanded ones are small
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return output


def wide(x: Batch) -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 50)), dict(x)


def test_no_per_example_gradient_of_a_large_weight_is_ever_held():
    """The largest tensor is a weight's gradient; dense ones are 6 times as large."""
    largest = {}
    batch = {"ids": torch.randint(0, 40, (6, 4), generator=torch.Generator().manual_seed(2))}
    for kind in (PerExampleGradients, GhostGradients):
        model, _ = wide(batch)
        with Largest() as seen:
            kind(model, token_loss).clipped_sum(batch, 1.0)
        largest[kind] = seen.numel
    assert largest[GhostGradients] == 50 * 64
    assert largest[PerExampleGradients] == 6 * 50 * 64


def token_loss(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["ids"]).square().mean(dim=(1, 2))


@pytest.mark.parametrize(("bad", "passes"), [((), 1), ((1,), 2), ((0, 1, 2, 3), 1)])
def test_one_forward_pass_or_a_second_one_without_the_broken_examples(
    tiny_bert: Callable[..., Any], bad: tuple[int, ...], passes: int
):
    model, calls = tiny_bert(), []
    plain = select_objective(model)

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        calls.append(len(inputs["labels"]))
        return plain(model, inputs) * torch.where(inputs["broken"], torch.nan, 1.0)

    broken = torch.tensor([i in bad for i in range(4)])
    totals, _ = GhostGradients(model, objective).weighted_sum(
        [{**batch_of(), "broken": broken}], torch.ones_like
    )
    assert calls == [4, 4 - len(bad)][:passes]
    assert all(bool(t.isfinite().all()) for t in totals)


# ---------------------------------------------------------------- cancellation


@pytest.mark.parametrize("left_over", [1e-2, 1e-4, 1e-6])
def test_a_gradient_whose_tokens_cancel_is_not_lost_in_rounding(left_over: float):
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


# ---------------------------------------------------------------- which one a run takes


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
    monkeypatch: pytest.MonkeyPatch, how: str, limit: int, expected: type
):
    monkeypatch.setattr(ghost, "DENSE_BYTES", limit)
    model = nn.Sequential(nn.Linear(7, 9).requires_grad_(False), nn.Linear(2, 5))
    found = per_example_gradients(model, token_loss, how, microbatch_size=8)
    assert type(found) is expected


def test_the_limit_is_256_mib():
    assert ghost.DENSE_BYTES == 256 * 2**20


def test_auto_is_dense_in_half_precision(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ghost, "DENSE_BYTES", 0)
    half = nn.Linear(2, 5).bfloat16()
    assert type(per_example_gradients(half, token_loss, "auto", 8)) is PerExampleGradients
    single = nn.Linear(2, 5)
    found = per_example_gradients(single, token_loss, "auto", 8, autocast=True)
    assert type(found) is PerExampleGradients


def test_settings_and_precisions_that_ghost_cannot_serve_are_refused():
    with pytest.raises(ValueError, match="per_example_gradients='fast' is not one of auto, dense"):
        per_example_gradients(nn.Linear(2, 5), token_loss, "fast", 8)
    with pytest.raises(ValueError, match=r"weight is bfloat16.*per_example_gradients: dense"):
        per_example_gradients(nn.Linear(2, 5).bfloat16(), token_loss, "ghost", 8)

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return model(inputs["x"]).float().sum(dim=1)

    gradients = GhostGradients(nn.Linear(2, 5), objective)
    with pytest.raises(
        ValueError, match="a Linear computes in half precision.*: dense, or float32"
    ):
        gradients.clipped_sum({"x": floats(3, 2)}, 1.0)


def test_a_frozen_model_in_half_precision_may_carry_float32_weights():
    """The usual LoRA: only what trains must be float32."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(6, 6).bfloat16().requires_grad_(False)
            self.trained = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.frozen(x.bfloat16())
            return x + self.trained(x.float())

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        return model(inputs["x"]).square().sum(dim=1)

    model, batch = Adapted(), {"x": floats(4, 6)}
    expected = PerExampleGradients(model, objective).clipped_sum(batch, 0.5)
    for found, other in zip(GhostGradients(model, objective).clipped_sum(batch, 0.5), expected):
        torch.testing.assert_close(found, other)


@pytest.mark.parametrize("how", ["auto", "dense", "ghost"])
def test_unsupported_layers_are_refused_by_name_whichever_is_asked_for(tiny_gpt2: Any, how: str):
    model = tiny_gpt2()
    with pytest.raises(ValueError, match=r"h\.0\.attn\.c_attn \(Conv1D\)"):
        per_example_gradients(model, select_objective(model), how, 8)


# ---------------------------------------------------------------- layers without a norm rule


def test_layers_that_opacus_has_gradients_but_no_norms_for():
    """Convolutions and group norms hold their own per-example gradients for a moment."""
    model = nn.Sequential(nn.Conv1d(6, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(24, 5))

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        return model(inputs["x"]).exp().sum(dim=1)

    check_against_naive_loop(model, objective, {"x": floats(5, 6, 5)}, GhostGradients)


# ---------------------------------------------------------------- in the trainer


@pytest.mark.parametrize("clipping", ["fixed", "automatic", "adaptive"])
def test_a_run_is_the_same_with_ghost_clipping(tmp_path: Any, clipping: str):
    """Same batches, same noise; the clipped sums differ by float32 rounding only."""
    found = {}
    for how, kind in (("dense", PerExampleGradients), ("ghost", GhostGradients)):
        trainer = build(
            tmp_path / how, method="dp-sgd", clipping=clipping, clip=0.5, max_steps=4,
            learning_rate=0.1, per_example_gradients=how,
        )  # fmt: skip
        start = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        assert type(trainer.step.gradients) is kind
        found[how] = [p.detach() - s for p, s in zip(trainer.model.parameters(), start)]
    assert norm(found["dense"]) > 0.01
    difference = [a - b for a, b in zip(found["ghost"], found["dense"], strict=True)]
    assert norm(difference) < 1e-4 * norm(found["dense"])
