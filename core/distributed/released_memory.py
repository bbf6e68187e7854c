"""Frees the memory of a wrapped model between two phases of a program, and brings it back with the same bits.

Reinforcement learning trains and generates on the same devices: while a server generates, the trainer's weights, state
and gradients are in its way. `_BaseDataParallel.release` copies them to the host, or on a CPU into a file, and frees
their storages; `restore` allocates these again and copies the values back. Every view of a storage is then valid as
before. Gathered parameters, and gradients that are zeroed, are made again in place of copied.

While a part is released nothing may read it: memory that is gone would be read. `Step.reject_released` stops what
goes through the wrapper and its optimizers, and the class of released tensors what a program reaches by itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from typing import IO, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..base.device import current_device
from ..base.errors import ConfigError, ShardstackError
from ..base.host_memory import shared_bytes
from ..base.memory_categories import known_optimizers
from ..base.parameters import kept_range, local_part, readers_without_values, without_waiting
from ..base.text import choices
from ..comm import streams
from .engine.engine import Engine
from .step import Phase, Step

Part = Literal["model", "optimizer", "gradients"]
PARTS: tuple[Part, ...] = ("model", "optimizer", "gradients")
_GRADIENTS = ("grad", "main_grad", "main_grad_copy_in_grad_buffer")


def _raise_used(*unused: Any) -> NoReturn:
    raise ShardstackError(
        "a tensor of a wrapped model was used while its memory is released; call the wrapper's restore() first"
    )


def _read_released(cls: type[Tensor], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func not in readers_without_values():
        _raise_used()
    with without_waiting():
        return func(*args, **(kwargs or {}))


@cache
def _released(cls: type[Tensor]) -> type[Tensor]:
    """Returns the class that tensors of a class have while their memory is released: only shapes and types are read.

    A program that reaches tensors of a wrapped model without the wrapper finds these: parameters and their local
    tensors, buffers, gradients, the state of an optimizer.
    """
    refusals = {"__deepcopy__": _raise_used, "__reduce_ex__": _raise_used}
    members = {"__slots__": (), "__torch_function__": classmethod(_read_released), **refusals}
    return type(f"Released{cls.__name__}", (cls,), members)


class ReleasedMemory:
    """What a wrapper has released, and how it comes back. No communication: ranks may act at different times.

    Args:
        step: the wrapper's order of calls, which refuses those that need what is released.
        optimizers: those of `shardstack.optimizer` over the model; grows as they are built.
    """

    def __init__(self, module: nn.Module, engine: Engine, step: Step, optimizers: Collection[Any]) -> None:
        self._module, self._engine, self._step, self._optimizers = module, engine, step, optimizers
        # Of each released part: its storages with their sizes and values, and what puts visible tensors back. The main
        # thread adds a part in `release`, and takes it out in `restore`.
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
        for optimizer in () if self._step.released else self._optimizers:
            optimizer.finish_step()
        if "model" in parts:
            engine.free_gathered()
        if "gradients" in parts:
            engine.gradients.free_unused()
        if streams.is_asynchronous(device):
            streams.synchronize()
        store, stored, known = _Store(folder), dict[Part, list[_Storage]](), set[int]()
        for part in parts:
            with without_waiting():
                own = {one._cdata: one for one in self._storages(part, device) if one._cdata not in known}
            known |= own.keys()
            stored[part] = [_Storage(one, store) for one in own.values()]
        try:
            for part in parts:
                for one in stored[part] if part != "gradients" or phase is not Phase.ZEROED else ():
                    one.save()
        except (OSError, RuntimeError) as error:  # torch's, where the host has no memory to pin
            if "model" in parts:
                engine.allocate_gathered()
            reason = getattr(error, "strerror", None) or error
            raise ShardstackError(
                f"release() found no room in {store.place}: {reason}; give another folder=. Nothing was released"
            ) from error
        self._stored |= stored
        for part in parts:
            for one in stored[part]:
                one.free()
            self._put_back[part] = list(self._hide(part))
            self._step.released.add(part)
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
                    optimizer.note_moved()
            del self._stored[part], self._put_back[part]
            self._step.released.discard(part)

    def _storages(self, part: Part, device: torch.device) -> Iterator[Any]:
        """Yields the storages of a part on the device that torch can free, those of shared tensors several times."""
        for tensor in map(local_part, self._tensors(part)):
            storage = tensor.untyped_storage()
            if tensor.device.type == device.type and storage.nbytes() > tensor.element_size() and storage.resizable():
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
                yield from optimizer.held()

    def _state_tensors(self) -> Iterator[Tensor]:
        """Yields what optimizers hold of each parameter: those of `shardstack.optimizer`, and torch's."""
        own, parameters = set(self._optimizers), set(self._module.parameters())
        for optimizer in own.union(known_optimizers()):
            groups = optimizer.param_groups
            if optimizer in own or any(p in parameters for group in groups for p in group["params"]):
                for state in optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))

    def _hide(self, part: Part) -> Iterator[Callable[[], None]]:
        """Lets what reads the values of a part raise. Yields what puts its tensors back."""
        if part == "model":
            with torch.no_grad():  # a backward of a forward from before raises, as after a write in place
                torch.autograd.graph.increment_version(list(self._module.parameters()))
            for module in self._module.modules():
                # Before the wrapper's own hooks, which gather.
                yield module.register_forward_pre_hook(_raise_used, prepend=True).remove
        with without_waiting():
            visible = list(self._visible(part))
            visible += [tensor._local_tensor for tensor in visible if isinstance(tensor, DTensor)]
            freed = [one for one in visible if (own := local_part(one)).nbytes > own.untyped_storage().nbytes()]
        for tensor in freed:
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


def _checked(what: Iterable[str], function: str) -> list[Part]:
    names = list(dict.fromkeys(what)) or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise ConfigError(f"{function}() was given {unknown[0]!r}; {choices(unknown[0], PARTS)}")
    return [part for part in PARTS if part in names]


class _Store:
    """Where the values of storages are kept: in pinned memory of the host, or in one file without a name.

    Args:
        folder: of the file. None is the host's memory for a device, and the system's folder for a CPU.
    """

    def __init__(self, folder: str | None) -> None:
        self._is_memory = folder is None and current_device().type != "cpu"
        self.place = "the host's memory" if self._is_memory else folder or tempfile.gettempdir()
        # The first `save` makes it. It is gone from the disk with the last storage that keeps the store.
        self._file: IO[bytes] | None = None

    def save(self, values: Tensor) -> Callable[[Tensor], object]:
        """Keeps `[n]` bytes. Returns what copies them back into a tensor.

        Raises:
            OSError: the folder or its disk.
        """
        if self._is_memory:
            kept = streams.pinned([len(values)], torch.uint8).copy_(values)
            return lambda into: into.copy_(kept)
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.place)  # noqa: SIM115
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(shared_bytes(values.cpu()).data)
        self._file.flush()
        return partial(_read, self._file, start)


def _read(file: Any, start: int, into: Tensor) -> None:
    on_host = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
    file.seek(start)
    file.readinto(shared_bytes(on_host).data)
    if on_host is not into:
        into.copy_(on_host)


class _Storage:
    """A storage that is freed, and its values. Values that are not saved are zeros."""

    def __init__(self, storage: Any, store: _Store) -> None:
        self._storage, self._store, self.num_bytes = storage, store, storage.nbytes()
        # `save` sets it: what copies the values back.
        self._load: Callable[[Tensor], object] = torch.zero_

    def _bytes(self) -> Tensor:
        """Returns the storage as a tensor of its own: what is written to it is no write to the tensors that share."""
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)

    def save(self) -> None:
        self._load = self._store.save(self._bytes())

    def free(self) -> None:
        self._storage.resize_(0)

    def restore(self) -> None:
        self._storage.resize_(self.num_bytes)
        self._load(self._bytes())
