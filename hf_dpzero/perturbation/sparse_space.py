"""Directions that move a fraction of the coordinates: the smallest of the public base weights.

Sparse-MeZO (Liu et al. 2024, arXiv:2402.15751) perturbs and updates only the weights of small
magnitude, tensor by tensor. There the weights are compared anew in every forward pass; here once,
where training starts, so that the choice is public, a replay makes it again, and a coordinate that
moved can always be moved back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.perturbation import masks
from hf_dpzero.perturbation.exact_grid import exponent_for, largest_magnitude
from hf_dpzero.perturbation.in_place_space import InPlaceSpace
from hf_dpzero.perturbation.trainable import check_trainable, gathered

_MOVED = 12  # bytes that scattering a value reads and writes: itself twice, its index


class SparseSpace(InPlaceSpace):
    """The chosen coordinates of every trainable tensor, as a space of their own.

    Underneath is an ordinary space over compact tensors, one for each parameter, that hold the chosen
    values in order; after every move they are scattered into the parameters. So every distribution,
    every backend and every guarantee of `ParameterSpace` holds on the chosen coordinates, and the
    others keep their bits. `layout`, `dimension` and norms are those of the chosen coordinates;
    weight decay and dense noise act on them alone.

    Extra memory: 8 bytes for each chosen coordinate (its value and an int32 index), density x twice
    the parameters' size.

    Args:
      named_tensors: float32, as for `ParameterSpace`.
      density: in (0, 1]; ceil(density * numel) coordinates of each tensor move.
      settings: as for `ParameterSpace`.

    Raises:
      ValueError: a density outside (0, 1], or what `ParameterSpace` and `InPlaceSpace` refuse.
    """

    name = "sparse"

    def __init__(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, density: float, **settings: Any
    ) -> None:
        named = list(named_tensors)
        check_density(density)
        check_trainable(named)
        for name, tensor in named:
            self._refuse_half(name, tensor)
        sizes = [masks.count_of(tensor.numel(), density) for _, tensor in named]
        compact = [torch.zeros(n, device=t.device) for n, (_, t) in zip(sizes, named, strict=True)]
        super().__init__(zip([name for name, _ in named], compact, strict=True), **settings)
        self.density, self.tensors = density, [tensor for _, tensor in named]
        self._compact = compact
        self._indices: list[Tensor] = []
        self._seen: list[tuple[int, int]] = []  # where the parameters were, and how often written

    @torch.no_grad()
    def snap_(self) -> None:
        """Chooses the coordinates, the first time, and puts them on their grids."""
        if not self._indices:
            self._indices = [self._choose(number) for number in range(len(self.tensors))]
        self._gather_()
        super().snap_()
        self._scatter_()

    def _choose(self, number: int) -> Tensor:
        values = self._row(number)
        exponent_for(largest_magnitude(values))  # refuses weights that are not finite
        return masks.smallest(values, self._compact[number].numel())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the choice, which its weights no longer tell, and the grids."""
        return {
            "density": self.density,
            "mask_digest": masks.digest(self._masks()),
            "masks": {name: masks.to_text(chosen, size) for name, size, chosen in self._masks()},
            "tensors": super().state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the tensors must already hold the values saved with it.

        Raises:
          ValueError: the state of another space, a mask that does not match its digest, or values
            that are not on the grid of the saved state.
        """
        self._refuse_other_state(state)
        self._indices = [self._read_mask(n, state["masks"]) for n in range(len(self.names))]
        found = masks.digest(self._masks())
        if found != state["mask_digest"]:
            self._indices = []
            raise ValueError(
                f"the checkpoint's masks have digest {found}, not the {state['mask_digest']} that was "
                "saved with them: the file was changed; restore it from a copy."
            )
        self._gather_()
        super().load_state_dict(state["tensors"])

    def _refuse_other_state(self, state: Mapping[str, Any]) -> None:
        if state.get("density") != self.density or list(state.get("masks", ())) != self.names:
            raise ValueError(
                f"the checkpoint is not of {len(self.names)} tensors in a sparse subspace of density "
                f"{self.density}: resume with the same model, `trainable` and subspace."
            )

    def _read_mask(self, number: int, texts: Mapping[str, str]) -> Tensor:
        name, tensor = self.names[number], self.tensors[number]
        try:
            chosen = masks.from_text(texts[name], tensor.numel())
        except ValueError as error:
            raise ValueError(f"{name}: what the checkpoint holds {error}.") from None
        if chosen.numel() != self._compact[number].numel():
            raise ValueError(
                f"{name}: the checkpoint's mask chooses {chosen.numel()} coordinates, not "
                f"{self._compact[number].numel()}."
            )
        return chosen.to(tensor.device)

    def _masks(self) -> Iterator[tuple[str, int, Tensor]]:
        sizes = [tensor.numel() for tensor in self.tensors]
        return zip(self.names, sizes, self._indices, strict=True)

    # ------------------------------------------------------------------ parameters and compact values

    def _row(self, number: int) -> Tensor:
        """A parameter's values as one row, wherever they are now."""
        return gathered([self.tensors[number]], [0])

    def _gather_(self) -> None:
        for number, index in enumerate(self._indices):
            row, pairs = self._row(number), _parts(index, self._compact[number])
            for places, values in pairs:
                values.copy_(row[places])
        self._seen = self._state_of_tensors()

    def _scatter_(self) -> None:
        for number, index in enumerate(self._indices):
            row, pairs = self._row(number), _parts(index, self._compact[number])
            for places, values in pairs:
                row.index_copy_(0, places, values)
        self._seen = self._state_of_tensors()
        self.traffic += _MOVED * self.dimension

    def _written_(self) -> None:
        self._scatter_()

    def _follow_storage_(self) -> None:
        """Parameters are looked up at every move; settled ones that others wrote to are read again."""
        self._refuse_other_dtype(range(len(self.tensors)), torch.float32)
        for name, tensor, values in zip(self.names, self.tensors, self._compact, strict=True):
            if tensor.device != values.device:
                raise RuntimeError(
                    f"{name} was on {values.device} when training was set up and is on "
                    f"{tensor.device} now: move the model before the trainer."
                )
        if self.settled and self._indices and self._seen != self._state_of_tensors():
            self._gather_()

    def _state_of_tensors(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor._version) for tensor in self.tensors]


def _parts(index: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(places int64, values) a few at a time."""
    for places, some in zip(index.split(masks.CHUNK), values.split(masks.CHUNK), strict=True):
        yield places.long(), some


def check_density(density: float) -> None:
    """Raises ValueError unless 0 < density <= 1."""
    if not 0.0 < density <= 1.0:
        raise ValueError(
            f"subspace_density={density} must lie in (0, 1]: the fraction of each tensor's "
            "coordinates that moves."
        )
