"""Keeps the activations of units in host memory between forward and backward.

What autograd saves in a unit's forward is copied to the host behind the computation. Backward brings the activations
of a unit back while it is still in the unit after it. With recomputation only a unit's inputs are saved, and travel.
Without a GPU the same copies are made in one memory, so that values and order are tested there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...base.errors import MemoryLimitError
from ...base.host_memory import AS_HOST_MEMORY
from ...base.memory_categories import is_out_of_memory
from ...base.text import readable_bytes
from ...comm import streams
from ..plan.parts import UnitTransform
from .forward_hooks import SavedTensors, WrapperHook, keep, read_kept

LEAST_BYTES = 1024
"""Size of the smallest tensor that is copied. Copying a smaller one costs more than its memory is worth."""

_MOST_LEAVING = 2
"""Forwards whose activations may still be on their way to the host."""


def offload_activations(transforms: Iterable[UnitTransform]) -> None:
    """Makes each forward of the units that a plan names save its activations on the host. Never undone.

    Call it when all other hooks of the model's units are in place: these go around them, so that gathered weights,
    which stay where they are, are not taken for activations.
    """
    order = _Order()
    for transform in transforms:
        if transform.offloads:
            for module in transform.modules:
                _offload(module, order)


class _Order:
    """The forwards of a model's units in the order in which they began, on the thread that runs them."""

    def __init__(self) -> None:
        # The forward that began last. `_Forward` sets it. Its graph may be gone by now.
        self.last: weakref.ref[_Forward] | None = None
        # The side stream of the copies; None until the first one on a GPU makes it, for the model's life.
        self.stream: streams.Stream | None = None
        # Of the last forwards, at most `_MOST_LEAVING`, the tensors that are being copied to the host, and the end of
        # the last copy. `leave` adds; the stream that computes waits for a forward's in `begin`, or in backward.
        self._leaving: deque[tuple[list[Tensor], list[streams.Event]]] = deque()

    def begin(self) -> None:
        """A forward begins: its activations get the memory of those of an earlier one."""
        if len(self._leaving) == _MOST_LEAVING:
            _free(*self._leaving.popleft())
        self._leaving.append(([], []))

    def leave(self, tensor: Tensor, copied: streams.Event) -> None:
        """Keeps a tensor until it is on the host.

        The allocator would get its memory back late otherwise: it learns that another stream is done where the host
        asks, which is many layers ahead of the device.
        """
        tensors, ends = self._leaving[-1]
        tensors.append(tensor)
        ends[:] = [copied]

    def begin_backward(self) -> None:
        """Frees what has left. A forward that is under way, around this backward, goes on to add its tensors."""
        for leaving in self._leaving:
            _free(*leaving)


def _free(tensors: list[Tensor], ends: list[streams.Event]) -> None:
    """Frees memory in the order of the current stream, which waits until it was copied."""
    for end in ends:
        streams.current_stream().wait_event(end)
    tensors.clear()


def _offload(module: nn.Module, order: _Order) -> None:
    """Puts hooks around the forwards of one module."""
    saved = SavedTensors()

    def begin(*unused: Any) -> None:
        saved.begin_with(_Forward(module, order).place if torch.is_grad_enabled() else lambda tensor: None)

    module.register_forward_pre_hook(WrapperHook(begin), prepend=True)
    module.register_forward_hook(WrapperHook(lambda *unused: saved.end()), always_call=True)


class _Forward:
    """One forward of a unit. The tensors that it saved refer to it, so that it lives as long as its graph."""

    def __init__(self, module: nn.Module, order: _Order) -> None:
        # Of the model; it outlives each forward.
        self._order = order
        # The forward before it, whose activations backward needs next. Fixed.
        self._before, order.last = order.last, weakref.ref(self)
        order.begin()
        # Storages of weights and buffers, which stay where they are.
        plain = (tensor for tensor in (*module.parameters(), *module.buffers()) if _is_plain(tensor.data))
        self._kept_storages = {tensor.untyped_storage()._cdata for tensor in plain}
        # What was saved, by place in memory and version: a tensor that two operations save is copied once. `place`
        # adds; an entry is valid while its storage lives, whose address could be another's afterwards.
        self._host_copies: dict[Any, tuple[StorageWeakRef, weakref.ref[_OnHost]]] = {}
        # Whether backward has reached it, so that the copies back were begun. `begin_return` sets it.
        self._returns = False

    def place(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copies a tensor to the host, unless it is a weight or small. Nothing is left to the hooks around."""
        # No two elements are in one place, and none is left out between them.
        is_dense = _is_plain(tensor) and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        if (
            not (is_dense and tensor.nbytes >= LEAST_BYTES)
            or (storage := tensor.untyped_storage())._cdata in self._kept_storages
        ):
            return partial(read_kept, keep(tensor))
        memory = tensor.detach().as_strided((tensor.numel(),), (1,))
        key = (storage._cdata, memory.storage_offset(), memory.numel(), memory.dtype, tensor._version)
        alive, copy = self._host_copies.get(key, (None, None))
        saved = copy() if alive is not None and copy is not None and not alive.expired() else None
        if saved is None:
            if self._order.stream is None and streams.is_asynchronous(tensor.device):
                self._order.stream = streams.Stream(tensor.device)
            saved = _OnHost(self, memory, self._order)
            self._host_copies[key] = StorageWeakRef(storage), weakref.ref(saved)
        saved.num_readers += 1
        return partial(saved.read, tensor.size(), tensor.stride())

    def begin_return(self) -> None:
        """Begins to copy what is still needed back to the device."""
        if not self._returns:
            self._returns = True
            self._order.begin_backward()
            for _, copy in self._host_copies.values():
                if (saved := copy()) is not None:
                    saved.begin_return()

    def reach(self) -> None:
        """Notes that backward reads from this forward, so that the one before it is next."""
        before = self._before() if self._before is not None else None
        if before is not None:
            before.begin_return()


class _OnHost:
    """The memory of saved tensors, `[n]`, in host memory."""

    def __init__(self, forward: _Forward, tensor: Tensor, order: _Order) -> None:
        self._forward, self._device, self._stream = forward, tensor.device, order.stream
        # Number of saved tensors in this memory. `_Forward.place` counts.
        self.num_readers = 0
        # Those that have not read the current copy on the device. `_copy_back` sets it, `read` lowers it.
        self._unread = 0
        # The memory on the device again, and the point at which the side stream has copied it. `begin_return` and
        # `read` set it, the last reader clears it: a backward through a kept graph copies again.
        self._device_copy: tuple[Tensor, streams.Event | None] | None = None
        self._host = _host_memory(tensor, is_pinned=order.stream is not None)
        if order.stream is None:
            self._host.copy_(tensor)
            return
        order.stream.wait_stream(streams.current_stream())
        with streams.stream(order.stream):
            self._host.copy_(tensor, non_blocking=True)
            order.leave(tensor, streams.record_event())

    def begin_return(self) -> tuple[Tensor, streams.Event | None]:
        """Begins to copy the memory to the device, unless that was begun, and returns the copy and its end."""
        if self._device_copy is None:
            self._device_copy = self._copy_back()
        return self._device_copy

    def _copy_back(self) -> tuple[Tensor, streams.Event | None]:
        self._unread = self.num_readers
        copy = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)  # of the computing stream
        if self._stream is None:
            return copy.copy_(self._host), None
        self._stream.wait_stream(streams.current_stream())
        with streams.stream(self._stream):
            copy.copy_(self._host, non_blocking=True)
            return copy, streams.record_event()

    def read(self, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Returns a tensor in the memory on its device. The current stream waits for it."""
        self._forward.begin_return()
        copy, copied = self.begin_return()
        self._unread -= 1
        if not self._unread:
            self._device_copy = None
        if copied is not None:
            streams.current_stream().wait_event(copied)
        self._forward.reach()
        return copy.as_strided(size, stride)  # kernels are chosen by strides

    def __del__(self) -> None:
        if self._device_copy is not None and self._stream is not None:  # that no backward has read
            streams.used_on(self._device_copy[0], self._stream)


def _host_memory(tensor: Tensor, *, is_pinned: bool) -> Tensor:
    """Allocates host memory for a tensor.

    Raises:
        MemoryLimitError: there is none.
    """
    try:
        memory = streams.pinned(tensor.shape, tensor.dtype) if is_pinned else torch.empty_like(tensor, device="cpu")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"offload_activations needs {readable_bytes(tensor.nbytes)} more of the host's memory, which has no room; "
            "add activation_checkpointing='full', so that only the inputs of units are copied, or drop it"
        ) from error
    return AS_HOST_MEMORY.value(memory)


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor has one storage: sparse ones have several, and tensors of other backends none."""
    return type(tensor) is Tensor and tensor.layout == torch.strided
