"""The perturbation engine: theta + lambda u in place, undone bit for bit, and the update.

A `ParameterSpace` holds the trainable tensors as one long vector theta of dimension d (tied weights
once) and remembers its `position`: the terms a_k u_k that currently stand on top of theta. Moving
from one position to the next, restoring and updating are one pass over the parameters each, and
are exact: float32 tensors live on a lattice (see `lattice`), lower precisions are restored from a
copy. An update may be deferred into the pass that perturbs next. Extra memory is a MB or two for
float32.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hf_dpzero.perturbation.directions import (
    LANES,
    Direction,
    DirectionStream,
    check_distribution,
    largest_coordinate,
)
from hf_dpzero.perturbation.interrupts import held_back
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.segments import (
    CHUNK,
    AnySegment,
    Change,
    LatticeSegment,
    runs,
    segment_of,
)
from hf_dpzero.perturbation.trainable import aligned_offsets, check_trainable, gathered
from hf_dpzero.perturbation.vectors import combination, inner_products

if TYPE_CHECKING:
    from typing_extensions import Self

_address: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr  # the fastest over many tensors
_LARGEST_GROWTH = 2.0**100
Position = tuple[tuple[Direction, float], ...]
Move = tuple[float, float, float]  # a direction's old and new coefficient, and its update


class Stack(NamedTuple):
    """Copies of a space's tensors.

    Attributes:
      flats: [copies, n] of each segment.
      tensors: [copies, *shape] of each tensor, in the flats' memory.
    """

    flats: list[Tensor]
    tensors: list[Tensor]


class ParameterSpace:
    """The trainable coordinates of a model, perturbed and updated in place.

    Neighbouring small tensors are moved into one storage, so that a pass over many costs what a
    pass over one costs; they stay the same `Parameter` objects.

    Args:
      named_tensors: (name, tensor) of every trainable tensor, in the order that fixes the
        coordinates. float32, bfloat16 or float16, none sharing memory with another.
      distribution: `rademacher`, `gaussian` or `sphere`.
      smoothing: lambda, the largest coefficient of a perturbation (the grids leave room for it).
      decayed: names of the tensors that weight decay applies to; None for all.

    Attributes:
      layout: (offset, size) of each tensor in the direction's index space.
      traffic: bytes of parameters read and written by passes so far.

    Raises:
      ValueError: nothing is trainable, an unsupported dtype, meta tensors, shared memory.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        distribution: str = "rademacher",
        smoothing: float = 1e-3,
        decayed: Collection[str] | None = None,
    ) -> None:
        check_distribution(distribution)
        named = list(named_tensors)
        check_trainable(named)
        self.distribution, self.smoothing = distribution, smoothing
        self.names = [name for name, _ in named]
        self.decayed = set(self.names if decayed is None else decayed)
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
        self._last_update: dict[Direction, float] = {}
        self._pending: dict[Direction, float] = {}
        self.position: Position = ()
        self._failed = False
        self.traffic = 0

    def _make_segments(self) -> Sequence[AnySegment]:
        """Every large tensor by itself; runs of small ones of one kind moved into one storage."""
        return [segment_of(self.tensors, self.offsets, run) for run in runs(self.tensors)]

    @classmethod
    def from_model(cls, model: nn.Module, **settings: Any) -> Self:
        """The space of the parameters with requires_grad; tied weights count once."""
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

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to stay on the same grids (public, JSON-safe)."""
        assert self.settled, "settle_() before saving"
        places = (self._places[number] for number in range(len(self.names)))
        return {name: s.state(m) for name, (s, m) in zip(self.names, places, strict=True)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the tensors must already hold the values saved with it."""
        if list(state) != self.names:
            raise ValueError(
                f"the checkpoint's trainable tensors ({len(state)}) are not this model's "
                f"({len(self.names)}): resume with the same model and `trainable`."
            )
        self._follow_storage_()
        for number, name in enumerate(self.names):
            segment, m = self._places[number]
            try:
                segment.load_(m, state[name])
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
            segment.snapped = True

    # ------------------------------------------------------------------ perturbation

    @property
    def settled(self) -> bool:
        """Whether the tensors hold theta: no perturbation stands, no update waits."""
        return not self.position and not self._pending and not self._failed

    @property
    def waiting(self) -> bool:
        """Whether a deferred update is still to be made."""
        return bool(self._pending)

    @torch.no_grad()
    def move_to_(self, position: Position) -> None:
        """Makes the tensors theta + sum_k a_k u_k for the position's (u_k, a_k); () restores.

        Exact: any sequence of moves that ends at () leaves theta bit for bit as it was. An update
        that waits is made in the same pass.
        """
        if self.settled:
            self._follow_storage_()
        self._ensure_snapped()
        self._refuse_out_of_reach(position)
        old, new, update = dict(self.position), dict(position), self._pending
        moves = {
            u: (old.get(u, 0.0), new.get(u, 0.0), update.get(u, 0.0))
            for u in sorted({**update, **old, **new})  # whatever the order or the path here
        }
        with self._whole():
            self._pass_(moves)
            self.position, self._pending = tuple(position), {}
        self._last_update = update or self._last_update  # the next shares its window's directions
        kept = {**new, **self._last_update}
        self._streams = {u: stream for u, stream in self._streams.items() if u in kept}

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What happens inside happens to all tensors: not interrupted, and never carried on after a
        failure half-way."""
        if self._failed:
            raise RuntimeError(
                "a pass over the parameters failed half-way, so they hold neither the old nor the new "
                "values: load the model anew and resume from a checkpoint."
            )
        with held_back():
            self._failed = True
            yield
            self._written_()
            self._failed = False

    def _written_(self) -> None:
        """Called when the segments hold new values, before anyone may read them."""

    def settle_(self) -> None:
        """Takes every perturbation off and makes the update that waits, if any.

        Afterwards the tensors may be read, saved, shared.
        """
        if not self.settled:
            self.move_to_(())

    @contextlib.contextmanager
    def perturbed(self, direction: Direction, scale: float) -> Iterator[None]:
        """theta + scale * u inside, theta bit for bit on exit, also after an exception."""
        before = () if self.waiting else self.position
        try:
            self.move_to_((*before, (direction, scale)))
            yield
        finally:
            self.move_to_(before)

    @torch.no_grad()
    def write_perturbed_(self, number: int, position: Position, out: Tensor) -> None:
        """out = tensor `number` of theta + sum_k a_k u_k, as `move_to_` would leave it there.

        Args:
          number: place of the tensor among `tensors`.
          position: as for `move_to_`; at least one term.
          out: contiguous, of the tensor's shape, dtype and device. theta, settled, is untouched,
            and read where it was, though the parameter may hold such a copy for the moment.
        """
        self._ensure_snapped()
        segment, m = self._places[number]
        self._write(number, position, segment.member(m), out, None)

    def write_perturbed_pair_(
        self, number: int, direction: Direction, scale: float, plus: Tensor, minus: Tensor
    ) -> None:
        """plus = theta + scale u and minus = theta - scale u for one tensor."""
        self.write_perturbed_(number, ((direction, scale),), plus)
        if minus.dtype != torch.float32:
            return self.write_perturbed_(number, ((direction, -scale),), minus)
        segment, m = self._places[number]
        theta = segment.member(m).view(minus.shape)
        with torch.no_grad():  # on the grid both subtractions are exact, so u is drawn once
            torch.sub(theta, plus, out=minus).add_(theta)

    def new_stack(self, copies: int) -> Stack:
        """Memory for that many copies of all tensors, uninitialised."""
        flats = [segment.flat.new_empty(copies, segment.flat.numel()) for segment in self._segments]
        place = {id(segment): flat for segment, flat in zip(self._segments, flats, strict=True)}
        tensors = []
        for number, tensor in enumerate(self.tensors):
            segment, m = self._places[number]
            part = place[id(segment)].narrow(1, segment.starts[m], tensor.numel())
            tensors.append(part.view(copies, *tensor.shape).data)  # each with its own version
        return Stack(flats, tensors)

    @torch.no_grad()
    def write_stack_(self, directions: Sequence[Direction], scale: float, stack: Stack) -> None:
        """The stack's first K copies become theta + scale u_k, the last K theta - scale u_k.

        The bits of `write_perturbed_pair_`, with little overhead for many small tensors.

        Args:
          directions: the K of them, distinct.
          stack: of 2K copies, from `new_stack`; float32.
        """
        self._ensure_snapped()
        assert self.settled, "settle_() before writing perturbed copies"
        self._refuse_out_of_reach(((directions[0], scale),))
        changes = [Change(self.stream(u), 0.0, scale, 0.0) for u in directions]
        for segment, flat in zip(self._segments, stack.flats, strict=True):
            assert isinstance(segment, LatticeSegment), "stacks are of float32 tensors"
            segment.write_stack_(changes, *flat.chunk(2))
            self.traffic += 2 * flat.numel() * flat.element_size()

    @torch.no_grad()
    def write_perturbed_rows_(
        self, number: int, rows: Tensor, position: Position, out: Tensor
    ) -> None:
        """As `write_perturbed_`, for the rows [U] (int64) of a tensor [V, h]; out is [U, h]."""
        self._ensure_snapped()
        segment, m = self._places[number]
        table, width = self.tensors[number], self.tensors[number].shape[1]
        source = segment.member(m).view(table.shape).index_select(0, rows)
        if width % LANES == 0:
            return self._write(number, position, source, out, rows.cpu().numpy() * width)
        whole = torch.empty_like(table)
        self.write_perturbed_(number, position, whole)
        out.copy_(whole.index_select(0, rows))

    def _write(
        self, number: int, position: Position, source: Tensor, out: Tensor, pieces: Any
    ) -> None:
        assert self.settled, "settle_() before writing perturbed copies"
        self._refuse_out_of_reach(position)
        changes = [Change(self.stream(u), 0.0, a, 0.0) for u, a in sorted(position)]
        segment, m = self._places[number]
        segment.write_(m, changes, source.view(-1), out.view(-1), pieces)
        self.traffic += 2 * out.numel() * out.element_size()

    # ------------------------------------------------------------------ updates

    @torch.no_grad()
    def step_(
        self,
        directions: Sequence[Direction],
        coefficients: Sequence[float],
        decay: float = 0.0,
        defer: bool = False,
    ) -> None:
        """theta <- (1 - decay) theta + sum_k c_k u_k, fused with the restore of the position.

        Args:
          directions: the step's K directions.
          coefficients: c_k, for DPZero -learning_rate * value_k (Algorithm 2, line 3).
          decay: learning_rate * weight_decay; 0 skips that pass.
          defer: leave restore and update to the next `move_to_` or `settle_`, which makes them in
            its own pass, with the same result to the last bit. Until then the tensors may not be
            read.

        Raises:
          ValueError: a coefficient that is not finite or absurdly large, a decay outside [0, 1];
            theta is settled and unchanged then.
        """
        if self.settled:
            self._follow_storage_()
        self._ensure_snapped()
        if self._pending:
            self.settle_()
        self._refuse_update(directions, coefficients, decay)
        if decay:
            self.settle_()
        with held_back():
            if decay:
                self._decay_(decay, self.stream(directions[0]))
            self._make_room_(coefficients)
            self._pending = dict(zip(directions, coefficients, strict=True))
        if not defer:
            self.settle_()

    def _decay_(self, decay: float, stream: DirectionStream) -> None:
        decayed = np.array([name in self.decayed for name in self.names])
        for segment in self._segments:
            segment.decay_(decay, stream, decayed[segment.numbers.astype(np.int64)])

    def _refuse_update(
        self, directions: Sequence[Direction], coefficients: Sequence[float], decay: float
    ) -> None:
        self._refuse_mismatch(directions, coefficients)
        if not (self._growth(coefficients) <= _LARGEST_GROWTH and 0.0 <= decay <= 1.0):
            self.settle_()
            raise ValueError(
                f"update coefficients {tuple(coefficients)} with decay {decay} are not finite, or "
                "out of range; nothing was changed. Lower learning_rate (or weight_decay)."
            )

    def _refuse_mismatch(
        self, directions: Sequence[Direction], coefficients: Sequence[float]
    ) -> None:
        if len({*directions}) != len(coefficients) or len(directions) != len(coefficients):
            self.settle_()
            raise ValueError(
                f"{len(coefficients)} coefficients for {len(directions)} directions: an update needs "
                "as many distinct directions as coefficients."
            )

    def _growth(self, coefficients: Sequence[float]) -> float:
        """The largest |sum_k c_k u_k[i]|; NaN and infinity come through."""
        return largest_coordinate(self.distribution) * sum(abs(c) for c in coefficients)

    @torch.no_grad()
    def dense_step_(
        self,
        directions: Sequence[Direction],
        coefficients: Sequence[float],
        noise: Callable[[int, int], Tensor],
    ) -> None:
        """theta <- theta + sum_k c_k u_k + noise, noise a dense vector (DPGD-0th, Algorithm 1).

        The noise joins the sum before anything is rounded to the parameters' precision, so that this
        rounding is a function of the noised vector alone and costs no privacy.

        Args:
          directions: u_k, at least one, distinct.
          coefficients: c_k; private until the noise is on them.
          noise: (part, count) -> float32 [count], fresh for every part.

        Raises:
          ValueError: as many coefficients as directions are needed; theta is settled then.
        """
        if self.settled:
            self._follow_storage_()
        self._ensure_snapped()
        self.settle_()
        self._refuse_mismatch(directions, coefficients)
        streams, part = [self.stream(u) for u in directions], 0
        with self._whole():
            for number, (offset, size) in enumerate(self.layout):
                segment, m = self._places[number]
                device = segment.flat.device
                for start in range(0, size, CHUNK):
                    count = min(CHUNK, size - start)
                    values = combination(streams, coefficients, offset + start, count, device)
                    values.add_(noise(part, count).to(device))
                    segment.add_dense_(m, start, values, streams[0], self._reach)
                    part += 1
        self._streams.clear()

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

        Exact for rademacher. One direction costs what its norm costs, more a pass over all
        coordinates, a few MB at a time.
        """
        norms = torch.tensor([self._squared_norm(u) for u in directions], dtype=torch.float64)
        if len(directions) == 1:
            return norms.diag()
        streams = [self.stream(u) for u in directions]
        scales = torch.tensor([stream.scale for stream in streams], dtype=torch.float64)
        products = sum(self._products(n, streams) for n in range(len(self.layout)))
        return (products * scales.outer(scales)).fill_diagonal_(0.0) + norms.diag()

    def _products(self, number: int, streams: Sequence[DirectionStream]) -> Tensor:
        """Inner products of the raw coordinates of one tensor, float64 [K, K] on the CPU."""
        return inner_products(streams, *self.layout[number], self.tensors[number].device)

    def _refuse_out_of_reach(self, position: Position) -> None:
        if len({u for u, _ in position}) != len(position):
            raise ValueError(f"position names a direction twice: {position}; add its coefficients.")
        size = sum(abs(a) for _, a in position)
        if not size <= self.smoothing * (1 + 1e-12):
            raise ValueError(
                f"a perturbation of {size} is larger than smoothing={self.smoothing}, for which the "
                "grids leave room: build the ParameterSpace with a larger smoothing."
            )

    def _ensure_snapped(self) -> None:
        if not self.snapped:
            self.snap_()

    def _make_room_(self, coefficients: Sequence[float]) -> None:
        wanted = (self._growth(coefficients), self._reach, len(coefficients))
        if any(segment.short(*wanted).any() for segment in self._segments):
            self.settle_()
        for segment in self._segments:
            segment.make_room_(*wanted)

    def _follow_storage_(self) -> None:
        """Wrappers may give a parameter new storage: works on that, never on a stale view.

        Looked at once a step, by `check_is_of` or when a settled space moves.
        """
        if self._addresses == list(map(_address, self.tensors)):
            return
        for segment in self._segments:
            numbers = segment.numbers.tolist()
            self._refuse_other_dtype(numbers, segment.flat.dtype)
            moved = any(_address(self.tensors[n]) != self._addresses[n] for n in numbers)
            if moved:
                segment.flat = gathered([self.tensors[n] for n in numbers], segment.starts)
        self._addresses = list(map(_address, self.tensors))

    def _refuse_other_dtype(self, numbers: Sequence[int], dtype: torch.dtype) -> None:
        for n in numbers:
            if self.tensors[n].dtype != dtype:
                raise RuntimeError(
                    f"{self.names[n]} was {dtype} when training was set up and is "
                    f"{self.tensors[n].dtype} now: convert the model before the trainer."
                )

    def _pass_(self, moves: Mapping[Direction, Move]) -> None:
        present = max((u.step for u, move in moves.items() if move[2]), default=0)
        changes = [
            Change(self.stream(u), *move, age=present - u.step if move[2] else 0)
            for u, move in moves.items()
            if any(move)
        ]
        if changes:
            self.traffic += sum(segment.apply_(changes) for segment in self._segments)
