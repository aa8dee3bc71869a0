"""Every strategy gives the same bits; theta is never touched; what cannot work is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from estimator_bench import (
    SMOOTHING,
    VOCABULARY,
    Batch,
    Bench,
    bits,
    same,
    seeded,
    token_batch,
    us,
)
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpzero.estimators.choose_strategy import choose_strategy, inexactness
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.estimators.layerwise import ModuleVisits
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.parameter_space import ParameterSpace


def held_bytes(visits: ModuleVisits) -> int:
    """What the scratch memory takes now."""
    levels = visits.scratch._levels.values()
    return sum(level.buffer.numel() for of_device in levels for level in of_device)


class LayerwiseBench(Bench):
    def x(self, strategy: str, batches: list[Batch], count: int = 3) -> Tensor:
        x = self.estimator(strategy)(batches, us(count))
        self.space.settle_()
        return x

    def assert_alike(self, batches: list[Batch]) -> Tensor:
        """layerwise gives the bits of whole_model, which are not trivial; theta stays."""
        theta = bits(self.space.tensors)
        expected = self.x("whole_model", batches)
        assert float(expected.abs().mean()) > 0.01
        assert torch.equal(self.x("layerwise", batches), expected)
        assert same(self.space.tensors, theta)
        return expected


def microbatches(task: str) -> list[Batch]:
    """Several rows, one row, and padding on the left."""
    return [
        token_batch(4, 9, language=task == "lm"),
        token_batch(1, 7, seed=1, language=task == "lm"),
        token_batch(3, 8, seed=2, left=True, language=task == "lm"),
    ]


ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}


def transformer(name: str) -> tuple[nn.Module, str]:
    """(model, task); hidden size 32, so that rows of embeddings start where the engine likes it."""
    import transformers as hf

    ends = {"bos_token_id": 1, "eos_token_id": 2}
    opt = {"word_embed_proj_dim": 32, "ffn_dim": 48, **ends}
    gpt = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40, "vocab_size": VOCABULARY}
    configs: dict[str, tuple[str, str, Any]] = {
        "bert": ("BertForSequenceClassification", "cls", hf.BertConfig(**ENCODER)),
        "roberta-mlm": ("RobertaForMaskedLM", "lm", hf.RobertaConfig(**ENCODER)),
        "opt": ("OPTForCausalLM", "lm", hf.OPTConfig(**ENCODER, **opt)),
        "gpt2": ("GPT2LMHeadModel", "lm", hf.GPT2Config(**gpt, pad_token_id=0, **ends)),
    }
    kind, task, config = configs[name]
    return seeded(lambda: getattr(hf, kind)(config)), task


@pytest.fixture(params=[False, True], ids=["modules", "layers"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether whole layers are perturbed, in one launch, as on a GPU."""
    monkeypatch.setattr(dispatch, "together_on", lambda device: request.param)
    return request.param


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("bert", "roberta-mlm", "opt", "gpt2")),
        ("bert", torch.bfloat16),
        ("opt", torch.float16),
    ],
)
def test_layerwise_gives_the_bits_of_whole_model(name, dtype, layers):
    model, task = transformer(name)
    bench = LayerwiseBench(model.to(dtype))
    bench.assert_alike(microbatches(task))
    owners = ModuleVisits(bench.model, bench.space).owners
    stack = next(m for m in bench.model.modules() if isinstance(m, nn.ModuleList))
    assert layers == (stack[0] in [owner.module for owner in owners])


class Pairs(nn.Module):
    """Its layers are lists, which have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for one, other in self.layers:
            x = x + torch.tanh(other(torch.tanh(one(x))))
        return x


@torch.no_grad()
def test_layers_that_are_containers(layers):
    model, x = seeded(Pairs), torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    space = ParameterSpace.from_model(model)
    position = ((us(1)[0], 1e-3),)
    space.move_to_(position)
    expected = model(x)
    space.settle_()
    with ModuleVisits(model, space).installed() as visits:
        visits.position = position
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("distribution", ["gaussian", "sphere"])
def test_other_directions(distribution):
    model, task = transformer("bert")
    LayerwiseBench(model, distribution=distribution).assert_alike(microbatches(task))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora(dtype, layers):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(transformer("bert")[0], config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and then lora_A would not matter
            parameter.data.normal_(std=0.1, generator=generator)
    LayerwiseBench(model.to(dtype)).assert_alike(microbatches("cls"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_the_same_way(dtype, layers):
    """Three updates, each from where the strategy leaves the parameters; also deferred ones."""
    ends = []
    for strategy in ("whole_model", "layerwise"):
        model, task = transformer("roberta-mlm")
        bench = LayerwiseBench(model.to(dtype))
        start, estimate = bits(bench.space.tensors), bench.estimator(strategy)
        for step in range(3):
            x = estimate(microbatches(task), us(2, step))
            coefficients = (-1e-3 * x.clamp(-1, 1).sum(dim=0)).tolist()
            bench.space.step_(us(2, step), coefficients, defer=step == 1)
        ends.append(bits(bench.space.tensors))
        assert not same(ends[-1], start)
    assert same(*ends)


def test_autocast_keeps_no_stale_casts():
    """The low-precision copy of a parameter that autocast makes is of one sign only."""
    model, task = transformer("roberta-mlm")
    objective = select_objective(model)

    def under_autocast(module: nn.Module, inputs: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return objective(module, inputs)

    bench = LayerwiseBench(model, under_autocast)
    found = bench.assert_alike(microbatches(task))
    plain = LayerwiseBench(transformer("roberta-mlm")[0])
    assert not torch.equal(found, plain.x("whole_model", microbatches(task)))


class Layers(nn.Module):
    """Three linear layers of which the second is the largest, 48 x 128 + 128."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 48), nn.Linear(48, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def squares(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["x"]).float().square().flatten(1).sum(dim=1)


def vectors(rows: int = 4, width: int = 32, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, width, generator=generator).to(dtype)}


def test_theta_stays_in_its_own_storage_and_settled():
    bench = LayerwiseBench(seeded(Layers), squares)
    theta = bits(bench.space.tensors)
    homes = [t.data_ptr() for t in bench.space.tensors]
    versions = [t._version for t in bench.space.tensors]
    bench.estimator("layerwise")([vectors()], us(2))
    assert bench.space.settled
    assert [t.data_ptr() for t in bench.space.tensors] == homes
    assert [t._version for t in bench.space.tensors] == versions
    assert same(bits(bench.space.tensors), theta)
    assert all("forward" not in m.__dict__ for m in bench.model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extra_memory_is_the_largest_module(dtype):
    bench = LayerwiseBench(seeded(Layers, dtype), squares)
    estimate = bench.estimator("layerwise")
    estimate([vectors(dtype=dtype)], us(3))
    assert estimate.visits is not None
    largest = (48 * 128 + 128) * dtype.itemsize  # both multiples of 256 bytes
    assert held_bytes(estimate.visits) == largest


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_middle_restores(error):
    bench = LayerwiseBench(seeded(Layers), squares)
    original = bench.model.b.forward

    def failing(x: Tensor) -> Tensor:
        raise error("boom")

    theta = bits(bench.space.tensors)
    homes = [t.data_ptr() for t in bench.space.tensors]
    estimate = bench.estimator("layerwise")
    bench.model.b.forward = failing
    with pytest.raises(error, match="boom"):
        estimate([vectors()], us(1))
    assert bench.model.b.forward is failing
    assert "forward" not in bench.model.a.__dict__
    assert [t.data_ptr() for t in bench.space.tensors] == homes
    assert same(bits(bench.space.tensors), theta)
    bench.model.b.forward = original
    assert torch.equal(estimate([vectors()], us(1)), bench.x("whole_model", [vectors()], 1))


def test_a_space_that_was_not_snapped_yet():
    """The first evaluation puts theta on its grid before anything is copied."""
    bench, fresh = LayerwiseBench(seeded(Layers), squares), seeded(Layers)
    space = ParameterSpace.from_model(fresh, smoothing=SMOOTHING)
    estimate = FiniteDifferences(fresh, space, squares, SMOOTHING, strategy="layerwise")
    assert torch.equal(estimate([vectors()], us(2)), bench.x("whole_model", [vectors()], 2))
    assert same(bits(space.tensors), bits(bench.space.tensors))


class WritesItsWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.mul_(1.5)
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["whole_model", "layerwise"])
def test_a_module_that_writes_its_own_weight_is_refused(strategy):
    bench = LayerwiseBench(seeded(lambda: WritesItsWeight(32, 3)), squares)
    with pytest.raises(ParameterChanged, match="weight was written to"):
        bench.x(strategy, [vectors()])


class Wrapped(nn.Module):
    """Parameters of its own, around a child, in containers, and one tied to the child's."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(32, 32)
        self.tied = self.child.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(32)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(32))})

    def forward(self, x: Tensor) -> Tensor:
        x = self.child(x * self.scales[0]) @ self.tied
        return self.child(x) * self.scales[1] + self.named["shift"]


class Shared(nn.Module):
    """One module in two places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(32, 32)
        self.stack = nn.Sequential(layer, nn.Tanh(), layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x)


class Parametrized(nn.Module):
    """Weight normalisation computes the weight in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("build", [Layers, Wrapped, Shared, Parametrized])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nested_tied_and_shared_owners(build, dtype, layers):
    bench = LayerwiseBench(seeded(build, dtype), squares)
    batches = [vectors(4, dtype=dtype), vectors(1, dtype=dtype)]
    bench.assert_alike(batches)
    assert inexactness(bench.estimator("layerwise"), batches[0], us(1)[0]) is None


class ByKeyword(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        assert self.weight.shape[0] == len(self.weight)
        return F.embedding(input=ids, weight=self.weight, padding_idx=3) * self.weight.size(1)


class ByIndexing(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.weight[ids]


class Scaled(nn.Embedding):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


def word_loss(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["ids"]).float().square().flatten(1).sum(dim=1)


IDS = {"ids": torch.tensor([[0, 7, 7, 499], [3, 7, 0, 3]])}
WHOLE_TABLE = 500 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.Embedding, ByKeyword, ByIndexing, Scaled])
def test_embeddings(kind, dtype):
    bench = LayerwiseBench(seeded(lambda: kind(500, 32), dtype), word_loss)
    bench.assert_alike([IDS, {"ids": IDS["ids"][:1].int()}])
    assert inexactness(bench.estimator("layerwise"), IDS, us(1)[0]) is None
    visits = bench.estimator("layerwise").visits
    assert visits is not None
    with visits.installed():
        visits.position = ((us(1)[0], SMOOTHING),)
        bench.model(IDS["ids"])
    copied = held_bytes(visits) >= WHOLE_TABLE * dtype.itemsize
    assert copied == (kind is ByIndexing)
    assert len(visits.visited) == len(bench.space.names)


def test_an_embedding_that_renormalises_itself_is_refused():
    bench = LayerwiseBench(seeded(lambda: nn.Embedding(9, 4, max_norm=1.0)), word_loss)
    with pytest.raises(ValueError, match="set max_norm=None"):
        bench.estimator("layerwise")


class Attention(nn.Module):
    """nn.MultiheadAttention reads its out_proj's parameters without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return self.attention(x, x, x, need_weights=False)[0].flatten(1)


class Faintly(nn.Module):
    """Reads a child's weight without calling the child, where float32 rounds the effect away."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 3), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + 1e-30 * self.b.weight.sum()


@pytest.mark.parametrize(
    ("build", "names"), [(Attention, "out_proj.weight"), (Faintly, "b.weight")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_behind_the_back_are_found_out(build, names, dtype):
    bench = LayerwiseBench(seeded(build, dtype), squares)
    batch = vectors(dtype=dtype)
    theta = bits(bench.space.tensors)
    explicit = bench.estimator("layerwise")
    assert inexactness(explicit, batch, us(1)[0]) is not None
    with pytest.raises(ValueError, match=f"'layerwise'.*{names}.*use 'whole_model'"):
        choose_strategy(explicit, batch, us(1)[0])
    assert same(bits(bench.space.tensors), theta)


def test_auto_falls_back_to_the_whole_model():
    bench = LayerwiseBench(seeded(Attention, torch.bfloat16), squares)
    estimate = bench.estimator("auto")
    assert estimate.strategy == "layerwise"
    [message] = choose_strategy(estimate, vectors(dtype=torch.bfloat16), us(1)[0])
    assert "read outside its module's forward" in message
    assert "out_proj" not in message  # which parameters a trial batch reached is of its rows
    assert estimate.strategy == "whole_model"
    assert estimate.visits is None
    batch = [vectors(dtype=torch.bfloat16)]
    assert torch.equal(estimate(batch, us(3)), bench.x("whole_model", batch))


def test_an_objective_that_refuses_is_not_taken_for_an_inexact_strategy():
    def wrong(model: nn.Module, inputs: Batch) -> Tensor:
        return squares(model, inputs).mean()

    bench = LayerwiseBench(seeded(Layers, torch.bfloat16), wrong)
    with pytest.raises(ValueError, match="one loss per example"):
        choose_strategy(bench.estimator("auto"), vectors(dtype=torch.bfloat16), us(1)[0])
