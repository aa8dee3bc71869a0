"""Which parameters train, what is refused among them, and where they lie in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_dpzero.perturbation.sharding import local

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROMPT = "prompt_encoder"
"""What PEFT calls the parameters of a prompt or prefix, which have no prefix of their own as "lora_"."""


def select_trainable(model: nn.Module, pattern: str | None) -> None:
    """Freezes every parameter whose name the pattern does not match.

    Args:
      model: its parameters' `requires_grad` is set; nothing is set if an error is raised.
      pattern: regular expression for `re.search`; None changes nothing.

    Raises:
      ValueError: the pattern matches no parameter, or one whose dtype cannot be trained.
    """
    if pattern is None:
        return
    named = list(model.named_parameters())
    chosen = {name for name, _ in named if re.search(pattern, name)}
    if not chosen:
        raise ValueError(
            f"trainable={pattern!r} matches no parameter; there are e.g. {[n for n, _ in named][-3:]}."
        )
    for name, parameter in named:
        if name in chosen:  # before requires_grad_, which torch refuses for integers
            check_dtype(f"{name} (selected by trainable={pattern!r})", parameter)
    for name, parameter in named:
        parameter.requires_grad_(name in chosen)


def num_trainable(model: nn.Module, pattern: str | None) -> int:
    """d, the number of coordinates that `select_trainable` leaves trainable; tied ones count once."""
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if is_trained(name, p, pattern))


def is_trained(name: str, parameter: Tensor, pattern: str | None) -> bool:
    """Whether `select_trainable` leaves a parameter trainable."""
    return parameter.requires_grad if pattern is None else bool(re.search(pattern, name))


def is_prompt(name: str) -> bool:
    """Whether a parameter is a prompt or prefix of PEFT's: listed last, and read by the first layer."""
    return PROMPT in name.split(".")


def check_trainable(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ValueError for tensors that a `ParameterSpace` cannot perturb.

    Nothing trainable, the meta device, a dtype that `check_dtype` refuses, or memory that two of
    the tensors share without being one tied parameter.
    """
    if not named:
        raise ValueError("no parameter is trainable: set requires_grad or loosen `trainable`.")
    for name, tensor in named:
        if tensor.device.type == "meta":
            raise ValueError(f"{name} is on the meta device: load its weights before training.")
        check_dtype(name, tensor)
    _refuse_shared_memory((name, tensor, True) for name, tensor in named)


def check_dtype(name: str, parameter: Tensor) -> None:
    """Refuses a trainable parameter that cannot be perturbed exactly in place.

    Raises:
      ValueError: quantised, made under `torch.inference_mode()`, or not of `TRAINABLE_DTYPES`.
    """
    dtype, kind = parameter.dtype, quantised_kind(parameter)
    if kind is not None:
        raise ValueError(
            f"{name} is quantised ({kind}), so it cannot be perturbed in place: leave it frozen and "
            "train float adapters (LoRA) on top, or load the model without quantization."
        )
    if local(parameter).is_inference():
        raise ValueError(
            f"{name} was made under torch.inference_mode() and cannot be changed in place: load the "
            "model outside of it."
        )
    if dtype in TRAINABLE_DTYPES:
        return
    if dtype == torch.float64:
        advice = "more than the exact grids hold: load the model in float32 (model.float())."
    elif dtype.is_complex:
        advice = (
            "for which there are no directions: hold real and imaginary part as a float32 parameter "
            "(torch.view_as_real), or freeze it."
        )
    else:
        advice = (
            "too coarse to perturb: load it in bfloat16 or float32, or freeze it and train adapters "
            "on top."
        )
    raise ValueError(f"{name} has dtype {dtype}, {advice}")


def quantised_kind(parameter: Tensor) -> str | None:
    """Storage class and dtype of a quantised tensor (the dtype may be a float), else None."""
    kinds = {kind.__name__ for kind in type(parameter).__mro__} & {"Params4bit", "Int8Params"}
    held = local(parameter.data)
    if type(held) is not Tensor:  # a tensor subclass, such as torchao's
        kinds.add(type(held).__name__)
    if kinds or not (parameter.is_floating_point() or parameter.is_complex()):
        return ", ".join([*sorted(kinds), str(parameter.dtype)])
    return None


def check_storage(model: nn.Module) -> None:
    """Refuses trainable parameters whose memory something else uses: it would be perturbed too.

    Looks at parameters, buffers, and tensors that modules keep as plain attributes, also in lists,
    tuples and dictionaries. A tied weight (one parameter under several names) is fine.

    Raises:
      ValueError: names both tensors.
    """
    unique: dict[int, tuple[str, Tensor, bool]] = {}
    for entry in _all_tensors(model):
        unique.setdefault(id(entry[1]), entry)
    _refuse_shared_memory(unique.values())


class _Span(NamedTuple):
    """The bytes [start, end) of a tensor on a device; sorts by place."""

    device: str
    start: int
    end: int
    name: str
    trainable: bool


def _refuse_shared_memory(tensors: Iterable[tuple[str, Tensor, bool]]) -> None:
    """Raises ValueError if a trainable tensor overlaps another one; (name, tensor, trainable) each."""
    spans = []
    for name, given, trainable in tensors:
        tensor = local(given)
        if not tensor.numel() or not has_plain_storage(tensor):
            continue
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        size = (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.element_size()
        start = tensor.data_ptr()
        spans.append(_Span(str(tensor.device), start, start + size, name, trainable))
    furthest: dict[tuple[str, bool], _Span] = {}  # the span that reaches furthest: any, trainable
    for span in sorted(spans):
        other = furthest.get((span.device, not span.trainable))
        if other is not None and span.start < other.end:
            one, two = (span, other) if span.trainable else (other, span)
            raise ValueError(
                f"the trainable {one.name} and {two.name} use the same memory without being one tied "
                "parameter, so perturbing the first would change the second: clone() one of them, "
                f"or freeze {one.name}."
            )
        for only_trainable in (False, True) if span.trainable else (False,):
            reached = furthest.get((span.device, only_trainable))
            if reached is None or reached.end < span.end:
                furthest[span.device, only_trainable] = span


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, trainable); parameters first, so that an attribute that is one is skipped."""
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter, parameter.requires_grad
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer, False
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            items = value.values() if isinstance(value, Mapping) else value
            for item in items if isinstance(value, (list, tuple, Mapping)) else [value]:
                if isinstance(item, Tensor):
                    yield f"attribute {prefix}{'.' if prefix else ''}{key}", item, False


def has_plain_storage(tensor: Tensor) -> bool:
    """Whether `tensor` is an ordinary strided tensor whose memory can be looked at."""
    return (
        type(tensor.data) is Tensor
        and tensor.device.type != "meta"
        and tensor.layout == torch.strided
    )


@torch.no_grad()
def gathered(tensors: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """Moves tensors next to each other: they become views of the result.

    Args:
      tensors: of one dtype and device. One alone stays where it is, made contiguous.
      starts: first element of each in the result, ascending.
    """
    if len(tensors) == 1:
        if not tensors[0].is_contiguous():
            tensors[0].data = tensors[0].data.contiguous()
        return tensors[0].detach().view(-1)
    flat = tensors[0].new_zeros(starts[-1] + tensors[-1].numel(), requires_grad=False)
    for start, tensor in zip(starts, tensors, strict=True):
        place = flat[start : start + tensor.numel()]
        place.copy_(tensor.detach().reshape(-1))
        tensor.data = place.view(tensor.shape)
    return flat
