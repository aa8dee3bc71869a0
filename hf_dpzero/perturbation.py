"""The perturbation engine: theta + lambda u in place, undone bit for bit, and the update.

A `ParameterSpace` holds the trainable tensors as one long vector theta of dimension d (tied weights
once) and remembers its `position`: the terms a_k u_k that currently stand on top of theta. Moving
from one position to the next, restoring and updating are one pass over the parameters each, and
are exact: float32 tensors live on a lattice (see `lattice`), lower precisions keep their settled
values beside them. Extra memory is a few MB for float32.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.directions import (
    ALIGNMENT,
    Direction,
    DirectionStream,
    check_distribution,
    largest_coordinate,
)
from hf_dpzero.tensors import CHUNK, Change, LatticeTensor, SnapshotTensor

_LARGEST_GROWTH = 2.0**100
Position = tuple[tuple[Direction, float], ...]


class ParameterSpace:
    """The trainable coordinates of a model, perturbed and updated in place.

    Args:
      named_tensors: (name, tensor) of every trainable tensor, in the order that fixes the
        coordinates. float32 or bfloat16, contiguous, none sharing memory with another.
      distribution: `rademacher`, `gaussian` or `sphere`.
      smoothing: lambda, the largest coefficient of a perturbation (the grids leave room for it).
      decayed: names of the tensors that weight decay applies to; None for all.

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
        if not named:
            raise ValueError("no parameter is trainable: set requires_grad or loosen `trainable`.")
        for name, tensor in named:
            _check_supported(name, tensor)
        _refuse_shared_memory(named)
        _make_contiguous_(named)
        self.distribution, self.smoothing = distribution, smoothing
        self.names = [name for name, _ in named]
        self.decayed = set(self.names if decayed is None else decayed)
        self.tensors = [tensor for _, tensor in named]
        self.offsets = _aligned_offsets(self.tensors)
        self.dimension = sum(tensor.numel() for tensor in self.tensors)
        self._cells = [
            (LatticeTensor if t.dtype == torch.float32 else SnapshotTensor)(t, number, offset)
            for number, (t, offset) in enumerate(zip(self.tensors, self.offsets, strict=True))
        ]
        self._workspaces: dict[torch.device, Tensor] = {}
        self._streams: dict[Direction, DirectionStream] = {}
        self.position: Position = ()

    @classmethod
    def from_model(cls, model: nn.Module, **settings: Any) -> ParameterSpace:
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

    @property
    def layout(self) -> list[tuple[int, int]]:
        """(offset, size) of each tensor in the direction's index space."""
        return [(o, t.numel()) for o, t in zip(self.offsets, self.tensors, strict=True)]

    @property
    def snapped(self) -> bool:
        """Whether `snap_` (or `load_state_dict`) has put the tensors on their grids."""
        return all(cell.exponent is not None for cell in self._cells)

    @torch.no_grad()
    def snap_(self) -> None:
        """Puts every float32 tensor on its grid; once, before the first perturbation.

        Moves weights by a relative rms of about 3e-6. Deterministic, so a replay does the same.
        """
        for cell in self._cells:
            cell.snap_(self._reach)

    @property
    def _reach(self) -> float:
        """The largest move of a coordinate while one perturbation gives way to another."""
        return 2.0 * largest_coordinate(self.distribution) * abs(self.smoothing)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to stay on the same grids (public, JSON-safe)."""
        assert not self.position, "settle_() before saving"
        return {
            name: {"exponent": cell.exponent, "bound": cell.bound}
            for name, cell in zip(self.names, self._cells, strict=True)
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the tensors must already hold the values saved with it."""
        if list(state) != self.names:
            raise ValueError(
                f"the checkpoint's trainable tensors ({len(state)}) are not this model's "
                f"({len(self.names)}): resume with the same model and `trainable`."
            )
        for name, cell in zip(self.names, self._cells, strict=True):
            try:
                cell.load_(state[name]["exponent"], state[name]["bound"])
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None

    @torch.no_grad()
    def move_to_(self, position: Position) -> None:
        """Makes the tensors theta + sum_k a_k u_k for the position's (u_k, a_k); () restores.

        Exact: any sequence of moves that ends at () leaves theta bit for bit as it was.
        """
        self._ensure_snapped()
        old, new = dict(self.position), dict(position)
        self._refuse_out_of_reach(position, new)
        self._pass_({u: (old.get(u, 0.0), new.get(u, 0.0), 0.0) for u in {**old, **new}})
        self.position = tuple(position)

    def settle_(self) -> None:
        """Takes every perturbation off; afterwards the tensors may be read, saved, shared."""
        if self.position:
            self.move_to_(())

    @contextlib.contextmanager
    def perturbed(self, direction: Direction, scale: float) -> Iterator[None]:
        """theta + scale * u inside, theta bit for bit on exit, also after an exception."""
        before = self.position
        try:
            self.move_to_((*before, (direction, scale)))
            yield
        finally:
            self.move_to_(before)

    @torch.no_grad()
    def step_(
        self, directions: Sequence[Direction], coefficients: Sequence[float], decay: float = 0.0
    ) -> None:
        """theta <- (1 - decay) theta + sum_k c_k u_k, fused with the restore of the position.

        Args:
          directions: the step's K directions.
          coefficients: c_k, for DPZero -learning_rate * value_k (Algorithm 2, line 3).
          decay: learning_rate * weight_decay; 0 skips that pass.

        Raises:
          ValueError: a coefficient that is not finite or absurdly large, a decay outside [0, 1];
            theta is settled and unchanged then.
        """
        self._ensure_snapped()
        self._refuse_update(directions, coefficients, decay)
        if decay:
            self._decay_(decay, self.stream(directions[0]))
        self._make_room_(coefficients)
        old, update = dict(self.position), dict(zip(directions, coefficients, strict=True))
        # The update's own order first: it must not depend on where the perturbation stood.
        self._pass_({u: (old.get(u, 0.0), 0.0, update.get(u, 0.0)) for u in {**update, **old}})
        self.position = ()
        self._streams.clear()

    def _decay_(self, decay: float, stream: DirectionStream) -> None:
        self.settle_()
        for name, cell in zip(self.names, self._cells, strict=True):
            if name in self.decayed:
                cell.decay_(decay, stream)

    def _refuse_update(
        self, directions: Sequence[Direction], coefficients: Sequence[float], decay: float
    ) -> None:
        if len({*directions}) != len(coefficients) or len(directions) != len(coefficients):
            self.settle_()
            raise ValueError(
                f"{len(coefficients)} coefficients for {len(directions)} directions: an update needs "
                "as many distinct directions as coefficients."
            )
        if not (self._growth(coefficients) <= _LARGEST_GROWTH and 0.0 <= decay <= 1.0):
            self.settle_()
            raise ValueError(
                f"update coefficients {tuple(coefficients)} with decay {decay} are not finite, or "
                "out of range; nothing was changed. Lower learning_rate (or weight_decay)."
            )

    def _growth(self, coefficients: Sequence[float]) -> float:
        """The largest |sum_k c_k u_k[i]|; NaN and infinity come through."""
        return largest_coordinate(self.distribution) * sum(abs(c) for c in coefficients)

    @torch.no_grad()
    def dense_step_(
        self, direction: Direction, coefficient: float, noise: Callable[[int, int], Tensor]
    ) -> None:
        """theta <- theta + coefficient * u + noise, noise a dense vector (DPGD-0th, Algorithm 1).

        The noise joins coefficient * u before anything is rounded, so that the rounding is a
        function of the noised vector alone and costs no privacy.

        Args:
          direction: u.
          coefficient: of u; private until the noise is on it.
          noise: (part, count) -> float32 [count], fresh for every part.
        """
        self._ensure_snapped()
        self.settle_()
        stream, part = self.stream(direction), 0
        for cell in self._cells:
            for start in range(0, cell.flat.numel(), CHUNK):
                count = min(CHUNK, cell.flat.numel() - start)
                u = stream.raw(cell.offset + start, count, cell.flat.device) * stream.scale
                values = u.mul_(coefficient).add_(noise(part, count).to(u.device))
                uniforms = stream.uniforms(cell.offset + start, count, u.device)
                cell.add_dense_(start, values, uniforms, self._reach)
                part += 1
        self._streams.clear()

    def stream(self, direction: Direction) -> DirectionStream:
        """The coordinates of `direction` in this space (kept until the step ends)."""
        if direction not in self._streams:
            self._streams[direction] = DirectionStream(direction, self.distribution, self.layout)
        return self._streams[direction]

    def direction_norm(self, direction: Direction) -> float:
        """||u||_2: sqrt(d) for rademacher and sphere, the drawn norm for gaussian."""
        if self.distribution != "gaussian":
            return math.sqrt(self.dimension)
        return math.sqrt(self.stream(direction).squared_norm())

    def _refuse_out_of_reach(self, position: Position, new: Mapping[Direction, float]) -> None:
        if len(new) != len(position):
            raise ValueError(f"position names a direction twice: {position}; add its coefficients.")
        size = sum(abs(a) for a in new.values())
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
        if any(cell.is_short(*wanted) for cell in self._cells):
            self.settle_()
        for cell in self._cells:
            cell.make_room_(*wanted)

    def _pass_(self, moves: Mapping[Direction, tuple[float, float, float]]) -> None:
        changes = [Change(self.stream(u), *m) for u, m in moves.items() if any(m)]
        if not changes:
            return
        for cell in self._cells:
            cell.apply_(changes, self._workspace(cell.flat.device))

    def _workspace(self, device: torch.device) -> Tensor:
        if device not in self._workspaces:
            largest = min(CHUNK, max(t.numel() for t in self.tensors))
            self._workspaces[device] = torch.empty(-(-largest // 8) * 8, device=device)
        return self._workspaces[device]


def _check_supported(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: load its weights before training.")
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{name} has dtype {tensor.dtype}, which cannot be perturbed exactly: load the model "
            "in float32 or bfloat16, or train float32 adapters on top of it."
        )


def _make_contiguous_(named: Sequence[tuple[str, Tensor]]) -> None:
    for _, tensor in named:
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to past its last, whatever its strides."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _refuse_shared_memory(named: Sequence[tuple[str, Tensor]]) -> None:
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + _extent(t), name) for name, t in named if t.numel()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(
                f"{first} and {second} share memory without being one tied parameter: "
                "freeze one of them or clone it."
            )


def _aligned_offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor starts in the index space: multiples of ALIGNMENT, in order."""
    offsets, position = [], 0
    for tensor in tensors:
        offsets.append(position)
        position += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
    return offsets


@torch.no_grad()
def digest_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every tensor, in order."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().contiguous().view(-1)
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK].cpu().view(torch.uint8)
            digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def digest_model(model: nn.Module) -> str:
    """SHA-256 (hex) over every parameter of `model`, frozen ones included, tied ones once."""
    return digest_tensors(model.named_parameters())
