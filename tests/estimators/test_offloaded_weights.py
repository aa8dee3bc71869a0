"""Weights that come to their module: the bits of weights that are there, two modules' at a time."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from estimator_bench import SMOOTHING, Bench, seeded, us
from test_layerwise import microbatches, transformer
from torch import Tensor, nn

from hf_dpzero.estimators import offload
from hf_dpzero.estimators.choose_strategy import choose_strategy
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.estimators.offload import living_elsewhere, prefetched_of, prefetcher_of
from hf_dpzero.parallel.offload import own_trained_files, settle_offloaded
from hf_dpzero.perturbation.parameter_space import ParameterSpace


def offloaded(model: nn.Module, folder: Path, where: str, **settings: Any) -> nn.Module:
    if where == "cpu":
        accelerate.cpu_offload(model, **settings)
    else:
        accelerate.disk_offload(model, folder, **settings)
    settle_offloaded(model)
    own_trained_files(model)
    return model


def same(one: ParameterSpace, other: ParameterSpace) -> bool:
    assert one.names == other.names
    return all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize(
    ("name", "dtype", "distribution", "kind"),
    [
        ("opt", torch.float32, "rademacher", "central"),
        ("bert", torch.float32, "gaussian", "forward"),
        ("roberta-mlm", torch.bfloat16, "sphere", "forward"),
        ("gpt2", torch.float16, "rademacher", "central"),
    ],
)
def test_differences_and_updates_have_the_bits_of_a_model_that_is_there(
    tmp_path, name, dtype, distribution, kind, where
):
    here, task = transformer(name)
    benches = [
        Bench(here.to(dtype), distribution=distribution),
        Bench(
            offloaded(transformer(name)[0].to(dtype), tmp_path, where), distribution=distribution
        ),
    ]
    found: list[Tensor] = []
    for bench in benches:
        estimator = bench.estimator("layerwise", kind=kind)
        for step in range(2):
            found.append(estimator(microbatches(task), us(2, step)))
            bench.space.step_(us(2, step), [3e-3, -2e-3], decay=1e-3)
    assert torch.equal(torch.cat(found[:2]), torch.cat(found[2:]))
    assert float(found[0].abs().mean()) > 0.01
    assert same(benches[0].space, benches[1].space)
    assert len(living_elsewhere(benches[1].model)) == len(list(benches[1].model.parameters()))


def test_auto_is_layerwise_where_offloaded_weights_train(tmp_path):
    bench = Bench(offloaded(transformer("bert")[0], tmp_path, "cpu"))
    assert bench.estimator("auto").strategy == "layerwise"
    for strategy in ("whole_model", "stacked"):
        with pytest.raises(ValueError, match="offloaded weights that train"):
            bench.estimator(strategy)
    frozen = offloaded(transformer("bert")[0], tmp_path, "cpu")
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("classifier" in name)
    prefetched = prefetched_of(frozen.classifier)
    assert prefetched is not None
    prefetched.stay_()
    assert Bench(frozen).estimator("auto").strategy == "whole_model"


def test_at_most_two_modules_are_here_and_every_weight_comes_once_a_pass(tmp_path):
    """Bytes in, K = 1, one microbatch: 2 passes x all weights; of embeddings the rows that are read."""
    model, task = transformer("bert")
    bench = Bench(offloaded(model, tmp_path, "disk"))
    schedule, batch = prefetcher_of(model), microbatches(task)[0]
    assert schedule is not None
    estimator = bench.estimator("layerwise")
    estimator([batch], us(1))  # learns the order
    before, schedule.peak = schedule.bytes_in, 0
    estimator([batch], us(1))
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    held = {id(m.weight) for m in tables}
    matrices = sum(p.nbytes for p in model.parameters() if id(p) not in held)
    words = (
        batch["input_ids"].unique().numel() + batch["input_ids"].shape[1] + 1
    )  # positions, one type
    rows = 2 * words * tables[0].weight[0].nbytes
    # The last prefetch of the second pass is for a pass that does not come.
    first = model.bert.embeddings.LayerNorm
    spare = sum(p.nbytes for p in first.parameters())
    assert schedule.bytes_in - before == 2 * matrices + rows + spare
    sizes = sorted(
        sum(p.nbytes for p in m.parameters(recurse=False) if id(p) not in held)
        for m in model.modules()
    )
    assert sizes[-1] <= schedule.peak <= sizes[-1] + sizes[-2] < matrices / 4
    assert schedule.held == 0


def test_the_next_module_comes_in_another_thread(monkeypatch, tmp_path):
    threads = []
    copied = offload._copied

    def noting(*arguments: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return copied(*arguments)

    monkeypatch.setattr(offload, "_copied", noting)
    model, task = transformer("bert")
    estimator = Bench(offloaded(model, tmp_path, "cpu")).estimator("layerwise")
    estimator(microbatches(task)[:1], us(1))
    threads.clear()
    estimator(microbatches(task)[:1], us(2))  # the order is known: only a step's first comes late
    assert threads.count(True) == 1 < threads.count(False)
    threads.clear()
    model(input_ids=torch.ones(1, 3, dtype=torch.int64))
    assert all(threads), "outside a step nothing may come ahead, for weights may change"


class Reader(nn.Module):
    """Reads `inner`'s weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.outer(x) @ self.inner.weight.T


def distances(model: nn.Module, inputs: Any) -> Tensor:
    return (model(**inputs) - inputs["labels"]).square().sum(dim=1)


BATCH = {"x": torch.ones(2, 4), "labels": torch.zeros(2, 2)}


def test_a_weight_that_is_read_elsewhere_is_found_out_and_may_be_preloaded(tmp_path):
    model = offloaded(seeded(Reader), tmp_path, "cpu")
    bench = Bench(model, distances)
    with pytest.raises(ValueError, match="preload_module_classes"):
        choose_strategy(bench.estimator("auto"), BATCH, us(1)[0])
    preloaded = offloaded(seeded(Reader), tmp_path, "cpu", preload_module_classes=["Reader"])
    other = Bench(preloaded, distances)
    assert choose_strategy(other.estimator("auto"), BATCH, us(1)[0]) == []
    plain = Bench(seeded(Reader), distances).estimator("whole_model")([BATCH], us(2))
    assert torch.equal(other.estimator("auto")([BATCH], us(2)), plain)


class Writer(nn.Linear):
    """Writes to its own weight."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.weight.data.add_(0.0) if labels is None else self.weight.add_(1.0)
        return super().forward(x)


def test_a_write_to_what_came_is_lost_and_refused(tmp_path):
    model = offloaded(seeded(lambda: Writer(4, 2)), tmp_path, "cpu")
    before = model.weight.detach().clone()
    bench = Bench(model, distances)
    with pytest.raises(ParameterChanged):
        bench.estimator("auto")([BATCH], us(1))
    assert float((model.weight.detach() - before).abs().max()) < 1e-5  # the grid's step
    assert prefetcher_of(model).held == 0


def test_an_error_in_a_forward_leaves_every_weight_where_it_lives(tmp_path):
    model = offloaded(transformer("bert")[0], tmp_path, "cpu")
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 3), 10**6))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert prefetcher_of(model).held == 0


def test_a_copy_of_the_model_has_weights_of_its_own(tmp_path):
    model = offloaded(seeded(Reader), tmp_path, "disk")
    other = copy.deepcopy(model)
    assert prefetched_of(other.outer).module is other.outer
    with torch.no_grad():
        other.outer.weight.zero_()
    assert not torch.equal(distances(model, BATCH), distances(other, BATCH))
    assert float(model.outer.weight.detach().abs().max()) > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_the_bits_are_those_of_a_model_on_cuda(tmp_path, dtype):
    """The side stream's copies are complete when they are perturbed, and updates are the CPU's."""
    here, task = transformer("opt")
    batches = [{k: v.cuda() for k, v in batch.items()} for batch in microbatches(task)]
    plain = Bench(here.to(dtype).cuda())
    away = transformer("opt")[0].to(dtype)
    accelerate.cpu_offload(away, execution_device=torch.device("cuda", 0))
    settle_offloaded(away)
    there = Bench(away)
    for step in range(20):
        found = [b.estimator("layerwise")(batches, us(2, step)) for b in (plain, there)]
        assert torch.equal(*found)
        for bench in (plain, there):
            bench.space.step_(us(2, step), [3e-3, -2e-3])
    assert all(p.device.type == "cpu" for p in away.parameters())
    pairs = zip(plain.space.tensors, there.space.tensors, strict=True)
    assert all(torch.equal(a.cpu(), b) for a, b in pairs)
    assert FiniteDifferences(away, there.space, there.objective, SMOOTHING).strategy == "layerwise"
