"""The coordinates of a model's trainable tensors: their storage, their grids, directions over them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_dpzero.perturbation.directions import (
    Direction,
    DirectionStream,
    check_distribution,
    largest_coordinate,
)
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.segments import AnySegment, runs, segment_of
from hf_dpzero.perturbation.trainable import aligned_offsets, check_trainable, gathered

if TYPE_CHECKING:
    from typing_extensions import Self

_address: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr  # the fastest over many tensors


class Coordinates:
    """The trainable tensors as one vector theta of dimension d, and directions in its space.

    Neighbouring small tensors are moved into one storage, so that many small ones cost what one large
    one costs; they stay the same `Parameter` objects. Arguments, attributes and errors are those of
    `ParameterSpace`.
    """

    def __init__(
        self, named_tensors: Iterable[tuple[str, Tensor]], distribution: str, smoothing: float
    ) -> None:
        check_distribution(distribution)
        named = list(named_tensors)
        check_trainable(named)
        self.distribution, self.smoothing = distribution, smoothing
        self.names = [name for name, _ in named]
        self.tensors = [tensor for _, tensor in named]
        self.offsets = aligned_offsets(self.tensors)
        sizes = [tensor.numel() for tensor in self.tensors]
        self.layout = list(zip(self.offsets, sizes, strict=True))
        self.dimension = sum(sizes)
        self._segments = self._make_segments()
        self._places = {
            int(number): (segment, m)
            for segment in self._segments
            for m, number in enumerate(segment.numbers)
        }
        self._addresses = list(map(_address, self.tensors))
        self._streams: dict[Direction, DirectionStream] = {}

    def _make_segments(self) -> Sequence[AnySegment]:
        return [segment_of(self.tensors, self.offsets, run) for run in runs(self.tensors)]

    @classmethod
    def from_model(cls, model: nn.Module, **settings: Any) -> Self:
        """The space of the parameters that train; tied weights count once.

        Args:
          model: its parameters with `requires_grad` are taken.
          settings: the keyword arguments of the class.

        Returns:
          The space.
        """
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls(trainable, **settings)

    def check_is_of(self, model: nn.Module) -> None:
        """Raises RuntimeError unless these are the very tensors that `model` computes with."""
        own = {id(p) for p in model.parameters() if p.requires_grad}
        if own != {id(tensor) for tensor in self.tensors}:
            raise RuntimeError(
                "the model's trainable parameters were replaced after training was set up, so "
                "perturbations would not reach it: wrap or move the model before the trainer."
            )
        self._follow_storage_()

    @property
    def snapped(self) -> bool:
        """Whether `snap_` (or `load_state_dict`) has put the tensors on their grids."""
        return all(segment.snapped for segment in self._segments)

    @torch.no_grad()
    def snap_(self) -> None:
        """Puts every float32 tensor on its grid; once, before the first perturbation.

        Moves weights by a relative rms of about 3e-6. Deterministic, so a replay does the same.
        """
        self._follow_storage_()
        for segment in self._segments:
            segment.snap_(self._reach)

    @property
    def _reach(self) -> float:
        """The largest move of a coordinate while one perturbation gives way to another."""
        return 2.0 * largest_coordinate(self.distribution) * abs(self.smoothing)

    def stream(self, direction: Direction) -> DirectionStream:
        """The coordinates of `direction` in this space (kept until another is perturbed along)."""
        if direction not in self._streams:
            device = self.tensors[0].device
            squares = functools.partial(dispatch.sum_of_squared_normals, device=device)
            self._streams[direction] = DirectionStream(
                direction, self.distribution, self.layout, squares
            )
        return self._streams[direction]

    def direction_norm(self, direction: Direction) -> float:
        """||u||_2: sqrt(d) for rademacher and sphere, the drawn norm for gaussian."""
        return math.sqrt(self._squared_norm(direction))

    def _squared_norm(self, direction: Direction) -> float:
        if self.distribution != "gaussian":
            return float(self.dimension)
        return self.stream(direction).squared_norm()

    @torch.no_grad()
    def gram(self, directions: Sequence[Direction]) -> Tensor:
        """<u_k, u_l>, float64 [K, K] on the CPU; the diagonal is `direction_norm` squared.

        Exact for rademacher. One direction costs its norm; more generate all coordinates, a few MB at
        a time.
        """
        norms = torch.tensor([self._squared_norm(u) for u in directions], dtype=torch.float64)
        if len(directions) == 1:
            return norms.diag()
        streams = [self.stream(u) for u in directions]
        scales = torch.tensor([stream.scale for stream in streams], dtype=torch.float64)
        places = zip(self.layout, self.tensors, strict=True)
        products = sum(dispatch.inner_products(streams, *at, t.device) for at, t in places)
        return (products * scales.outer(scales)).fill_diagonal_(0.0) + norms.diag()

    def _follow_storage_(self) -> None:
        """Wrappers may give a parameter new storage: works on that, never on a stale view.

        Looked at once a step, by `check_is_of` or when a settled space moves.
        """
        addresses = list(map(_address, self.tensors))
        if self._addresses == addresses:
            return
        for segment in self._segments:
            numbers, dtype = segment.numbers.tolist(), segment.flat.dtype
            for n in numbers:
                if self.tensors[n].dtype != dtype:
                    raise RuntimeError(
                        f"{self.names[n]} was {dtype} when training was set up and is "
                        f"{self.tensors[n].dtype} now: convert the model before the trainer."
                    )
            if any(addresses[n] != self._addresses[n] for n in numbers):
                segment.flat = gathered([self.tensors[n] for n in numbers], segment.starts)
        self._addresses = list(map(_address, self.tensors))
