"""Settles the parameters before anyone reads them, so that an update may wait for the next pass.

Between two steps the tensors may hold theta - lambda u of a step whose restore and update are still to
be made (`ParameterSpace.step_(defer=True)`). A forward pass of any module that holds trainable
parameters, and any `state_dict`, makes them first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from hf_dpzero.perturbation.parameter_space import ParameterSpace


@contextlib.contextmanager
def settled_before_reads(model: nn.Module, space: ParameterSpace) -> Iterator[None]:
    """`reads_watched`, and settled on exit."""
    try:
        with reads_watched(model, space):
            yield
    finally:
        space.settle_()


@contextlib.contextmanager
def reads_watched(model: nn.Module, space: ParameterSpace) -> Iterator[None]:
    """Inside, forward passes see no waiting update and state dicts see theta."""

    def before_forward(module: nn.Module, args: Any) -> None:
        if space.waiting:
            space.settle_()

    def before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        space.settle_()

    trainable = [m for m in model.modules() if any(p.requires_grad for p in m.parameters())]
    handles = [m.register_forward_pre_hook(before_forward) for m in trainable]
    handles += [m.register_state_dict_pre_hook(before_state_dict) for m in trainable]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def all_known(watchers: Iterable[Any]) -> bool:
    """Whether every callback or trainer is Hugging Face's or ours: others may read the weights."""
    packages = {type(watcher).__module__.split(".")[0] for watcher in watchers}
    return packages <= {"transformers", "hf_dpzero"}
