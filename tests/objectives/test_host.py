"""Losses ask the host's batches, never a device's: within a pass nothing waits for a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import test_prompt_objectives as prompts
import tiny_heads
import torch
from torch import Tensor

import hf_dpzero
from hf_dpzero.objectives import host
from hf_dpzero.objectives.heads import select_objective

PACKAGE = str(Path(hf_dpzero.__file__).parent)
WAITS = {"__bool__", "__int__", "__float__", "item", "tolist", "nonzero", "unique", "cpu", "numpy"}


class OnDevice(Tensor):
    """Notes where the package asks for a value of it, or of what was computed from it."""

    asked: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller, name = sys._getframe(1), func.__name__
        index = args[1] if name == "__getitem__" else ()
        masks = [i for i in (index if isinstance(index, tuple) else [index]) if torch.is_tensor(i)]
        waits = name in WAITS or any(i.dtype == torch.bool for i in masks)
        if waits and caller.f_code.co_filename.startswith(PACKAGE):
            cls.asked.append(f"{caller.f_code.co_name}:{caller.f_lineno} {name}")
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(batch: dict[str, Tensor], known: bool = True) -> dict[str, Tensor]:
    copies = {name: value.clone().as_subclass(OnDevice) for name, value in batch.items()}
    for name, copy in copies.items() if known else ():
        host._host[copy] = lambda value=batch[name]: value
    return copies


HEADS = ("classes-bert", "masked-bert", "causal-gpt2", "tokens-bert", "span-bert", "choice-bert")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*HEADS, *prompts.SMOOTH])
def test_no_loss_asks_a_device(name, side, monkeypatch, language_model):
    if name in prompts.KINDS:
        objective, examples = prompts.KINDS[name]
        kind = "bert" if name == "words" else "gpt2"
        model, batch = language_model(kind), prompts.collated(examples(), side)
    else:
        model = tiny_heads.build(name)
        objective, batch = select_objective(model), tiny_heads.padded(tiny_heads.rows(name), side)
    expected = objective(model, batch)
    for known in (False, True):
        monkeypatch.setattr(OnDevice, "asked", [])
        losses = objective(model, on_device(batch, known))
        assert torch.equal(losses.as_subclass(Tensor), expected)
        assert bool(OnDevice.asked) != known, OnDevice.asked


def test_a_batch_is_sent_once_and_let_go():
    tensor, device = torch.arange(5), torch.device("meta")
    copy = host.sent(tensor, device)
    assert copy.is_meta and host.sent(tensor, device) is copy and host.on_host(copy) is tensor
    doubled = host.changed(copy, lambda values: 2 * values)
    assert doubled.is_meta and host.on_host(doubled).tolist() == [0, 2, 4, 6, 8]
    assert host.sent(tensor, torch.device("cpu")) is tensor and host.on_host(tensor) is tensor
    before = len(host._kept)
    del tensor
    assert len(host._kept) == before - 1 and host.on_host(copy) is copy


def test_a_copy_that_was_changed_in_place_is_not_what_was_sent():
    """Else labels that a script's own loss masks in place would be read unmasked, or masked later."""
    tensor, device = torch.arange(5), torch.device("meta")
    copy = host.sent(tensor, device)
    copy[1:] = -100
    assert host.on_host(copy) is copy and host.sent(tensor, device) is not copy
    assert host.on_host(host.sent(tensor, device)) is tensor
