"""What the tests of all strategies share: directions, batches of tokens, a model with its space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace

KEY, SMOOTHING, VOCABULARY = 5, 1e-2, 64
Batch = Mapping[str, Tensor]
Build = Callable[[], nn.Module]


def us(count: int, step: int = 0) -> list[Direction]:
    """Directions of one step."""
    return [Direction(KEY, step, k) for k in range(count)]


def bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies."""
    return [tensor.detach().clone() for tensor in tensors]


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return len(first) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def seeded(build: Build, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Every parameter normal with deviation 0.3, whatever the module's own initialisation."""
    model, generator = build(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model.to(dtype).eval()


def token_batch(
    rows: int, length: int = 9, seed: int = 0, left: bool = False, language: bool = False
) -> Batch:
    """Row i has i % 3 tokens of padding; labels are classes, or the tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    place = torch.arange(length).flip(0) if left else torch.arange(length)
    mask = (place < length - (torch.arange(rows) % 3)[:, None]).long()
    ids = ids * mask
    labels = torch.randint(0, 2, (rows,), generator=generator)
    if language:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Bench:
    """One model and space; the strategies run on the very same numbers."""

    def __init__(
        self, model: nn.Module, objective: Callable[..., Tensor] | None = None, **settings: Any
    ) -> None:
        self.model, self.objective = model, objective or select_objective(model)
        self.space = ParameterSpace.from_model(model, smoothing=SMOOTHING, **settings)
        self.space.snap_()

    def estimator(
        self, strategy: str = "auto", reuse: bool = False, kind: str = "central"
    ) -> FiniteDifferences:
        """Of this model and space."""
        return FiniteDifferences(
            self.model, self.space, self.objective, SMOOTHING, reuse, strategy, kind=kind
        )

    def losses(self, batches: list[Batch], count: int, strategy: str) -> Tensor:
        """[2, B, K]; theta is settled and as it was."""
        theta = bits(self.space.tensors)
        losses = self.estimator(strategy, reuse=strategy == "stacked").losses(batches, us(count))
        self.space.settle_()
        assert same(self.space.tensors, theta), strategy
        return torch.stack(losses)
