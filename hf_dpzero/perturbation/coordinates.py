"""The coordinates of a model's trainable tensors: their storage, their grids, directions over them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from hf_dpzero.perturbation.directions import (
    LANES,
    Direction,
    DirectionStream,
    check_distribution,
    largest_coordinate,
)
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.parts import GridParts, RoundedParts
from hf_dpzero.perturbation.segments import GridSegment, RoundedSegment
from hf_dpzero.perturbation.sharding import (
    ShardedStream,
    is_sharded,
    largest_over,
    local,
    mesh_of,
    own_part,
)
from hf_dpzero.perturbation.trainable import check_trainable, gathered

_address: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr  # the fastest over many tensors
SMALL = 1 << 16  # elements below which neighbouring tensors share a segment
_PRODUCT_CHUNK = 1 << 19  # coordinates of all directions together, at a time
AnySegment = GridSegment | RoundedSegment


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
        # the largest move of a coordinate while one perturbation gives way to another
        self._reach = 2.0 * largest_coordinate(distribution) * abs(smoothing)
        self.names = [name for name, _ in named]
        self.parameters = [tensor for _, tensor in named]
        self._parts = [own_part(*entry) for entry in named]
        self.tensors = [part.tensor for part in self._parts]
        self._mesh = next((mesh_of(p) for p in self.parameters if is_sharded(p)), None)
        self.sharded = self._mesh is not None  # other processes hold parts of the tensors
        self._norms: dict[Direction, int] = {}  # of directions, where processes share the work
        sizes = [tensor.numel() for tensor in self.parameters]
        room = (-(-size // LANES) * LANES for size in sizes)  # tensors start at multiples of LANES
        self.offsets = [0, *itertools.accumulate(room)][:-1]
        self.layout = list(zip(self.offsets, sizes, strict=True))
        self.dimension = sum(sizes)
        self.snapped = (
            False  # whether `snap_` or `load_state_dict` has put the tensors on their grids
        )
        self._segments = self._make_segments()
        self._grids = [s for s in self._segments if isinstance(s, GridSegment)]
        self._places = {
            int(number): (segment, m)
            for segment in self._segments
            for m, number in enumerate(segment.numbers)
        }
        self._addresses = list(map(_address, self.tensors))
        self._moves = 0  # how often tensors got other storage
        self._streams: dict[Direction, DirectionStream] = {}

    def _make_segments(self) -> list[AnySegment]:
        split = [n for n, parameter in enumerate(self.parameters) if is_sharded(parameter)]
        reached = [n for n, t in enumerate(self.tensors) if dispatch.together_on(t.device)]
        apart = {*split, *reached}
        segments: list[AnySegment] = [
            segment_of(self.tensors, self.offsets, run)
            for run in runs(self.tensors, apart)
            if run[0] not in apart
        ]
        kinds: dict[Hashable, list[int]] = {}
        for n in sorted(apart):
            kind = self.tensors[n].dtype, self.tensors[n].device, n in split
            kinds.setdefault(kind, []).append(n)
        for numbers in kinds.values():
            parts, first = [self._parts[n] for n in numbers], numbers[0]
            made = GridParts if self.tensors[first].dtype == torch.float32 else RoundedParts
            segments.append(
                made(
                    [part.tensor for part in parts],
                    [self.offsets[n] for n in numbers],
                    [part.first for part in parts],
                    numbers,
                    largest_over(self.parameters[first]) if first in split else float,
                )
            )
        return segments

    def check_is_of(self, model: nn.Module) -> None:
        """Raises RuntimeError unless these are the very tensors that `model` computes with."""
        own = {id(p) for p in model.parameters() if p.requires_grad}
        if own != {id(tensor) for tensor in self.parameters}:
            raise RuntimeError(
                "the model's trainable parameters were replaced after training was set up, so "
                "perturbations would not reach it: wrap or move the model before the trainer."
            )
        self._follow_storage_()

    @torch.no_grad()
    def snap_(self) -> None:
        """Puts every float32 tensor on its grid; once, before the first perturbation.

        Moves weights by a relative rms of about 3e-6. Deterministic, so a replay does the same.
        """
        self._follow_storage_()
        for segment in self._segments:
            segment.snap_(self._reach)
        self.snapped = True

    def stream(self, direction: Direction) -> DirectionStream:
        """Returns the coordinates of `direction` here (kept until another is perturbed along)."""
        if direction not in self._streams:
            squares = functools.partial(
                dispatch.sum_of_squared_normals, device=self.tensors[0].device
            )
            given = direction, self.distribution, self.layout, squares
            if self._mesh is None:
                self._streams[direction] = DirectionStream(*given)
            else:
                here = [
                    (offset + part.first, part.tensor.numel())
                    for offset, part, p in zip(
                        self.offsets, self._parts, self.parameters, strict=True
                    )
                    # tensors that are not split count on the first process
                    if part.tensor.numel() and (is_sharded(p) or self._mesh.get_rank() == 0)
                ]
                self._streams[direction] = ShardedStream(*given, here, self._mesh, self._norms)
        return self._streams[direction]

    @torch.no_grad()
    def gram(self, directions: Sequence[Direction]) -> Tensor:
        """Returns <u_k, u_l>, float64 [K, K] on the CPU; the squared norms are on the diagonal.

        Exact for rademacher. One direction costs its norm; more generate all coordinates, a few MB at
        a time.
        """
        streams = [self.stream(u) for u in directions]
        drawn = self.distribution == "gaussian"  # else ||u||^2 = d by construction
        squares = [s.squared_norm() if drawn else float(self.dimension) for s in streams]
        norms = torch.tensor(squares, dtype=torch.float64)
        if len(streams) == 1:
            return norms.diag()
        scales = torch.tensor([stream.scale for stream in streams], dtype=torch.float64)
        products = sum(self._products(number, streams) for number in range(len(self.tensors)))
        return (products * scales.outer(scales)).fill_diagonal_(0.0) + norms.diag()

    def _products(self, number: int, streams: Sequence[DirectionStream]) -> Tensor:
        """<u_k, u_l> of the raw coordinates of one tensor, float64 [K, K] on the CPU."""
        (offset, size), device = self.layout[number], self.tensors[number].device
        total = torch.zeros(len(streams), len(streams), dtype=torch.float64, device=device)
        width = max(_PRODUCT_CHUNK // len(streams) // LANES, 1) * LANES
        for start in range(0, size, width):
            count = min(width, size - start)
            u = torch.stack([_raw(s, offset + start, count, device) for s in streams])
            if (
                self.distribution != "rademacher"
            ):  # sums of fewer than 2^24 signs are exact in float32
                u = u.double()
            total += u @ u.T
        return total.cpu()

    def _combination(
        self, number: int, start: int, count: int,
        streams: Sequence[DirectionStream], coefficients: Sequence[float],
    ) -> Tensor:  # fmt: skip
        """Coordinates start .. start+count of sum_k c_k u_k in one tensor (K >= 1), float64 [count]."""
        offset, device = self.offsets[number] + start, self.tensors[number].device
        terms = (
            _raw(stream, offset, count, device).double().mul_(c * stream.scale)
            for stream, c in zip(streams, coefficients, strict=True)
        )
        return functools.reduce(Tensor.add_, terms)

    def _follow_storage_(self) -> None:
        # Wrappers may give a parameter new storage: work on that, never on a stale view. Looked at once
        # a step, by `check_is_of` or when a settled space moves.
        if self.sharded:
            self.tensors[:] = map(local, self.parameters)
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
                segment.follow_([self.tensors[n] for n in numbers])
                self._moves += 1
        self._addresses = list(map(_address, self.tensors))


def runs(tensors: Sequence[Tensor], apart: Collection[int] = ()) -> list[list[int]]:
    """Groups neighbouring small tensors of one dtype and device, which will share a segment.

    Args:
      tensors: all of them, in order.
      apart: numbers that get a segment of their own, however small.

    Returns:
      Each group's numbers, in order.
    """

    def kind(number: int) -> Hashable:
        tensor = tensors[number]
        alone = number if tensor.numel() >= SMALL or number in apart else -1
        return alone, tensor.dtype, tensor.device

    return [list(run) for _, run in itertools.groupby(range(len(tensors)), kind)]


def segment_of(
    tensors: Sequence[Tensor], offsets: Sequence[int], numbers: Sequence[int]
) -> AnySegment:
    """Makes the segment of some tensors, which become views of it.

    Args:
      tensors, offsets: all of a space's; of tensors that are split, the parts that lie here.
      numbers: which of them, neighbours.

    Returns:
      A `GridSegment` for float32, else a `RoundedSegment`.
    """
    chosen = [tensors[n] for n in numbers]
    starts = [offsets[n] - offsets[numbers[0]] for n in numbers]
    flat = gathered(chosen, starts)
    kind = GridSegment if flat.dtype == torch.float32 else RoundedSegment
    return kind(flat, offsets[numbers[0]], [t.numel() for t in chosen], starts, numbers)


def _raw(stream: DirectionStream, start: int, count: int, device: torch.device) -> Tensor:
    """Coordinates start .. start+count before the stream's scale, float32 [count], exact."""
    return dispatch.coordinates(
        stream.key, stream.distribution != "rademacher", start, count, device
    )
