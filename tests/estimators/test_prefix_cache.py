"""The frozen prefix: run once per microbatch, bit-identical to full passes, or found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from estimator_bench import KEY, SMOOTHING, Batch, bits, same, seeded, token_batch, us
from torch import Tensor, nn

from hf_dpzero.estimators.choose_strategy import choose_strategy, prefix_is_exact
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import FrozenPrefix, StalePrefix
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.trainable import select_trainable


def estimator(
    model: nn.Module, reuse: bool, objective: Callable[..., Tensor] | None = None
) -> FiniteDifferences:
    space = ParameterSpace.from_model(model, smoothing=SMOOTHING)
    space.snap_()
    chosen = objective or select_objective(model)
    return FiniteDifferences(model, space, chosen, SMOOTHING, reuse_frozen_prefix=reuse)


def differences(estimate: FiniteDifferences, batches: list[Batch], count: int = 3) -> Tensor:
    found = estimate(batches, us(count, 4))
    estimate.space.settle_()
    return found


def calls_of(model: nn.Module) -> Counter[str]:
    """Counts the true executions of every module's own forward, below whatever wraps it later."""
    counts: Counter[str] = Counter()

    def counted(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return forward(*args, **kwargs)

        return call

    for name, module in model.named_modules():
        module.forward = counted(name, module.forward)
    return counts


def head_only(tiny_bert: Any) -> nn.Module:
    model = tiny_bert()
    select_trainable(model, "classifier")
    return model


def last_layer(tiny_bert: Any) -> nn.Module:
    model = tiny_bert()
    select_trainable(model, r"layer\.1\.|classifier")
    return model


def lora_on_the_last_layer(tiny_bert: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["query", "value"], layers_to_transform=[1]
    )
    model = peft.get_peft_model(tiny_bert(), config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model


MODELS = {"head": head_only, "last layer": last_layer, "lora": lora_on_the_last_layer}


@pytest.mark.parametrize("name", MODELS)
def test_reuse_is_bit_identical_to_full_passes(name, tiny_bert):
    batches = [token_batch(size, seed=size) for size in (3, 2, 4)]
    with_reuse = estimator(MODELS[name](tiny_bert), reuse=True)
    without = estimator(MODELS[name](tiny_bert), reuse=False)
    assert with_reuse.prefix is not None
    assert without.prefix is None
    found, expected = differences(with_reuse, batches), differences(without, batches)
    assert found.shape == (9, 3)
    assert torch.equal(found, expected)
    assert float(expected.abs().min()) > 0
    assert prefix_is_exact(with_reuse, batches[0], Direction(KEY, 0))


def test_tied_embeddings_frozen_under_a_training_head_transform(tiny_masked_lm):
    model = tiny_masked_lm()
    select_trainable(model, "predictions.transform")
    counts = calls_of(model)
    reuse = estimator(model, reuse=True)
    full_model = tiny_masked_lm()
    select_trainable(full_model, "predictions.transform")
    batches = [token_batch(3, language=True)]
    found = differences(reuse, batches, count=2)
    assert counts["bert"] == 1
    assert counts["cls.predictions.decoder"] == 4
    assert torch.equal(found, differences(estimator(full_model, reuse=False), batches, count=2))


@pytest.mark.parametrize("pattern", ["layers.1", "final_layer_norm|fc2"])
def test_decoders_with_caches_and_masks(pattern, tiny_opt):
    results = []
    for reuse in (True, False):
        model = tiny_opt()
        select_trainable(model, pattern)
        results.append(differences(estimator(model, reuse=reuse), [token_batch(2, language=True)]))
    assert torch.equal(*results)


def test_full_parameters_have_no_prefix(tiny_bert):
    assert not FrozenPrefix(tiny_bert()).worthwhile
    assert estimator(tiny_bert(), reuse=True).prefix is None
    assert prefix_is_exact(estimator(tiny_bert(), reuse=True), token_batch(2), Direction(KEY, 0))


def test_frozen_modules_run_once_per_microbatch(tiny_bert):
    """3 microbatches, K = 4: the encoder runs 3 times, the head 3 * 2K = 24 times."""
    model = head_only(tiny_bert)
    counts = calls_of(model)
    differences(
        estimator(model, reuse=True), [token_batch(2, seed=seed) for seed in range(3)], count=4
    )
    assert counts["classifier"] == 24
    assert counts["bert"] == 3
    assert counts["bert.encoder.layer.0"] == 3
    assert counts["bert.encoder.layer.1.output.dense"] == 3


def test_a_mixed_model_runs_its_first_layer_once_and_its_last_always(tiny_bert):
    model = last_layer(tiny_bert)
    counts = calls_of(model)
    differences(estimator(model, reuse=True), [token_batch(2)], count=4)
    assert counts["bert.embeddings"] == 1
    assert counts["bert.encoder.layer.0"] == 1
    assert counts["bert.encoder.layer.1.attention.self"] == 8
    assert counts["bert.pooler"] == 8  # frozen, but behind what trains


def test_each_microbatch_has_its_own_prefix(tiny_bert):
    """The second microbatch must not be judged by the first one's features."""
    model = head_only(tiny_bert)
    reuse = estimator(model, reuse=True)
    apart = torch.cat([differences(reuse, [token_batch(2, seed=seed)]) for seed in (0, 1)])
    together = differences(reuse, [token_batch(2, seed=seed) for seed in (0, 1)])
    assert torch.equal(apart, together)
    assert not torch.equal(together[:2], together[2:])


def test_nothing_is_left_on_the_model(tiny_bert):
    model = last_layer(tiny_bert)

    def state() -> dict[str, Any]:
        modules = model.named_modules()
        return {n: (m.__dict__.get("forward"), len(m._forward_pre_hooks)) for n, m in modules}

    before = state()
    reuse = estimator(model, reuse=True)
    differences(reuse, [token_batch(2)])

    def failing(module: nn.Module, inputs: Batch) -> Tensor:
        module(**{k: v for k, v in inputs.items() if k != "labels"})
        raise RuntimeError("the forward raises")

    reuse.objective = failing
    with pytest.raises(RuntimeError, match="the forward raises"):
        differences(reuse, [token_batch(2)])
    assert state() == before
    assert not reuse.prefix._outputs


class InPlace(nn.Module):
    """Adds the trainable part onto the frozen features in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        features += self.head(features)
        return features


class BehindTheBack(nn.Module):
    """Uses a trainable module's weight without calling the module, then a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.after = nn.Linear(3, 3), nn.Linear(3, 3)
        self.after.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(x @ self.used.weight))


class Impatient(nn.Module):
    """Runs its frozen modules in an order that changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first, second = (self.a, self.b) if self.calls % 2 else (self.b, self.a)
        return self.head(second(first(x)))


def squares(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["x"]).square().sum(dim=1)


@pytest.mark.parametrize("build", [InPlace, Impatient])
def test_stale_outputs_raise_and_never_pass_silently(build):
    reuse = estimator(seeded(build), reuse=True, objective=squares)
    with pytest.raises(StalePrefix, match="set performance.reuse_frozen_prefix=False"):
        differences(reuse, [{"x": torch.ones(2, 3)}])
    assert reuse.space.position == ()


def test_an_objective_that_calls_the_model_twice_is_found_out(tiny_bert):
    """A contrastive loss: the second call is on another input, which the memory does not see."""

    def contrast(model: nn.Module, inputs: Batch) -> Tensor:
        mask = inputs["attention_mask"]
        one = model(input_ids=inputs["input_ids"], attention_mask=mask).logits
        two = model(input_ids=inputs["input_ids"].flip(1), attention_mask=mask).logits
        return (one * two).sum(dim=1)

    reuse = estimator(head_only(tiny_bert), reuse=True, objective=contrast)
    assert not prefix_is_exact(reuse, token_batch(3), Direction(KEY, 0))


class SharedFrozen(nn.Module):
    """One frozen module used alone and inside another frozen one."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(3, 3)
        self.alone, self.stack = shared, nn.Sequential(shared, nn.Tanh())
        self.head = nn.Linear(3, 3)
        self.alone.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stack(self.alone(x)))


def test_a_frozen_module_inside_another_is_remembered_with_it():
    reuse = estimator(seeded(SharedFrozen), reuse=True, objective=squares)
    full = estimator(seeded(SharedFrozen), reuse=False, objective=squares)
    batch = {"x": torch.linspace(-1, 1, 12).view(4, 3)}
    assert prefix_is_exact(reuse, batch, Direction(KEY, 0))
    assert torch.equal(differences(reuse, [batch]), differences(full, [batch]))


@pytest.mark.parametrize("build", [InPlace, BehindTheBack, Impatient])
def test_make_exact_turns_a_prefix_off_that_cannot_be(build):
    estimate = estimator(seeded(build), reuse=True, objective=squares)
    full = estimator(seeded(build), reuse=False, objective=squares)
    batch = {"x": torch.linspace(-1, 1, 12).view(4, 3)}
    before = bits(estimate.space.tensors)
    assert choose_strategy(estimate, batch, Direction(KEY, 0)) == [
        "performance.reuse_frozen_prefix is off: it would not be exact for this model."
    ]
    assert estimate.prefix is None
    assert estimate.space.position == ()
    assert same(before, estimate.space.tensors)
    assert differences(estimate, [batch]).shape == (4, 3)
    if build is not Impatient:  # which gives other losses every other time
        assert torch.equal(differences(estimate, [batch]), differences(full, [batch]))
