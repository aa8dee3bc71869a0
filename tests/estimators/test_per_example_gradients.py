"""Per-example gradients, kept or ghostly, against a loop that takes one example at a time."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("opacus")

from hf_dpzero.estimators import ghost_clipping, per_example_gradients
from hf_dpzero.estimators.per_example_gradients import GhostGradients, PerExampleGradients
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import PaddedMicrobatch
from hf_dpzero.privacy.mechanisms.gradient import CLIP_MARGIN, clip_factors

Batch = Mapping[str, Tensor]
Gradients = Callable[..., Any]


@pytest.fixture(params=[PerExampleGradients, GhostGradients], ids=["dense", "ghost"])
def kind(request: Any) -> Gradients:
    """Both ways of taking per-example gradients: same sums, same norms, same refusals."""
    return request.param


def batch_of(rows: int = 4, language: bool = False) -> dict[str, Tensor]:
    """Rows of 7 tokens, the second one padded after 4; classes, or tokens to predict."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 64, (rows, 7), generator=generator)
    mask = torch.ones_like(ids)
    ids[1:2, 4:], mask[1:2, 4:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100) if language else torch.arange(rows) % 2
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


MODELS = {
    "bert": lambda get: get("tiny_bert")(),
    "roberta": lambda get: get("tiny_roberta")(),
    "opt-lm": lambda get: get("tiny_opt")(),
    "bert-mlm": lambda get: get("tiny_masked_lm")(),
}


@pytest.fixture(params=MODELS)
def case(request: Any) -> tuple[nn.Module, Callable[..., Tensor], dict[str, Tensor]]:
    """(model, objective, batch) of every kind that the bench and the trainer meet."""
    model = MODELS[request.param](request.getfixturevalue)
    batch = batch_of(language="lm" in request.param)
    return model, select_objective(model), batch


def gradients_one_by_one(model: nn.Module, objective: Any, batch: Batch) -> list[list[Tensor]]:
    """grad f(theta; xi_i) for each i by plain autograd, zeros where the loss does not depend."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    for i in range(len(next(iter(batch.values())))):
        loss = objective(model, {name: value[i : i + 1] for name, value in batch.items()}).sum()
        own = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append(
            [torch.zeros_like(p) if g is None else g for g, p in zip(own, parameters, strict=True)]
        )
    return found


def clipped_sum(gradients: Any, batch: Batch, clip: float, size: int | None = None) -> list[Tensor]:
    """sum_i min(1, clip / ||g_i||) g_i, differentiated `size` examples at a time."""
    count = len(next(iter(batch.values())))
    starts = range(0, count, size or max(count, 1))
    parts = [{n: v[i : i + (size or count)] for n, v in batch.items()} for i in starts]
    return gradients.weighted_sum(parts, functools.partial(clip_factors, clip=clip))[0]


def norm(gradient: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradient))


def clipped_one_by_one(examples: list[list[Tensor]], clip: float) -> list[Tensor]:
    factors = [min(1.0, clip * CLIP_MARGIN / norm(g)) for g in examples]
    return [
        sum(f * g for f, g in zip(factors, column, strict=True))
        for column in zip(*examples, strict=True)
    ]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-6)


def test_the_clipped_sum_is_that_of_single_examples(case, kind):
    """In microbatches; one example alone moves the sum by the clip; the model's layers are tried."""
    model, objective, batch = case
    gradients = kind(model, objective)
    gradients.check_attribution({name: v[:3] for name, v in batch.items()})
    examples = gradients_one_by_one(model, objective, batch)
    norms = sorted(norm(g) for g in examples)
    clip = (norms[0] + norms[-1]) / 2  # some are clipped, some are not
    assert norms[0] < clip < norms[-1]
    found = clipped_sum(gradients, batch, clip, size=3)
    assert all(part.dtype == torch.float64 for part in found)
    assert_close(found, clipped_one_by_one(examples, clip))
    one = {name: value[:1] for name, value in batch.items()}
    assert norm(clipped_sum(gradients, one, clip=1e-3)) == pytest.approx(1e-3, rel=1e-4)


def test_an_empty_batch_gives_zeros(tiny_bert, kind):
    model = tiny_bert()
    empty = {name: value[:0] for name, value in batch_of().items()}
    found = clipped_sum(kind(model, select_objective(model)), empty, 1.0)
    assert all(not part.any() for part in found)
    assert [part.shape for part in found] == [p.shape for p in model.parameters()]


@pytest.mark.parametrize(("value", "bad"), [(math.inf, {2}), (math.nan, {0, 1, 2, 3})])
def test_an_example_without_a_finite_gradient_counts_as_zero(tiny_bert, kind, value, bad):
    """A loss that is not finite, and one that is though its activations are not."""
    model, batch = tiny_bert(), batch_of()
    plain = select_objective(model)
    rows = batch["input_ids"][sorted(bad)]

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        same = (inputs["input_ids"].unsqueeze(1) == rows).all(dim=2).any(dim=1)
        return plain(model, inputs) * torch.where(same, value, 1.0)

    examples = gradients_one_by_one(model, plain, batch)
    expected = [g for i, g in enumerate(examples) if i not in bad]
    totals, norms = kind(model, objective).weighted_sum([batch], lambda norms: 0.5 / norms)
    assert [i for i, n in enumerate(norms.tolist()) if not math.isfinite(n)] == sorted(bad)
    if not expected:
        assert not any(part.any() for part in totals)
    else:
        weighted = [[g * (0.5 / norm(e)) for g in e] for e in expected]
        assert_close(totals, [sum(column) for column in zip(*weighted, strict=True)])


def test_frozen_parameters_are_left_out(tiny_bert, kind):
    model = tiny_bert()
    for name, p in model.named_parameters():
        p.requires_grad_("classifier" in name)
    gradients = kind(model, select_objective(model))
    assert gradients.names == ["classifier.weight", "classifier.bias"]
    examples = gradients_one_by_one(model, select_objective(model), batch_of())
    expected = clipped_one_by_one(examples, 0.1)
    assert_close(clipped_sum(gradients, batch_of(), 0.1), expected)


@pytest.mark.parametrize("broken", [False, True])
def test_the_model_is_left_as_it_was(tiny_opt, kind, broken):
    model = tiny_opt().train()
    before = copy.deepcopy(model)
    plain = select_objective(model)

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        losses = plain(model, inputs)
        if broken:
            raise RuntimeError("no loss today")
        return losses

    gradients = kind(model, objective)
    if broken:
        with pytest.raises(RuntimeError, match="no loss today"):
            clipped_sum(gradients, batch_of(language=True), 1.0)
    else:
        clipped_sum(gradients, batch_of(language=True), 1.0)
    for now, then in zip(model.modules(), before.modules(), strict=True):
        assert now.__dict__.keys() == then.__dict__.keys()
        assert now.training and not now._forward_hooks and not now._backward_hooks
    for now, then in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, then) and now.grad is None
        assert vars(now) == vars(then)


TOKENS, WIDTH, OUT = 6, 20, 30  # OUT * WIDTH > 2 TOKENS^2: where norms are taken without gradients
GENERATOR = torch.Generator().manual_seed(8)
LAYER_BATCH = {
    "row": torch.randn(5, WIDTH, generator=GENERATOR),
    "tokens": torch.randn(5, TOKENS, WIDTH, generator=GENERATOR),
    "ids": torch.randint(0, 4, (5, TOKENS), generator=GENERATOR),  # every row repeats some
}


def flattened(layer: nn.Module, x: Batch) -> Tensor:
    """OPT's way: one row for each token of all examples."""
    return layer(x["tokens"].flatten(0, 1)).unflatten(0, x["tokens"].shape[:2])


def of_positions(layer: nn.Module, x: Batch) -> Tensor:
    """BERT's way: positions looked up once for all examples."""
    return layer(torch.arange(TOKENS)[None]) * x["tokens"]


def lora_linear() -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, target_modules=["0"])
    return inject_adapter_in_model(config, nn.Sequential(nn.Linear(WIDTH, OUT)))[0]


class Repeated(nn.Module):
    """One layer, several times in a forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Tied(nn.Module):
    """A language model's way: the weight that looks tokens up predicts them."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.lookup = nn.Embedding(OUT, WIDTH, padding_idx=padding_idx)
        self.predict = nn.Linear(WIDTH, OUT, bias=False)
        self.predict.weight = self.lookup.weight
        nn.init.normal_(self.lookup.weight, std=0.3)

    def forward(self, x: Batch) -> Tensor:
        return self.predict(self.lookup(x["ids"]).tanh() + x["tokens"])


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "Linear [B, h]": (lambda: nn.Linear(WIDTH, OUT), lambda m, x: m(x["row"])),
    "Linear [B, T, h]": (lambda: nn.Linear(WIDTH, OUT), lambda m, x: m(x["tokens"])),
    "Linear [B * T, h]": (lambda: nn.Linear(WIDTH, OUT), flattened),
    "Linear, small": (lambda: nn.Linear(WIDTH, 2), lambda m, x: m(x["tokens"])),
    "Linear, bias only": (
        lambda: frozen_weight(nn.Linear(WIDTH, OUT)),
        lambda m, x: m(x["tokens"]),
    ),
    "Embedding": (lambda: nn.Embedding(4, WIDTH), lambda m, x: m(x["ids"])),
    "Embedding, padded": (lambda: nn.Embedding(4, WIDTH, 1), lambda m, x: m(x["ids"])),
    "Embedding of positions": (lambda: nn.Embedding(TOKENS + 2, WIDTH), of_positions),
    "LayerNorm [B, T, h]": (lambda: nn.LayerNorm(WIDTH), lambda m, x: m(x["tokens"]).exp()),
    "LoRA": (lora_linear, lambda m, x: m(x["tokens"])),
    "Linear, twice": (
        lambda: Repeated(nn.Linear(WIDTH, OUT)),
        lambda m, x: m.layer(x["tokens"]).tanh() - m.layer(x["tokens"] ** 2),
    ),
    "Embedding, twice": (
        lambda: Repeated(nn.Embedding(4, WIDTH, 1)),
        lambda m, x: m.layer(x["ids"]) * (m.layer(x["ids"].flip(1)) + 1.0),
    ),
    "LayerNorm, twice": (
        lambda: Repeated(nn.LayerNorm(WIDTH)),
        lambda m, x: m.layer(m.layer(x["tokens"]).exp()),
    ),
    "tied": (Tied, lambda m, x: m(x)),
    "tied and padded": (lambda: Tied(padding_idx=2), lambda m, x: m(x)),
}


def frozen_weight(layer: nn.Linear) -> nn.Linear:
    layer.weight.requires_grad_(False)
    return layer


@pytest.fixture(params=LAYERS)
def layer_case(request: Any) -> tuple[nn.Module, Callable[..., Tensor], dict[str, Tensor]]:
    """(layer, objective, batch) of one layer type: the table above names them."""
    build, run = LAYERS[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        layer = build()

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        return (run(model, inputs) + 0.3).square().flatten(1).mean(dim=1)

    return layer, objective, LAYER_BATCH


def in_double(model: nn.Module, objective: Any, batch: Batch) -> list[list[Tensor]]:
    """The naive loop in float64: the truth to float32."""
    wide = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
    return gradients_one_by_one(copy.deepcopy(model).double(), objective, wide)


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    return norm([f - e for f, e in zip(found, expected, strict=True)]) / norm(expected)


def test_a_layers_norms_and_weighted_sum_are_those_of_a_naive_loop(layer_case, kind):
    layer, objective, batch = layer_case
    check_against_naive_loop(layer, objective, batch, kind)
    kind(layer, objective).check_attribution({name: v[:3] for name, v in batch.items()})


def check_against_naive_loop(model: nn.Module, objective: Any, batch: Batch, kind: Any) -> None:
    """Norms and the sum of w_i g_i, w_i = 1 / (||g_i|| + 0.1), to 1e-5, from two microbatches."""
    parts = [{n: v[:3] for n, v in batch.items()}, {n: v[3:] for n, v in batch.items()}]
    totals, norms = kind(model, objective).weighted_sum(parts, lambda norms: 1 / (norms + 0.1))
    examples = in_double(model, objective, batch)
    weights = [1 / (norm(g) + 0.1) for g in examples]
    expected = [
        sum(w * g for w, g in zip(weights, column, strict=True))
        for column in zip(*examples, strict=True)
    ]
    assert norms.tolist() == pytest.approx([norm(g) for g in examples], rel=1e-5)
    assert relative_error(totals, expected) < 1e-5
    assert (norms.dtype, totals[0].dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("read", [0, 1])
def test_outputs_that_the_loss_does_not_read(kind, read):
    """Each gradient meets the inputs of its own call."""

    def objective(model: Any, inputs: Batch) -> Tensor:
        calls = model.layer(inputs["row"]), model.layer(inputs["row"] ** 2)
        return calls[read].square().sum(dim=1)

    check_against_naive_loop(Repeated(nn.Linear(WIDTH, OUT)), objective, LAYER_BATCH, kind)


def test_an_output_that_is_changed_in_place(kind):
    """Refused where it is a view, as that of `[B, T, h]` is: autograd shows no hook its gradient."""

    def objective(model: Any, inputs: Batch) -> Tensor:
        out = model.layer(inputs[given])
        out[:, 4:] = 0.0
        return (out.mul_(2.0) + 0.3).square().flatten(1).sum(dim=1)

    model, given = Repeated(nn.Linear(WIDTH, OUT)), "row"
    check_against_naive_loop(model, objective, LAYER_BATCH, kind)
    given = "tokens"
    with pytest.raises(ValueError, match=r"layer\.weight .*changed in place.*Freeze it, or use"):
        clipped_sum(kind(model, objective), LAYER_BATCH, 1.0)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_are_no_examples_weigh_nothing(kind, rows):
    """Of a pass that is filled up, whatever stands there: one of nothing but blanks included."""
    model = Repeated(nn.Linear(WIDTH, OUT))

    def objective(model: Any, inputs: Batch) -> Tensor:
        return model.layer(inputs["row"]).square().sum(dim=1)

    def total(count: int, row: Tensor) -> tuple[list[Tensor], Tensor]:
        part = PaddedMicrobatch({"row": row}, count)
        return kind(model, objective).weighted_sum([part], lambda norms: 1 / norms)

    row = LAYER_BATCH["row"][:rows]
    totals, norms = total(0, row)
    assert not any(t.any() for t in totals) and norms.numel() == 0
    for other in (row[-1] + 1.0, row[-1] * math.inf):
        blank = torch.cat([row[:1], other.expand(rows, -1)])
        totals, norms = total(1, blank)
        assert norms.numel() == 1
        assert norm(totals) == pytest.approx(1.0, rel=1e-5)


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
        ("outside", "second.weight does not have one gradient for each example"),
        ("both", "second.weight: the per-example gradients do not add up"),
        (
            "for_all",
            r"second \(Linear\) sees rows that cannot be attributed.* Freeze it, or use dpzero",
        ),
    ],
)
def test_weights_used_in_other_ways_are_refused(kind, how, message):
    with pytest.raises(ValueError, match=message) as refused:
        clipped_sum(kind(Toy(how), toy_objective), TOY_BATCH, 1.0)
    assert not any(c.isdigit() for c in str(refused.value))  # logs show no number of the data
    clipped_sum(kind(Toy("plain"), toy_objective), TOY_BATCH, 1.0)


def test_equal_examples_add_up_their_rounding_unrefused(kind):
    equal = {"x": torch.linspace(1, 3, 3).expand(4096, 3)}
    clipped_sum(kind(Toy("plain"), toy_objective), equal, 1.0)
    with pytest.raises(ValueError, match="do not add up"):
        clipped_sum(kind(Toy("both"), toy_objective), equal, 1.0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


def doubling() -> nn.Linear:
    """[B, h] in, [2 B, h] out: both are multiples of B, and no token belongs to another."""
    layer = nn.Linear(3, 3)
    plain = layer.forward
    layer.forward = lambda x: plain(x).repeat_interleave(2, dim=0)
    return layer


def halves(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["x"]).unflatten(0, (-1, 2)).sum(dim=(1, 2))


def mean(model: nn.Module, inputs: Batch) -> Tensor:
    return toy_objective(model, inputs).mean()


@pytest.mark.parametrize(
    ("model", "objective", "x", "message"),
    [
        (ScaledEmbedding(5, 3), toy_objective, torch.arange(4), "does more than look up rows"),
        (Toy("plain"), mean, TOY_BATCH["x"], "never a mean over the batch"),
        (nn.Sequential(doubling()), halves, TOY_BATCH["x"], r"rows that cannot be attributed"),
        (
            Toy("plain").requires_grad_(False),
            toy_objective,
            TOY_BATCH["x"],
            "no parameter is trainable",
        ),
    ],
)
def test_what_is_of_no_single_example_is_refused(kind, model, objective, x, message):
    with pytest.raises(ValueError, match=message):
        clipped_sum(kind(model, objective), {"x": x}, 1.0)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Scale(), r"0 \(Scale\) owns trainable parameters"),
        (nn.BatchNorm1d(3), r"0 \(BatchNorm1d\)"),
        (nn.Embedding(5, 3, max_norm=1.0), r"0 \(Embedding\)"),
    ],
)
def test_layers_without_per_example_gradients_are_refused_by_name(kind, layer, message):
    layer = copy.deepcopy(layer)
    with pytest.raises(ValueError, match=message):
        kind(nn.Sequential(layer), toy_objective)
    for p in layer.parameters():
        p.requires_grad_(False)
    kind(nn.Sequential(layer, nn.Linear(3, 3)), toy_objective)  # frozen is fine


def test_gpt2s_own_linear_layers_are_refused_by_name(tiny_gpt2, kind):
    """transformers' Conv1D is no nn.Linear; a head on a frozen GPT-2 is fine."""
    model = tiny_gpt2()
    with pytest.raises(
        ValueError, match=r"h\.0\.attn\.c_attn \(Conv1D\).*freeze them, or use dpzero"
    ):
        kind(model, select_objective(model))
    for name, p in model.named_parameters():
        p.requires_grad_("ln_f" in name)
    gradients = kind(model, select_objective(model))
    expected = gradients_one_by_one(model, select_objective(model), batch_of(language=True))
    found = clipped_sum(gradients, batch_of(language=True), 1e6)
    assert_close(found, [sum(column) for column in zip(*expected, strict=True)])


def test_norms_of_long_rows_are_not_short():
    """torch's own norm on a CPU loses squares that are small against their running sum: 0.3%."""
    model = nn.Linear(1 << 22, 1, bias=False)
    batch = {"x": torch.ones(2, 1 << 22)}

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        return model(inputs["x"]).flatten()

    _, norms = PerExampleGradients(model, objective).weighted_sum([batch], torch.ones_like)
    assert norms.tolist() == [2.0**11] * 2


def test_half_precision_gradients_are_added_up_in_float64():
    """In bfloat16, 1 + 2^-9 is 1: an example would vanish from the sum or move it by more."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    values = torch.tensor([[1.0], *[[2.0**-9]] * 64], dtype=torch.bfloat16)

    def objective(model: nn.Module, inputs: Batch) -> Tensor:
        return model(inputs["x"]).float().sum(dim=1)

    totals, norms = PerExampleGradients(model, objective).weighted_sum(
        [{"x": values}], lambda norms: torch.full_like(norms, 1 + 2.0**-12)
    )
    assert totals[0].item() == (1 + 2.0**-12) * (1 + 64 * 2.0**-9)
    assert norms.tolist() == values.flatten().tolist()


@pytest.mark.parametrize("size", [3, ghost_clipping.PIECE + 1])
def test_sums_are_those_of_float64(size):
    """In float32, 2^24 + 1 is 2^24; in TF32, which never touches float64, 1 + 2^-12 is 1."""
    weights = torch.tensor([1 + 2.0**-12, 1.0, 1.0])
    gradients = torch.tensor([[1.0], [2.0**24], [1.0]]).expand(3, size)
    total = torch.ones(size, dtype=torch.float64)
    ghost_clipping.add_rows_(total, weights.double(), gradients, slice(None))
    assert set(total.tolist()) == {2.0**24 + 3 + 2.0**-12}
    ghost_clipping.add_rows_(total, weights.double(), gradients, torch.tensor([True, False, False]))
    assert set(total.tolist()) == {2.0**24 + 4 + 2.0**-11}


def test_products_in_tf32_are_noticed():
    assert not per_example_gradients.rounds_products()
    torch.set_float32_matmul_precision("high")
    try:
        assert per_example_gradients.rounds_products()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not per_example_gradients.rounds_products()


class Ordered(nn.Module):
    """A layer over sequences, fed in one order or another; positions looked up in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 3)
        self.positions = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 6, 4]` -> [B]."""
        if self.how == "positions [T]":
            x = x + self.positions(torch.arange(6))
        elif self.how == "positions [T, T]":
            x = x + self.positions((torch.arange(6)[:, None] - torch.arange(6)).abs()).mean(1)
        else:
            x = x + self.positions(torch.arange(6)[None])
        if self.how == "[T, B, h]":
            return self.layer(x.transpose(0, 1)).tanh().sum(dim=(0, 2))
        if self.how == "[T * B, h]":
            rows = self.layer(x.transpose(0, 1).flatten(0, 1)).tanh()
            return rows.unflatten(0, (6, -1)).sum(dim=(0, 2))
        if self.how == "mixed":
            x = x + x.mean(dim=0, keepdim=True)
        if self.how == "[B * T, h]":
            return self.layer(x.flatten(0, 1)).tanh().unflatten(0, (-1, 6)).sum(dim=(1, 2))
        return self.layer(x).tanh().sum(dim=(1, 2))


def ordered_objective(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["x"])


def ordered(how: str) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return Ordered(how), {"x": torch.randn(3, 6, 4)}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("[T, B, h]", r"layer \(Linear\): what it sees does not grow with the examples"),
        ("[T * B, h]", "(layer|positions).*: an example's gradient in a batch is not its gradient"),
        ("mixed", "(layer|positions).*: an example's gradient in a batch is not its gradient"),
        ("positions [T]", r"positions \(Embedding\): what it sees does not grow"),
        ("positions [T, T]", r"positions \(Embedding\): what it sees does not grow"),
    ],
)
def test_what_is_in_another_order_is_refused_before_the_first_step(kind, how, message):
    """Six positions divide by 3 and by 2 examples: no single shape gives them away."""
    model, batch = ordered(how)
    with pytest.raises(ValueError, match=message + ".* Freeze it, or use dpzero"):
        kind(model, ordered_objective).check_attribution(batch)


@pytest.mark.parametrize("how", ["plain", "[B * T, h]"])
def test_what_is_in_order_passes_and_leaves_nothing(kind, how):
    model, batch = ordered(how)
    gradients = kind(model, ordered_objective)
    gradients.check_attribution(batch)
    gradients.check_attribution({"x": batch["x"][:1].repeat(3, 1, 1)})  # a data set of one row
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in model.parameters())
    with pytest.raises(ValueError, match="at least 2 examples"):
        gradients.check_attribution({"x": batch["x"][:1]})
