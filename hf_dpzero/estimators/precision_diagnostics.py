"""Is the signal of a finite difference above the rounding of the arithmetic that computes it?

In low precision the loss is f + e: f smooth in theta, e a rounding error that looks random from one
point to the next. With o(a) = (loss(theta + a u) - loss(theta - a u)) / 2 the step uses
o(lambda) = lambda u.grad + noise, where noise = (e(+) - e(-)) / 2 does not shrink with lambda.

The noise shows where f cannot: r = o(lambda) - 3 o(lambda / 3) is free of f's value, slope and
curvature (a cubic term c a^3 leaves 8/9 c lambda^3), and its variance is 1 + 9 = 10 times that of the
noise. So rounding^2 = mean(r^2) / 10 and signal^2 = mean(o(lambda)^2) - rounding^2, means over a few
directions u, medians over examples. Both are functions of the data: measure on public data only.
Below lambda = 1e-5 float32 weights cannot stand at lambda / 3 to within a few percent, and so much of
the signal counts as rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.finite_differences import FiniteDifferences, Microbatch
from hf_dpzero.objectives.losses import ordinary_tokens
from hf_dpzero.perturbation.directions import Direction

DRAWS = 4
"""Directions that are averaged over: with four forward passes each, about the cost of a step."""

ROWS = 8
"""Examples that a median is taken over."""

_TOKENS = 32
_WANTED_RATIO = 3.0
_SEED = 0


@dataclass(frozen=True)
class PrecisionDiagnostic:
    """What a run's arithmetic leaves of the differences that it is to see.

    Attributes:
      signal: lambda |u.grad|, root mean square over directions, median over examples; loss units.
      rounding: the noise of the same half difference, in the same units.
      dtype: the arithmetic in words.
      smoothing: lambda that both were measured at.
    """

    signal: float
    rounding: float
    dtype: str
    smoothing: float

    @property
    def ratio(self) -> float:
        """signal / rounding; 0 where nothing moves, infinity where nothing is rounded."""
        if self.signal == 0.0:
            return 0.0
        return self.signal / self.rounding if self.rounding else math.inf

    @property
    def sufficient(self) -> bool:
        """Whether the signal stands out: ratio >= 3."""
        return self.ratio >= _WANTED_RATIO

    @property
    def suggestion(self) -> float | None:
        """The smallest smoothing * 2^k, k >= 0, with ratio >= 3 if the signal grows linearly.

        None where no signal was seen, for nothing can be told from it then.

        >>> PrecisionDiagnostic(signal=0.5, rounding=0.5, dtype="", smoothing=0.001).suggestion
        0.004
        """
        if self.ratio == 0.0:
            return None
        doublings = math.ceil(math.log2(_WANTED_RATIO / self.ratio)) if self.rounding else 0
        return self.smoothing * 2.0 ** max(0, doublings)

    def __str__(self) -> str:
        """Both numbers and what to do."""
        numbers = (
            f"{self.dtype}: on public data smoothing={self.smoothing} changes the loss by "
            f"{self.signal:.2g} (median), and rounding by {self.rounding:.2g}; ratio {self.ratio:.2g}."
        )
        if self.sufficient:
            return numbers
        if self.suggestion is None:
            return f"{numbers} No signal is visible: raise smoothing a lot, or train in float32."
        return f"{numbers} Set smoothing={self.suggestion:.2g}, or train in float32."


@torch.no_grad()
def measure(
    differences: FiniteDifferences, public: Sequence[Microbatch], dtype: str, draws: int = DRAWS
) -> PrecisionDiagnostic:
    """Signal and rounding of `differences` on public microbatches, split as in the run.

    Args:
      differences: of the run, with its smoothing, arithmetic and strategy.
      public: microbatches with at least one example.
      dtype: the arithmetic in words.
      draws: directions to average over; they depend on nothing and are not those of any step.

    Returns:
      the diagnostic, of central differences whatever the run's are; the parameters stand at theta
      again, bit for bit, also after an exception.

    Raises:
      ValueError: no example has a finite loss.
    """
    smoothing, forward = differences.smoothing, differences.forward
    whole, third = list[Tensor](), list[Tensor]()
    try:
        # central: u'Hu, which forward ones hold, would be taken for rounding
        differences.forward = False
        for draw in range(draws):
            direction = Direction(_SEED, draw, 0)
            for half_differences, size in ((whole, smoothing), (third, smoothing / 3.0)):
                differences.smoothing = size
                half_differences.append(differences(public, [direction])[:, 0] * size)
    finally:
        differences.smoothing, differences.forward = smoothing, forward
        differences.space.settle_()
    return _diagnose(torch.stack(whole), torch.stack(third), dtype, smoothing)


def _diagnose(whole: Tensor, third: Tensor, dtype: str, smoothing: float) -> PrecisionDiagnostic:
    # from o(lambda) and o(lambda / 3), float64 [draws, B] each
    finite = (whole.isfinite() & third.isfinite()).all(dim=0)
    if not finite.any():
        raise ValueError("no public example has a finite loss: nothing can be measured.")
    whole, third = whole[:, finite], third[:, finite]
    noise = (whole - 3.0 * third).square().mean(dim=0) / 10.0
    signal = (whole.square().mean(dim=0) - noise).clamp(min=0.0)
    return PrecisionDiagnostic(
        signal=float(signal.sqrt().quantile(0.5)),
        rounding=float(noise.sqrt().quantile(0.5)),
        dtype=dtype,
        smoothing=smoothing,
    )


# ---------------------------------------------------------------- public data where none is given


def random_tokens(schema: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor] | None:
    """A batch of random tokens and labels with the keys of `schema`; the same in every run.

    Args:
      schema: a collated batch. Looked at: its keys, and its tensors' dtypes and numbers of
        dimensions. Not its values or sizes, which private data decide.
      model: its vocabulary, positions and number of labels bound what is drawn.

    Returns:
      `[ROWS, T]` token tensors and labels to match, or None where a key has no obvious random value.
    """
    like, config = schema.get("input_ids"), getattr(model, "config", None)
    if not isinstance(like, Tensor) or like.dim() != 2 or config is None:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    ids = _token_ids(model, config, generator)
    classes = int(getattr(config, "num_labels", 2))
    batch: dict[str, Tensor] = {}
    for key, value in schema.items():
        if key == "input_ids":
            batch[key] = ids
        elif key == "attention_mask":
            batch[key] = torch.ones_like(ids)
        elif key == "token_type_ids":
            batch[key] = torch.zeros_like(ids)
        elif key in ("start_positions", "end_positions"):
            batch[key] = torch.randint(ids.shape[1], (len(ids),), generator=generator)
        elif key not in ("labels", "label", "label_ids") or not isinstance(value, Tensor):
            return None
        elif value.is_floating_point():
            shape = (len(ids),) if value.dim() == 1 else (len(ids), classes)
            batch[key] = torch.randint(2, shape, generator=generator).to(value.dtype)
        elif value.dim() == 1:
            batch[key] = torch.randint(max(classes, 1), (len(ids),), generator=generator)
        elif value.dim() != 2:
            return None
        elif type(model).__name__.endswith("ForTokenClassification"):
            batch[key] = torch.randint(classes, tuple(ids.shape), generator=generator)
        else:
            batch[key] = ids.clone()
    return batch


def _token_ids(model: Any, config: Any, generator: torch.Generator) -> Tensor:
    """int64 [ROWS, T] without special tokens, but for an end-of-sequence token at the end."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 2 * _TOKENS
    shape = (ROWS, min(_TOKENS, max(2, positions // 2)))
    ordinary, end = ordinary_tokens(model)
    ids = ordinary[torch.randint(len(ordinary), shape, generator=generator)]
    if end is not None:
        ids[:, -1] = end
    return ids
