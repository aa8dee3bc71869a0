"""Weights that live in CPU memory or on disk, and come to the execution device while a module runs.

A module whose weights live elsewhere has a `Prefetched` around its forward: during the call its tensors'
`.data` point to copies on the execution device, afterwards to where they live again. What is written
to a copy is lost with it: the weights themselves change where they live, and only there.

All of a model share a `Prefetcher`. Inside `ahead` it copies the next module's weights while one runs,
in a thread of its own: on CUDA through pinned memory on a side stream, elsewhere directly. The order is
that of the last passes. At most two modules' weights are on the device at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_hf_dpzero_prefetched"
Copies = tuple[list[Tensor], torch.Event | None]  # and the event after which they may be read


class Prefetcher:
    """Copies weights to where they compute.

    Attributes:
      bytes_in: bytes copied so far.
      held, peak: bytes of copies that exist now, and the most that existed at once.
    """

    def __init__(self) -> None:
        self.bytes_in = self.held = self.peak = 0
        self._present: set[int] = set()  # ids of the tensors that point to a copy
        self._left: set[int] = set()  # ids of those that are not to be copied now
        self._following: dict[Prefetched, Prefetched] = {}
        self._last: Prefetched | None = None
        self._pending: _Pending | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._source: Callable[[Tensor], Tensor] | None = None
        self._arrived: Callable[[Sequence[Tensor]], None] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Prefetcher:
        return self  # for a layer that is copied within the model

    @contextlib.contextmanager
    def ahead(
        self,
        source: Callable[[Tensor], Tensor] = lambda tensor: tensor.data,
        arrived: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
    ) -> Iterator[None]:
        """Inside, the next module's weights are copied while one runs; they must not change meanwhile.

        Args:
          source: tensor -> the values to copy, where they live.
          arrived: called with tensors that point to their copies, before the module runs; it may write
            to them.
        """
        self._source, self._arrived, self._last = source, arrived, None
        try:
            yield
        finally:
            self._source = self._arrived = self._last = None
            self._forget()

    def wanted(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns those that are neither here already nor left where they are."""
        return [t for t in tensors if id(t) not in self._present and id(t) not in self._left]

    def is_here(self, tensor: Tensor) -> bool:
        """Whether the tensor points to a copy on the execution device now."""
        return id(tensor) in self._present

    @contextlib.contextmanager
    def left_at_home(self, tensor: Tensor) -> Iterator[None]:
        """Inside, the tensor is not copied unless by `Prefetched.brought`."""
        self._left.add(id(tensor))
        try:
            yield
        finally:
            self._left.discard(id(tensor))

    @contextlib.contextmanager
    def brought(self, prefetched: Prefetched, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the tensors point to copies on the module's execution device."""
        homes, copies = [t.data for t in tensors], self._fetch(prefetched, tensors)
        ids = {id(tensor) for tensor in tensors}
        self._present |= ids
        try:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.data = copy
            torch.clear_autocast_cache()  # its casts of parameters know nothing of new storage
            self._start_next(prefetched)
            if self._arrived is not None:
                self._arrived(tensors)
            yield
        finally:
            for tensor, home in zip(tensors, homes, strict=True):
                tensor.data = home
            self._present -= ids
            self.held -= _nbytes(copies)
            torch.clear_autocast_cache()

    def _fetch(self, prefetched: Prefetched, tensors: Sequence[Tensor]) -> list[Tensor]:
        sources, pending = self._sources(tensors), self._pending
        if pending is None or not pending.is_of(prefetched, sources):
            self._forget()
            pending = self._start(prefetched, sources, Future())
            pending.copies.set_result(_copied(sources, prefetched.device))
        self._pending = None
        if self._source is not None:
            if self._last is not None:
                self._following[self._last] = prefetched
            self._last = prefetched
        return pending.wait()

    def _start_next(self, prefetched: Prefetched) -> None:
        following = self._following.get(prefetched)
        if self._source is None or following is None or self._pending is not None:
            return
        sources = self._sources(self.wanted(following.tensors()))
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="hf_dpzero-prefetch")
        future = self._worker.submit(_copied, sources, following.device)
        self._pending = self._start(following, sources, future)

    def _start(
        self, prefetched: Prefetched, sources: list[Tensor], future: Future[Copies]
    ) -> _Pending:
        moved = _nbytes(sources)
        self.bytes_in += moved
        self.held += moved
        self.peak = max(self.peak, self.held)
        return _Pending(prefetched, sources, future)

    def _forget(self) -> None:
        # gives up copies that were made ahead
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.copies.exception()  # waits: the values may change from now on
            self.held -= _nbytes(pending.sources)

    def _sources(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.data if self._source is None else self._source(t) for t in tensors]


class Prefetched:
    """A module's forward, with the module's weights on the execution device.

    Args:
      module: whose forward it is.
      places: (module, name) of the parameters and buffers that come.
      device: where they come to.
      prefetcher: of the model.
      forward: of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[tuple[nn.Module, str]],
        device: torch.device,
        prefetcher: Prefetcher,
        forward: Callable[..., object],
    ) -> None:
        self.module, self.places, self.device = module, list(places), device
        self.prefetcher, self.forward = prefetcher, forward
        vars(module)[_ATTRIBUTE] = self

    def __call__(
        self, *args: object, **kwargs: object
    ) -> object:  # whatever the module's forward takes
        tensors = self.prefetcher.wanted(self.tensors())
        if not tensors:
            return self.forward(*args, **kwargs)
        with self.prefetcher.brought(self, tensors):
            return self.forward(*args, **kwargs)

    def tensors(self) -> list[Tensor]:
        """Returns the parameters and buffers that come, each once; not those that live on the device."""
        found = [getattr(module, name) for module, name in self.places]
        elsewhere = (t for t in found if t.device.type == "cpu" or t.device != self.device)
        return list({id(tensor): tensor for tensor in elsewhere}.values())

    def stay_(self) -> None:
        """Lets the weights live on the execution device from now on."""
        for tensor in self.tensors():
            tensor.data = tensor.data.to(self.device)
        vars(self.module)["_old_forward"] = self.forward
        del vars(self.module)[_ATTRIBUTE]


def prefetched_of(module: nn.Module) -> Prefetched | None:
    """Returns what brings a module's weights for its forward, if they live elsewhere."""
    return vars(module).get(_ATTRIBUTE)


def prefetcher_of(model: nn.Module) -> Prefetcher | None:
    """Returns the prefetcher of a model with weights that live elsewhere, else None."""
    found = filter(None, map(prefetched_of, model.modules()))
    return next((prefetched.prefetcher for prefetched in found), None)


def living_elsewhere(model: nn.Module) -> dict[int, Tensor]:
    """Returns id -> parameter or buffer, of all that come only while their module runs."""
    found = filter(None, map(prefetched_of, model.modules()))
    return {id(tensor): tensor for prefetched in found for tensor in prefetched.tensors()}


def execution_devices(module: nn.Module) -> set[torch.device]:
    """Returns where a module computes with its own parameters."""
    prefetched = prefetched_of(module)
    if prefetched is not None:
        return {prefetched.device}
    return {parameter.device for parameter in module.parameters(recurse=False)}


def arriving_bytes(model: nn.Module) -> int:
    """Returns the bytes of all weights that come; of tied ones once."""
    return _nbytes(list(living_elsewhere(model).values()))


class _Pending(NamedTuple):
    """Copies that are being made."""

    prefetched: Prefetched
    sources: list[Tensor]
    copies: Future[Copies]

    def is_of(self, prefetched: Prefetched, sources: Sequence[Tensor]) -> bool:
        """Whether these very values, for this module."""
        mine = [source.data_ptr() for source in self.sources]
        return self.prefetched is prefetched and mine == [source.data_ptr() for source in sources]

    def wait(self) -> list[Tensor]:
        """The copies, which the present stream may read from now on."""
        copies, event = self.copies.result()
        if event is not None:
            stream = torch.cuda.current_stream(self.prefetched.device)
            stream.wait_event(event)
            for copy in copies:
                copy.record_stream(stream)
        return copies


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


@torch.no_grad()
def _copied(sources: Sequence[Tensor], device: torch.device) -> Copies:
    """Fresh copies on a device; on CUDA they are ready once the event has happened."""
    with torch.inference_mode(False):
        if device.type != "cuda":
            return [torch.empty_like(s, device=device).copy_(s) for s in sources], None
        if device not in _side_streams:
            _side_streams[device] = torch.cuda.Stream(device)
        stream = _side_streams[device]
        with torch.cuda.stream(stream):  # pinned memory is kept until the stream has read it
            pinned = [s.pin_memory() if s.device.type == "cpu" else s for s in sources]
            copies = [s.to(device, non_blocking=True) for s in pinned]
            return copies, stream.record_event()


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
