"""Which tensors a forward pass reads outside the modules whose outputs are remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_GETTERS = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "_version")
_METHODS = ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_inference")
METADATA: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _GETTERS),
        *(getattr(Tensor, name) for name in (*_METHODS, "__len__", "__hash__")),
    )
)
"""Functions of a tensor that do not read its values."""

Place = tuple[int, int]  # which remembered output, which of its tensors


class Flow(TorchFunctionMode):
    """Follows remembered outputs through one forward pass.

    What a module that is itself remembered does with them does not count, for it will not run again.
    What other code derives from them is followed; `needed` collects the outputs from which something
    was read after the first trainable parameter, in place, or as a Python value.

    Args:
      ignored: whether a remembered module is running now.
      final: whether whatever is read now is read for good: a trainable parameter was met.
    """

    def __init__(self, ignored: Callable[[], bool], final: Callable[[], bool]) -> None:
        super().__init__()
        self.ignored, self.final = ignored, final
        self.needed: set[Place] = set()
        self._origins: dict[int, tuple[Tensor, frozenset[Place]]] = {}  # with the tensor: ids recur

    def remember(self, index: int, output: Any) -> None:
        """`output` is the remembered output number `index`."""
        for leaf, tensor in enumerate(pytree.tree_leaves(output)):
            self._derive(tensor, frozenset({(index, leaf)}))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        origin = self._origin((args, kwargs))
        result = func(*args, **kwargs)
        if origin and func not in METADATA and not self.ignored():
            self._read(func, kwargs, origin, pytree.tree_leaves(result))
        return result

    def _origin(self, arguments: Any) -> frozenset[Place]:
        leaves = pytree.tree_leaves(arguments)
        known = (self._origins[id(leaf)][1] for leaf in leaves if id(leaf) in self._origins)
        return frozenset().union(*known)

    def _read(self, func: Any, kwargs: Any, origin: frozenset[Place], results: list[Any]) -> None:
        only_tensors = bool(results) and all(isinstance(r, Tensor) for r in results)
        if self.final() or not only_tensors or "out" in kwargs or _in_place(func):
            self.needed |= origin
        for result in results:
            self._derive(result, origin)

    def _derive(self, tensor: Any, origin: frozenset[Place]) -> None:
        if isinstance(tensor, Tensor):
            earlier = self._origins.get(id(tensor), (tensor, frozenset()))[1]
            self._origins[id(tensor)] = tensor, earlier | origin


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "_")
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
