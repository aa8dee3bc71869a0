"""What a model, its memory and its data may be: models that are refused, and sound ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from torch import Tensor, nn

from hf_dpzero.checks import data as data_checks
from hf_dpzero.checks import model as checks
from hf_dpzero.checks.precision import check_precision
from hf_dpzero.estimators.offload import prefetcher_of
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.offload import settle_offloaded
from hf_dpzero.perturbation.trainable import check_storage, select_trainable


def check_model(model: nn.Module) -> None:
    """All checks of a model alone, in their order."""
    checks.check_placement(model)
    checks.check_trained(model)
    checks.check_layers(model)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "train_dataset is None"),
        ([], "train_dataset is empty"),
        (iter([1, 2]), "a list_iterator.*no rows by number.*map-style"),
        (IterableDataset.from_generator(lambda: iter([{}])), r"stream .*no n.*from_generator"),
        ({"train": [1]}, r"a dict, .*\['train'\]"),
        ({1, 2}, "a set, which has no rows by number"),
    ],
)
def test_data_without_a_size_is_refused(dataset: Any, message: str):
    assert data_checks.num_examples([1, 2, 3]) == 3
    with pytest.raises(ValueError, match=message):
        data_checks.num_examples(dataset)


# ---- what trains


def test_trainable_selects_by_search_and_freezes_the_rest():
    """A pattern that matches nothing changes nothing."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"trainable='lora' matches no parameter; .*'0\.bias'"):
        select_trainable(model, "lora")
    assert all(p.requires_grad for p in model.parameters())
    select_trainable(model, r"^1\.|bias")
    select_trainable(model, None)  # keeps what is frozen
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained == ["0.bias", "1.weight", "1.bias"]


# ---- models


def two(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *(layers or [nn.Linear(2, 2)]))


def holding(values: Tensor, kind: Callable[..., nn.Parameter] = nn.Parameter) -> nn.Module:
    model = nn.Linear(2, 2)
    model.odd = kind(values, requires_grad=values.is_floating_point() or values.is_complex())
    return model


class Params4bit(nn.Parameter):
    """Named as bitsandbytes' class, which may store its bits in a floating-point dtype."""


class Packed(torch.Tensor):
    """A tensor subclass that looks like float32, as torchao's quantised tensors do."""


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def moving_as_a_whole() -> nn.Module:
    model = two()
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
    return model


class Shared(nn.Module):
    """Keeps a second tensor over a part of `weight`'s memory."""

    def __init__(self, keep: Callable[[Tensor], Any], frozen: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=not frozen)
        self.before = nn.Parameter(torch.ones(3), requires_grad=False)
        self.other = keep(self.weight.detach()[2:])


SHARED: dict[str, Callable[[Tensor], Any]] = {
    "buffer": nn.Buffer,
    "parameter": lambda view: nn.Parameter(view, requires_grad=False),
    "attribute": lambda view: view,
    "attribute, a list": lambda view: [torch.zeros(1), view],
    "attribute, a dictionary": lambda view: {"view": view.t()},
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        kind.__name__: (
            lambda kind=kind: two(kind(2, track_running_stats=False)),
            "1 normalises with the statistics of its batch.*LayerNorm",
        )
        for kind in (nn.BatchNorm1d, nn.SyncBatchNorm)
    },
    "norms": (lambda: nn.Embedding(5, 3, max_norm=1.0), "max_norm=1.0.*set max_norm=None"),
    "float64": (
        lambda: holding(torch.ones(2).double()),
        "^odd .*float64.*load the model in float32",
    ),
    "complex": (lambda: holding(torch.ones(2) * 1j), "^odd .*complex64.*view_as_real"),
    **{
        name: (
            lambda name=name: holding(torch.ones(2).to(getattr(torch, name))),
            f"^odd .*{name}, too coarse.*bfloat16 or float32",
        )
        for name in ("float8_e4m3fn", "float8_e5m2")
    },
    "4 bits": (
        lambda: holding(torch.ones(2).bfloat16(), Params4bit),
        r"^odd is quantised \(Params4bit, torch.bfloat16\).*adapters \(LoRA\)",
    ),
    "packed": (
        lambda: holding(torch.ones(2).as_subclass(Packed)),
        r"^odd is quantised \(Packed, torch.float32\).*without quantization",
    ),
    "inference mode": (made_in_inference_mode, r"weight was made under torch.inference_mode\(\)"),
    "meta": (
        lambda: two(nn.Linear(2, 2, device="meta").requires_grad_(False)),
        "1.weight is on the meta device.*load its weights",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight has no shape yet"),
    "moving": (moving_as_a_whole, r"moves as a whole.*accelerate\.cpu_offload"),
    "shared with a trained one": (
        lambda: nn.ModuleDict({"m": Shared(nn.Parameter)}),
        "m.other and parameter m.weight use the same memory.*clone",
    ),
    **{
        f"shared with a {name}": (
            lambda keep=keep: nn.ModuleDict({"m": Shared(keep), "free": nn.Linear(2, 2)}),
            f"parameter m.weight and {name.partition(',')[0]} m.other use the same memory.*clone",
        )
        for name, keep in SHARED.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_trained_in_place_are_refused(name: str):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        check_model(make())


def spread_without_offload() -> nn.Module:
    hooks, model = pytest.importorskip("accelerate.hooks"), two()
    hooks.attach_align_device_hook_on_blocks(
        model, execution_device={"0": "cpu", "1": "cpu"}, offload={"0": False, "1": False}
    )
    assert model[0]._hf_hook is not None
    return model


def tied_beside_neighbours() -> nn.Module:
    """Also the parameter itself as an attribute."""
    model = nn.Module()
    model.first, model.tied = nn.Linear(4, 4), nn.Linear(4, 4)
    model.tied.weight = model.first.weight
    model.known = [model.first.weight]  # as nn.LSTM keeps its parameters
    pool = torch.ones(8)
    model.low, model.high = nn.Parameter(pool[:4]), nn.Parameter(pool[4:])
    model.empty = nn.Parameter(pool[2:2])
    return model


SOUND: dict[str, Callable[[], nn.Module]] = {
    "constants in eval mode": lambda: two(nn.BatchNorm1d(2), nn.SyncBatchNorm(2)),
    "tied": tied_beside_neighbours,
    "cells": lambda: nn.LSTM(2, 2),
    "spread": spread_without_offload,
    **{
        str(dtype): lambda dtype=dtype: holding(torch.ones(2, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    **{f"frozen {n}": lambda n=n: REFUSED[n][0]().requires_grad_(False) for n in
       ("float64", "complex", "float8_e5m2", "4 bits", "packed")},
    **{f"frozen, {n}": lambda keep=keep: Shared(keep, frozen=True) for n, keep in SHARED.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_models_are_let_through(name: str):
    check_model(SOUND[name]())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_quantised_weights_selected_by_trainable_are_refused_and_stay_frozen(dtype: torch.dtype):
    model = holding(torch.ones(2, dtype=dtype))
    with pytest.raises(
        ValueError, match=r"odd \(selected by trainable='odd\|bias'\) is quantised.*LoRA"
    ):
        select_trainable(model, "odd|bias")
    assert model.weight.requires_grad  # the refusal came before anything was frozen
    select_trainable(model, "bias")
    check_model(model)


# ---- where the weights are


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("frozen", [False, True])
def test_offloaded_weights_are_fine_once_they_live_somewhere(tmp_path, where: str, frozen: bool):
    accelerate, model = pytest.importorskip("accelerate"), two()
    model[1].requires_grad_(not frozen)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"meta device.*offload is fine"):
        check_model(model)
    settle_offloaded(model)
    check_model(model)


def test_offload_under_another_hook_is_settled():
    hooks, model = pytest.importorskip("accelerate.hooks"), two()
    before = model[1].weight
    hooks.add_hook_to_module(model[1], hooks.ModelHook())
    hook = hooks.AlignDevicesHook(execution_device="cpu", offload=True, weights_map={})
    model[1]._hf_hook = hooks.SequentialHook(model[1]._hf_hook, hook)  # its weights are there
    settle_offloaded(model)
    assert model[1].weight is before and prefetcher_of(model) is not None


def test_several_gpus_in_one_process_serve_a_model_that_is_spread_over_them():
    args = SimpleNamespace(n_gpu=2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for device_map, spread in (({"0": 0, "1": 1}, True), ({"0": 0, "1": "cpu"}, False)):
        model.hf_device_map = device_map
        if spread:
            collectives.check_one_device(args, model)
        else:
            for given in (model, None):
                with pytest.raises(ValueError, match="2 GPUs in one process.*device_map='auto'"):
                    collectives.check_one_device(args, given)
    collectives.check_one_device(SimpleNamespace(n_gpu=1))


def test_overlaps_are_found_whatever_lies_between():
    """Against all pairs: random intervals of one pool, some trainable."""
    generator = torch.Generator().manual_seed(0)
    pool, verdicts = torch.ones(60), []
    for _ in range(300):
        model, spans = nn.Module(), []
        for i in range(4):
            start, size, trainable = torch.randint(0, 1 << 20, (3,), generator=generator).tolist()
            start, size, trainable = start % 48, 1 + size % 12, trainable % 2 == 0
            view = nn.Parameter(pool[start : start + size], requires_grad=trainable)
            model.register_parameter(f"p{i}", view)
            spans.append((start, start + size, trainable))
        bad = any(
            a[0] < b[1] and b[0] < a[1] and (a[2] or b[2])
            for a, b in itertools.combinations(spans, 2)
        )
        verdicts.append(bad)
        if bad:
            with pytest.raises(ValueError, match="use the same memory"):
                check_storage(model)
        else:
            check_storage(model)
    assert 30 < sum(verdicts) < 270


@pytest.mark.parametrize("factory", ["tiny_masked_lm", "tiny_gpt2", "tiny_t5"])
def test_real_architectures_pass(factory: str, request: Any):
    model = request.getfixturevalue(factory)()
    check_model(model)
    check_precision(model, precision())
    with pytest.raises(ValueError, match="tf32=True with microbatch_size=8"):
        check_precision(model, precision(tf32=True))


# ---- forward passes that write


class Writer(nn.Module):
    """A layer whose forward does `write(self)`."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))
        self.write = write

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return x * self.weight + self.frozen


def replace(module: Writer) -> None:
    module.weight = nn.Parameter(module.weight.clone())


def remove(module: Writer) -> None:
    kept = module.frozen
    del module.frozen
    module.frozen = kept.detach()


WRITES = {
    "in place": lambda m: m.weight.mul_(2.0),
    "through data": lambda m: m.weight.data.mul_(2.0),
    "one element": lambda m: m.weight.data[2:].add_(1e-7),
    "two swapped": lambda m: m.weight.data.copy_(
        torch.tensor([1.0, 2.0, 3.0]).roll(int(m.weight[0] == 1.0))
    ),
    "frozen": lambda m: m.frozen.data.add_(1.0),
    "replaced": replace,
    "removed": remove,
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_forward_that_writes_to_its_parameters_is_refused(kind: str):
    model = nn.Sequential(Writer(WRITES[kind]))
    with (
        pytest.raises(ValueError, match=r"0\.(weight|frozen) was changed by .*un-noised private"),
        checks.parameters_left_alone(model),
    ):
        model(torch.ones(3))


def test_a_forward_that_reads_or_keeps_buffers_is_left_alone():
    model = nn.Sequential(Writer(lambda m: m.calls.add_(1)))
    with checks.parameters_left_alone(model):
        model(torch.ones(3))
    with (
        pytest.raises(RuntimeError, match="from inside"),  # and hides nobody's exception
        checks.parameters_left_alone(model),
    ):
        raise RuntimeError("from inside")


# ---- precision


def precision(microbatch_size: int = 8, tf32: bool = False) -> SimpleNamespace:
    """Settings of a run without autocast."""
    settings = {"bf16": False, "tf32": tf32, "mixed_precision": "no"}
    return SimpleNamespace(physical_batch_size=microbatch_size, **{"fp16": False} | settings)


def with_buffer(buffer: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_buffer("qweight", buffer)
    return model


class Narrow(Tensor):
    """As a weight of torchao or quanto: float32 by its dtype, int8 in memory."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Narrow:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: Tensor) -> None:
        self.stored = (values * 10).to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, function, types, given, settings=None):
        same = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        return given[0] if function in same else NotImplemented


def frozen_narrow() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Narrow(torch.ones(4, 4)), requires_grad=False)
    return model


def configured() -> nn.Module:
    """Activations are quantised in the forward pass; every tensor is float32 (BitNet's online mode)."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].config = SimpleNamespace(quantization_config={"quant_method": "bitnet"})
    return model


def packed(*shape: int, dtype: torch.dtype) -> Any:
    return lambda: with_buffer(torch.ones(shape).to(dtype))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (packed(2, 2, dtype=torch.int32), r"1\.qweight: Tensor, torch\.int32"),  # GPTQ, AWQ
        (packed(2, 2, dtype=torch.uint8), r"1\.qweight: Tensor, torch\.uint8"),  # BitNet
        (packed(2, 2, dtype=torch.int8), r"1\.qweight: Tensor, torch\.int8"),  # EETQ
        (packed(2, 2, dtype=torch.float8_e4m3fn), r"1\.qweight: Tensor, torch\.float8"),
        (
            packed(2, dtype=torch.bfloat16),
            r"1\.qweight: Tensor, torch\.bfloat16",
        ),  # scales, one a row
        (packed(2, 2, dtype=torch.float16), r"1\.qweight: Tensor, torch\.float16"),
        (lambda: with_buffer(Narrow(torch.ones(4, 4))), r"1\.qweight: Narrow"),
        (frozen_narrow, r"weight: Narrow, torch\.float32"),
        (configured, "quantization_config"),
        (lambda: nn.Linear(2, 2).bfloat16(), r"not float32 \(weight, \.\.\.\)"),
    ],
)
def test_quantised_arithmetic_needs_one_example_a_pass(make: Any, named: str):
    """Wherever a quantisation keeps its weights: parameters, buffers, tensor subclasses."""
    with pytest.raises(ValueError, match=rf"{named}.*microbatch_size=8.*Set microbatch_size=1"):
        check_precision(make(), precision())
    check_precision(make(), precision(microbatch_size=1))


@pytest.mark.parametrize(
    "buffer",
    [
        torch.arange(6).view(1, 6),
        torch.ones(3, 3, dtype=torch.bool),
        torch.tensor(3, dtype=torch.int32),
        torch.ones(4, dtype=torch.int32),
        torch.ones(2, 2),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(2, 2, dtype=torch.float64),
    ],
)
def test_tables_masks_and_counters_are_no_weights(buffer: Tensor):
    model = with_buffer(buffer)
    model[0].config = SimpleNamespace(quantization_config=None)
    check_precision(model, precision())
