"""A parameter space that moves the tensors themselves and writes no perturbed copies of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from hf_dpzero.perturbation.parameter_space import ParameterSpace


class InPlaceSpace(ParameterSpace):
    """What the spaces of a direction subspace share: float32 tensors, moved as a whole model.

    Raises:
      ValueError: a tensor that is not float32.
    """

    name: ClassVar[str]

    def __init__(self, named_tensors: Iterable[tuple[str, Tensor]], **settings: Any) -> None:
        named = list(named_tensors)
        for name, tensor in named:
            self._refuse_half(name, tensor)
        super().__init__(named, **settings)

    def _refuse_half(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}: subspace={self.name!r} moves float32 tensors only. "
                "Load the model in float32, train float32 adapters, or use subspace='full'."
            )

    def write_perturbed_(self, *_: Any) -> NoReturn:
        """Refused: there are no copies of single tensors in a subspace."""
        self._refuse_copies()

    def write_perturbed_pair_(self, *_: Any) -> NoReturn:
        """Refused, as above."""
        self._refuse_copies()

    def write_perturbed_rows_(self, *_: Any) -> NoReturn:
        """Refused, as above."""
        self._refuse_copies()

    def write_stack_(self, *_: Any) -> NoReturn:
        """Refused, as above."""
        self._refuse_copies()

    def _refuse_copies(self) -> NoReturn:
        raise ValueError(
            f"subspace={self.name!r} perturbs the model's own tensors, not copies of them: use "
            "perturbation_strategy: whole_model."
        )
