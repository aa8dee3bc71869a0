"""Tries before step 0, on invented rows, what the placement lemma assumes (see `placement`).

A1: no bit of a loss, nor of what any innermost module returns for a row, moves when others stand beside
it, blank ones included; nothing that came before changes a pass. A2: D, the largest move of a loss
between a pass of one row and every place of a pass of each size, bounds the move of an unclipped
contribution. A size that moves too much is not used. All of it runs at weights of which no trained
tensor is zero. No private row is read but the form of row 0, and nothing is tried again later.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_dpzero.batches.placement import PassBytes, hooked, innermost, measured
from hf_dpzero.batches.shapes import Row, blank_like, shape_of, stacked, unmasked, width_of
from hf_dpzero.checks.invented_rows import InventedRows
from hf_dpzero.objectives.losses import base_model, is_compiled

ROOM = 2.0**-12
"""D may be this share of the smallest clip: a sixteenth of what A2 allows, for what was not tried."""

_FEW_OUTPUTS, _INPUTS = 64, 16

COUPLED = (
    "an example's loss depends on the other examples of its batch: it differs {}, so clipping it would "
    "not bound one example's influence. Compute each loss from its own row only (no batch mean, no "
    "in-batch negatives, no batch statistics), with a model that ignores padding and keeps no state."
)

Probe = dict[int, tuple[Tensor, Tensor]]
"""Numbers of r rows in each place of a pass: its size -> the smallest and the largest, [r, m] each."""


class CoupledLosses(ValueError):
    """An example's loss depends on other examples by more than rounding."""


class Losses(Protocol):
    """A batch's per-example losses, float32 [B] on the CPU; equal seeds seed generators alike."""

    def __call__(self, batch: Mapping[str, Tensor], seed: int = 0) -> Tensor: ...


@dataclass
class SmokeTest:
    """What a few passes of invented rows show of a model.

    Attributes:
      rows: what is tried.
      losses: of the run, without gradients, in eval mode.
      model: whose innermost modules are looked at, unless it is compiled.
      coarse: whether something computes in low precision.
      probes: what moved by its place.
      bytes: of what modules returned in a pass of `tokens` tokens.
    """

    rows: InventedRows
    losses: Losses
    model: nn.Module
    coarse: bool = False
    probes: list[Probe] = field(default_factory=list)
    bytes: PassBytes = field(default_factory=PassBytes)
    tokens: int = 1

    def run(self, sizes: Sequence[int]) -> str:
        """Tries passes of these sizes.

        Returns:
          Why rows must be evaluated one by one; "" where they need not.

        Raises:
          CoupledLosses: a loss moves by more than rounding beside other rows, or with what came before.
        """
        narrow = self.rows.narrow()
        with measured(self.model) as self.bytes:
            alone = self.losses(narrow)
        self.tokens, found = max(width_of(narrow), 1), ""
        of_narrow = {1: _bounds(alone)}
        self.probes = [of_narrow, *self._narrow_layers(sizes, float(alone.abs()))]
        for size in sorted(sizes, reverse=True):
            if size == 1:
                continue
            wide = self.rows.wide(size)
            single = self.losses(wide)
            of_wide = {1: _bounds(single)}
            self.probes.append(of_wide)
            for probe, row, by_itself in ((of_narrow, narrow, alone), (of_wide, wide, single)):
                with measured(self.model) as taken, looked_at(self.model, size) as copied:
                    placed = self.losses(stacked([row] * size))
                tokens = size * max(width_of(row), 1)
                if taken.largest * self.tokens > self.bytes.largest * tokens:
                    self.bytes, self.tokens = taken, tokens  # the costliest pass, by the token
                self._check_rounding(placed, by_itself, "alone and beside copies of itself")
                probe[size] = _bounds(placed)
                if not placed.isfinite().all():
                    found = found or "the loss of an invented row is NaN or infinite"
                found = found or self._beside_others(row, placed, copied)
        if _same(self.losses(narrow), alone):
            return found
        if torch.are_deterministic_algorithms_enabled():
            raise CoupledLosses(COUPLED.format("before and after other examples were seen"))
        torch.use_deterministic_algorithms(True, warn_only=True)  # kernels may add up in any order
        return self.run(sizes)

    def move(self, sizes: Sequence[int]) -> float:
        """D, the largest move of a loss between two places of passes of these sizes."""
        moves = [0.0]
        for probe in self.probes:
            if tried := [probe[size] for size in sizes if size in probe]:
                least, most = map(torch.stack, zip(*tried, strict=True))
                apart = (most.amax(dim=0) - least.amin(dim=0)).nan_to_num(nan=math.inf)
                moves.append(float(apart.norm(dim=1).max()))
        return max(moves)

    def _check_rounding(self, losses: Tensor, reference: Tensor, where: str) -> None:
        """Refuses what moves a loss by more than rounding does."""
        share, least = (5e-2, 2e-2) if self.coarse else (1e-3, 1e-4)
        if bool(((losses - reference).abs() > share * reference.abs() + least).any()):
            raise CoupledLosses(COUPLED.format(where))

    def _beside_others(self, row: Row, placed: Tensor, copied: list[Tensor]) -> str:
        """Evaluates the row in the last place, a blank and other rows being in front of it."""
        size = len(placed)
        # Loud: what leaks from a neighbour by a share of 2^-24 still moves a bit.
        others = [blank_like(row, self.rows.side), *self._others(row, size - 2)]
        with looked_at(self.model, size) as seen, _loud(self.model, size):
            losses = self.losses(stacked([*others[: size - 1], row]))
        self._check_rounding(
            losses[-1:], placed[-1:], "beside copies of itself and beside other examples"
        )
        if not _same(losses[-1:], placed[-1:]):
            return "an example's loss has other bits beside other examples"
        same = len(seen) == len(copied) and all(map(_same, seen, copied))
        return "" if same else "what a layer returns for an example has other bits beside others"

    def _others(self, row: Row, count: int) -> Iterator[Row]:
        """Rows of the same shape with other tokens and lengths; every other one's numbers times 2^10."""
        whole, width = unmasked(row), width_of(row)
        usual = width if whole else max(1, width - 2)
        for number in range(count):
            length = width if whole else max(1, width - 1 - number % max(width - 1, 1))
            scale = 2.0**10 if number % 2 else 1.0
            other = self.rows.row(1000 + number, width, length, scale)
            # what lies along a mask may change a shape with the length, such as where labels are
            fits = shape_of(other) == shape_of(row) and unmasked(other) == whole
            yield other if fits else self.rows.row(1000 + number, width, usual, scale)

    def _narrow_layers(self, sizes: Sequence[int], loss: float) -> Iterator[Probe]:
        """What places move in products of few outputs, on random inputs.

        They round rarely, one row in some hundreds, so a few losses would not show it. A relative move
        of a row's outputs counts as one of its loss.
        """
        generator = torch.Generator().manual_seed(0)
        rows = torch.arange(_INPUTS)[:, None]
        for module in self.model.modules():
            if not isinstance(module, nn.Linear) or module.out_features >= _FEW_OUTPUTS:
                continue
            plain = type(module.weight.data) is Tensor and module.weight.is_floating_point()
            # packed weights have products of their own, and offloaded ones come only in a whole pass
            if not plain or module.weight.is_meta:
                continue
            inputs = torch.randn(_INPUTS, module.in_features, generator=generator)
            inputs = inputs.to(module.weight)
            alone = torch.cat([module.forward(inputs[i : i + 1]) for i in range(_INPUTS)]).double()
            scale = loss / alone.norm(dim=1, keepdim=True).clamp(min=1e-30)
            probe: Probe = {}
            for size in sizes:
                places = torch.arange(size)
                turned = ((first + places) % _INPUTS for first in range(_INPUTS))
                passes = torch.stack([module.forward(inputs[chosen]).double() for chosen in turned])
                placed = passes[(rows - places) % _INPUTS, places]  # [row, place, output]
                probe[size] = (
                    (placed.amin(dim=1) * scale).cpu(),
                    (placed.amax(dim=1) * scale).cpu(),
                )
            yield probe


def _bounds(placed: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest of a row's losses, [1, 1] each; NaN where one is NaN."""
    return placed.double().amin().view(1, 1), placed.double().amax().view(1, 1)


@contextlib.contextmanager
def looked_at(model: nn.Module, rows: int) -> Iterator[list[Tensor]]:
    """Copies, inside, of what innermost modules return for the last row of a pass, in order."""
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point() or not output.dim():
            return
        # some modules see rows and tokens as one dimension
        if output.shape[0] % rows == 0:
            seen.append(output.detach().reshape(rows, -1)[-1].clone())

    with hooked([] if is_compiled(model) else innermost(model), look):  # compiled code calls none
        yield seen


@contextlib.contextmanager
def _loud(model: nn.Module, rows: int) -> Iterator[None]:
    """Multiplies tokens' embeddings of every other row of a pass by 2^10, but not of the last row.

    Other tables may be looked up by positions, which belong to all rows (T5's relative bias).
    """

    def scale(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> object:
        if not isinstance(output, Tensor) or output.dim() < 3 or output.shape[0] != rows:
            return output
        factors = output.new_ones(rows)
        factors[1 : rows - 1 : 2] = 2.0**10
        return output * factors.view(-1, *[1] * (output.dim() - 1))

    tokens: list[nn.Module] = []
    with contextlib.suppress(AttributeError, NotImplementedError):  # a model without tokens
        tokens = [base_model(model).get_input_embeddings()]  # type: ignore[operator]
    with hooked([] if is_compiled(model) else tokens, scale):
        yield


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN being equal to NaN."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
