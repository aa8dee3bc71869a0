"""Where low precision couples rows, or is too coarse for finite differences and gradients."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.offload import execution_devices
from hf_dpzero.estimators.per_example_gradients import rounds_products
from hf_dpzero.ledger.digests import is_packed
from hf_dpzero.perturbation.trainable import quantised_kind

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from hf_dpzero.settings.config import DPZeroConfig

PRODUCTS = "float32 products in TF32 or bfloat16 (torch.set_float32_matmul_precision, allow_tf32)"


def check_mixed_precision(args: TrainingArguments, device_type: str) -> None:
    """Refuses an autocast around the call, and mixed precision other than bfloat16 and float16.

    Args:
      args: `TrainingArguments`; `mixed_precision` also holds what `accelerate launch` asks for.
      device_type: of the training device.

    Raises:
      ValueError: autocast around the call, or a mixed precision other than "no", "bf16" and "fp16".
    """
    if torch.is_autocast_enabled(device_type):
        raise ValueError(
            "train() was called under torch.autocast, which keeps copies of the weights that no "
            "perturbation reaches: call it outside, with bf16=True."
        )
    if args.mixed_precision not in ("no", "bf16", "fp16"):
        raise ValueError(
            f"mixed_precision={args.mixed_precision!r} (accelerate's configuration or "
            "ACCELERATE_MIXED_PRECISION) is too coarse for finite differences: use 'bf16' or 'no'."
        )


def keep_layout_(model: nn.Module) -> None:
    """Has bitsandbytes' 4-bit layers keep their weights as they are stored.

    On CPUs with bfloat16 products their first forward in eval mode packs the weights anew, and
    `state_dict()` undoes it: the weights would change under a run, which is refused, and be rounded by
    what was called in between. A bias, which the first forward casts to the dtype in which the layer
    computes, is cast here.
    """
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            layer.state_dict()
        if layer.bias is not None and layer.compute_dtype is not None:
            layer.bias.data = layer.bias.data.to(layer.compute_dtype)


def check_precision(model: nn.Module, args: DPZeroConfig) -> None:
    """Refuses low-precision gradients of several examples at once.

    What places move in low-precision gradients is not tried. A pass of one example cannot depend on
    another.

    Raises:
      ValueError: low precision (see `low_precision`) with a larger microbatch.
    """
    causes = low_precision(model, args)
    if causes and args.physical_batch_size > 1:
        raise ValueError(
            f"{causes} with microbatch_size={args.physical_batch_size}: low-precision "
            "rounding of gradients depends on what else is in the microbatch, which the sensitivity "
            "does not cover. Set microbatch_size=1, compute in float32, or use method='dpzero', "
            "whose losses are evaluated in fixed shapes."
        )


def low_precision(model: nn.Module, args: DPZeroConfig) -> str:
    """Why a run does not compute in float32.

    Returns:
      bf16 or fp16 (from the arguments or from accelerate's configuration), tf32, half-precision or
      quantised weights in words; "" where all is float32.
    """
    causes = [f"{name}=True" for name in ("bf16", "fp16", "tf32") if getattr(args, name)]
    if not causes and args.mixed_precision != "no":
        causes.append(f"mixed_precision={args.mixed_precision!r} (accelerate's configuration)")
    cause = low_precision_of(model)
    said = cause == PRODUCTS and args.tf32
    return " and ".join(causes if cause is None or said else [*causes, cause])


@contextlib.contextmanager
def whole_products() -> Iterator[None]:
    """Takes float32 products in float32 inside, where `set_float32_matmul_precision` rules them."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # precision was set per backend, which this getter does not express
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def low_precision_of(model: nn.Module) -> str | None:
    """Why the model does not compute in float32; None if it does.

    Looked at: torch's settings, which any script may change; parameters, frozen ones too; buffers,
    where GPTQ, AWQ and BitNet keep their weights; tensor subclasses, whose dtype says nothing; and
    configurations that quantise only while running.
    """
    if rounds_products():
        return PRODUCTS
    convolutions = (m for m in model.modules() if "Conv" in type(m).__name__)
    devices = itertools.chain.from_iterable(map(execution_devices, convolutions))
    if torch.backends.cudnn.allow_tf32 and any(device.type == "cuda" for device in devices):
        return "convolutions in TF32 (torch.backends.cudnn.allow_tf32)"
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            return f"parameters that are not float32 ({name}, ...)"
        if (kind := quantised_kind(parameter)) is not None:
            return f"quantised parameters ({name}: {kind})"
    for name, buffer in model.named_buffers():
        half = buffer.is_floating_point() and buffer.element_size() < 4
        if half or type(buffer.data) is not Tensor or is_packed(buffer):
            kind = f"{type(buffer.data).__name__}, {buffer.dtype}"
            return f"buffers of low precision, as quantised layers have ({name}: {kind})"
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "quantization_config", None) is not None:
            return f"a quantization_config in the configuration of {name or 'the model'}"
    return None


_BY_WEIGHTS = ("gptq", "awq", "hqq", "eetq", "aqlm", "spqr", "vptq", "higgs", "bitnet")
"""Quantisations of weights alone, or of each token's activations by that token's own range."""

_EXPERTS = re.compile("(num|n)(_local|_routed)?_experts")
_GLOBAL = ("LongformerSelfAttention", "LEDEncoderSelfAttention")
_LOOKS_AT_ALL = re.compile(r"(isinf|isfinite|isnan)\([^\n]*\)\.(any|all)\(")


@functools.cache  # models repeat their layers, and reading one takes 0.1 ms
def _clamps_by_other_rows(forward: Callable[..., object], half: bool) -> bool:
    """Whether a forward's text asks whether any value of the batch overflowed, as T5's and BART's do.

    They then clamp every row, so a row close to float16's largest number follows from its neighbours.
    """
    try:
        text = inspect.getsource(forward)
    except (OSError, TypeError):  # no text, such as of compiled modules
        return False
    return bool(_LOOKS_AT_ALL.search(text)) and (half or "float16" not in text)


def couples_values(model: nn.Module, half: bool = False) -> str:
    """Why values, not only shapes, of one row of a batch may change what another row is computed with.

    A fixed shape is of no help there, and a trial on a few rows need not show it. LLM.int8() takes the
    columns in which any row of the batch has an outlier out of the 8-bit product (Dettmers et al. 2022,
    arXiv:2208.07339, section 3); dynamic quantisation may scale all activations by the largest. What
    is not known to quantise weights alone, or each token by itself, counts as such. So do layers whose
    products have as many rows as the batch's tokens decide: routed experts, global attention; and in
    float16 layers that clamp the whole batch where one value of it is infinite (T5, BART).

    Args:
      model: judged by its layers, tensors and configurations.
      half: whether it computes in float16 whatever its parameters are.

    Returns:
      The reason in words; "" where there is none.
    """
    known, half = False, half or any(p.dtype == torch.float16 for p in model.parameters())
    for name, module in model.named_modules():
        where = name or "the model"
        counts = [n for name, n in vars(module).items() if _EXPERTS.fullmatch(name)]
        if any(isinstance(count, int) and count > 1 for count in counts):
            return f"{where} routes tokens to experts, whose products are as large as all rows make them"
        if _clamps_by_other_rows(type(module).forward, half):
            return f"{where} clamps all rows of a batch where one of them overflows"
        if type(module).__name__ in _GLOBAL:
            return f"{where} has global attention as wide as the row with most of it"
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        if type(module).__name__ == "Linear8bitLt" and threshold > 0:
            return (
                f"{where} is 8-bit with llm_int8_threshold={threshold:g}, so an outlier in one row "
                "moves columns of all rows to half precision (llm_int8_threshold=0 does not)"
            )
        if "ao.nn.quantized" in type(module).__module__:
            return f"{where} quantises activations by the range of the whole batch"
        settings = getattr(getattr(module, "config", None), "quantization_config", None)
        if settings is not None:
            if not _quantises_weights(settings):
                return f"the quantization_config of {where} is not known to be of weights alone"
            known = True
    if known:
        return ""
    for name, parameter in model.named_parameters():
        kind = quantised_kind(parameter)
        if kind is not None and "Params4bit" not in kind and "Int8Params" not in kind:
            return f"{name} is quantised ({kind}), and nothing says how activations are"
    for name, buffer in model.named_buffers():
        if type(buffer.data) is not Tensor or is_packed(buffer):
            return f"{name} looks like packed weights, and nothing says how activations are"
    return ""


def _quantises_weights(settings: Mapping[str, object] | QuantizationConfigMixin) -> bool:
    values = settings if isinstance(settings, Mapping) else settings.to_dict()
    method = getattr(values.get("quant_method"), "value", values.get("quant_method"))
    if method == "bitsandbytes":  # 8-bit layers are looked at one by one
        return True
    return method in _BY_WEIGHTS or (method == "quanto" and values.get("activations") is None)
