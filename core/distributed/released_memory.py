"""Frees the memory of a wrapped model between two phases of a program, and brings it back with the same bits.

Reinforcement learning trains and generates on the same devices: while a server generates, the trainer's parts, its
model, optimizer state and gradients, take memory that the server needs. `_BaseDataParallel.release` copies a part to
the host, or on a CPU into files, and frees its storages; `restore` allocates these again and copies the values back.
Every view of a storage is then valid as before. Gathered parameters, and gradients that are zeroed, are made again in
place of copied.

While a part is released nothing may read it: memory that is gone would be read. `Step.reject_released` stops what
goes through the wrapper and its optimizers, and the class of released tensors what a program reaches by itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..base.device import current_device
from ..base.errors import ConfigError, ShardstackError
from ..base.memory_categories import known_optimizers
from ..base.parameters import kept_range, readers_without_values, without_waiting
from ..base.text import choices
from ..comm import streams
from .engine.engine import Engine
from .step import Phase, Step

Part = Literal["model", "optimizer", "gradients"]
PARTS: tuple[Part, ...] = ("model", "optimizer", "gradients")
_GRADIENTS = ("grad", "main_grad", "main_grad_copy_in_grad_buffer")


def _raise_released(*unused: Any) -> NoReturn:
    raise ShardstackError(
        "a tensor of a wrapped model was used while its memory is released; call the wrapper's restore() first"
    )


def _read_released(cls: type[Tensor], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func not in readers_without_values():
        _raise_released()
    with without_waiting():
        return func(*args, **(kwargs or {}))


@cache
def _released(cls: type[Tensor]) -> type[Tensor]:
    """Returns the class that tensors of a class have while their memory is released: only shapes and types are read.

    A program that reaches tensors of a wrapped model without the wrapper finds these: parameters and their local
    tensors, buffers, gradients, the state of an optimizer.
    """
    members = {"__slots__": (), "__torch_function__": classmethod(_read_released), "__repr__": lambda self: "released"}
    refusals = {"__deepcopy__": _raise_released, "__reduce_ex__": _raise_released}
    return type(f"Released{cls.__name__}", (cls,), members | refusals)


class ReleasedMemory:
    """What a wrapper has released, and how it comes back. No communication: ranks may act at different times.

    Args:
        step: the wrapper's order of calls, which refuses those that need what is released.
        optimizers: those of `shardstack.optimizer` over the model; grows as they are built.
    """

    def __init__(self, module: nn.Module, engine: Engine, step: Step, optimizers: Collection[Any]) -> None:
        self._module, self._engine, self._step, self._optimizers = module, engine, step, optimizers
        # Of each released part: storages to restore, and calls that undo `_hide`. The main thread adds a part in
        # `release`, and takes it out in `restore`.
        self._stored = dict[Part, list[_Storage]]()
        self._put_back = dict[Part, list[Callable[[], None]]]()

    def release(self, what: Iterable[str], folder: str | None) -> int:
        """Frees the parts that are not released yet. See `_BaseDataParallel.release`."""
        engine, phase, device = self._engine, self._step.phase, current_device()
        parts = [part for part in _checked(what, "release") if part not in self._stored]
        if engine.plan.settings.nccl_ub:
            raise ConfigError("release() would free memory that nccl_ub has registered with NCCL; set nccl_ub=False")
        if "gradients" in parts:
            self._step.reject_mid_step("release() was called for gradients")
        if "model" in parts:
            engine.parameters.check_may_write()
        for optimizer in self._optimizers:
            optimizer.conclude()
        if "model" in parts:
            engine.free_gathered()
        if "gradients" in parts:
            engine.gradients.free_unused()
        if streams.is_asynchronous(device):
            streams.synchronize()
        stored, seen = dict[Part, list[_Storage]](), set[int]()
        for part in parts:
            with without_waiting():
                storages = {one._cdata: one for one in self._storages(part, device) if one._cdata not in seen}
            seen |= storages.keys()
            stored[part] = [_Storage(one) for one in storages.values()]
        try:
            for part in parts:
                for one in stored[part] if part != "gradients" or phase is not Phase.ZEROED else ():
                    one.save(folder)
        except BaseException as error:
            if "model" in parts:
                engine.allocate_gathered()
            if not isinstance(error, OSError | RuntimeError | MemoryError):  # torch's, where no memory can be pinned
                raise
            place = folder or ("the host's memory" if device.type != "cpu" else tempfile.gettempdir())
            reason = getattr(error, "strerror", None) or error
            raise ShardstackError(
                f"release() found no room in {place}: {reason}; give another folder=. Nothing was released"
            ) from error
        for part in parts:
            self._stored[part], self._put_back[part] = stored[part], []
            self._step.released.add(part)
            for one in stored[part]:
                one.free()
            for call in self._hide(part):
                self._put_back[part].append(call)  # one by one: if the next raises, `restore` undoes these
        if streams.is_asynchronous(device):
            torch.accelerator.empty_cache()
        return sum(one.num_bytes for part in parts for one in stored[part])

    def restore(self, what: Iterable[str]) -> None:
        """Brings released parts back. See `_BaseDataParallel.restore`."""
        for part in (part for part in _checked(what, "restore") if part in self._stored):
            stored, put_back = self._stored[part], self._put_back[part]
            while stored:  # one at a time: what finds no memory can be restored later
                stored[-1].restore()
                stored.pop()
            while put_back:
                put_back.pop()()
            if part == "model":
                self._engine.allocate_gathered()
                for optimizer in self._optimizers:
                    optimizer.note_moved(set(self._module.parameters()))
            del self._stored[part], self._put_back[part]
            self._step.released.discard(part)

    def _storages(self, part: Part, device: torch.device) -> Iterator[Any]:
        """Yields the storages of a part on the device that torch can free, those of shared tensors several times."""
        for tensor in _plain(self._tensors(part)):
            storage = tensor.untyped_storage()
            can_free = storage.resizable() and (device.type != "cpu" or not storage.is_shared())  # on a GPU all are
            if tensor.device.type == device.type and storage.nbytes() > tensor.element_size() and can_free:
                yield storage

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        if part == "model":
            yield from self._engine.parameters.held()["parameters"]
            yield from self._module.parameters()  # replicated ones too, which FSDP2 does not hold
        elif part == "gradients":
            for tensors in self._engine.gradients.held().values():
                yield from tensors
        else:
            yield from self._state_tensors()
            for optimizer in self._optimizers:
                yield from optimizer.held(set(self._module.parameters()))

    def _state_tensors(self) -> Iterator[Tensor]:
        """Yields what optimizers keep of each parameter: those of `shardstack.optimizer`, and torch's."""
        keys = set[Tensor](self._module.parameters())
        for optimizer in self._optimizers:
            keys |= {main for parameter, main in optimizer.main_tensors().items() if parameter in keys}
        for optimizer in {*self._optimizers, *known_optimizers()}:
            of_parameters = [state for key, state in optimizer.state.items() if key in keys]
            yield from (leaf for leaf in tree_leaves(of_parameters) if isinstance(leaf, Tensor))

    def _hide(self, part: Part) -> Iterator[Callable[[], None]]:
        """Lets what reads the values of a part raise. Yields what puts its tensors back."""
        if part == "model":
            with torch.no_grad():  # a backward of a forward from before raises, as after a write in place
                torch.autograd.graph.increment_version(list(self._module.parameters()))
            for module in self._module.modules():
                # Before the wrapper's own hooks, which gather.
                yield module.register_forward_pre_hook(_raise_released, prepend=True).remove
        with without_waiting():
            visible = [(tensor, list(_plain([tensor]))) for tensor in self._visible(part)]
            freed = [
                one
                for tensor, plain in visible
                for one in ([tensor, *plain] if any(p.nbytes > p.untyped_storage().nbytes() for p in plain) else ())
            ]
        for tensor in dict.fromkeys(freed):
            yield partial(setattr, tensor, "__class__", type(tensor))
            tensor.__class__ = _released(type(tensor))

    def _visible(self, part: Part) -> Iterator[Tensor]:
        """Yields the tensors of a part that a program may reach."""
        parameters = list(self._module.parameters())
        if part == "optimizer":
            yield from self._state_tensors()
        elif part == "gradients":
            gradients = (getattr(parameter, name, None) for parameter in parameters for name in _GRADIENTS)
            yield from (gradient for gradient in gradients if gradient is not None)
        else:
            yield from (*parameters, *self._module.buffers(), *self._engine.shards())
            yield from (elements[0] for p in parameters if (elements := kept_range(p)) is not None)


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields tensors with memory of their own: those inside of a DTensor, or of another wrapper, in its place."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from _plain(one for one in inner if isinstance(one, Tensor))  # others are a DTensor's mesh
        else:
            yield tensor


def _checked(what: Iterable[str], function: str) -> list[Part]:
    names = list(dict.fromkeys(what)) or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise ConfigError(f"{function}() was given {unknown[0]!r}; {choices(unknown[0], PARTS)}")
    return [part for part in PARTS if part in names]


def _memory_for(num_bytes: int, device: torch.device, folder: str | None) -> Tensor:
    """Returns memory for the bytes of a device: pinned, or for a CPU, or with a folder, a mapped file without a name.

    Raises:
        OSError: the folder or its disk.
    """
    if folder is None and device.type != "cpu":
        return streams.pinned([num_bytes], torch.uint8)
    with tempfile.NamedTemporaryFile(dir=folder) as file:  # the mapping stays when the name goes
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # raises where a write to the mapping would end the process
        return torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)


class _Storage:
    """A storage that is freed, and its values. Values that are not saved are zeros."""

    def __init__(self, storage: Any) -> None:
        self._storage, self.num_bytes = storage, storage.nbytes()
        # `[num_bytes]` in uint8. `save` sets it.
        self._saved: Tensor | None = None

    def _bytes(self) -> Tensor:
        """Returns the storage as a tensor of its own: what is written to it is no write to the tensors that share."""
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)

    def save(self, folder: str | None) -> None:
        self._saved = _memory_for(self.num_bytes, self._storage.device, folder).copy_(self._bytes())

    def free(self) -> None:
        self._storage.resize_(0)

    def restore(self) -> None:
        self._storage.resize_(self.num_bytes)
        values = self._bytes()
        values.zero_() if self._saved is None else values.copy_(self._saved)
