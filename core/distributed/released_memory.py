"""Frees the memory of a wrapped model between two phases of a program, and brings it back with the same bits.

Reinforcement learning trains and generates on the same devices: while a server generates, the trainer's weights, state
and gradients are in its way. `_BaseDataParallel.release` copies them to the host, or on a CPU into a file, and frees
their storages; `restore` allocates these again and copies the values back. Every view of a storage is then valid as
before. Gathered parameters, and gradients that are zeroed, are made again in place of copied.

While a part is released nothing may read it: memory that is gone would be read. `Step.reject_released` stops what
goes through the wrapper and its optimizers, and `ReleasedTensor` what a program reaches by itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from functools import partial
from typing import IO, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..base.device import current_device
from ..base.errors import ConfigError, ShardstackError
from ..base.host_memory import shared_bytes
from ..base.memory_categories import known_optimizers
from ..base.parameters import (
    can_be_pending,
    end_pending,
    keep_range,
    kept_range,
    local_part,
    make_pending,
    without_waiting,
)
from ..base.text import choices
from ..comm import streams
from .engine.engine import Engine
from .step import Phase, Step

Part = Literal["model", "optimizer", "gradients"]
PARTS: tuple[Part, ...] = ("model", "optimizer", "gradients")


class ReleasedTensor(Tensor):
    """Takes the place of a tensor whose memory is released: it has its shape and dtype, and no values.

    Any operation on it raises. Where a program reaches the tensors of a wrapped model without the wrapper, it finds
    these: local tensors of DTensors, buffers, the state of an optimizer.
    """

    @staticmethod
    def __new__(cls, of: Tensor) -> ReleasedTensor:
        tensor: ReleasedTensor = Tensor._make_wrapper_subclass(
            cls, of.shape, of.stride(), dtype=of.dtype, device=of.device, storage_size=0
        )
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _used()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _used()


def _used(*unused: Any) -> ShardstackError:
    return ShardstackError(
        "a tensor of a wrapped model was used while its memory is released; call the wrapper's restore() first"
    )


def _raise_used(*unused: Any) -> None:
    raise _used()


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
            for state in self._states():
                yield from (value for value in state.values() if isinstance(value, Tensor))
            for optimizer in self._optimizers:
                yield from optimizer.held()

    def _states(self) -> Iterator[MutableMapping[str, Any]]:
        """Yields what optimizers hold of each parameter: those of `shardstack.optimizer`, and torch's."""
        own, parameters = set(self._optimizers), set(self._module.parameters())
        for optimizer in own.union(known_optimizers()):
            groups = optimizer.param_groups
            if optimizer in own or any(p in parameters for group in groups for p in group["params"]):
                yield from optimizer.state.values()

    def _hide(self, part: Part) -> Iterator[Callable[[], None]]:
        """Takes what is freed out of a program's sight. Yields what puts it back."""
        if part == "optimizer":
            for state in self._states():
                yield from _replace(state)
        elif part == "gradients":
            for parameter in self._module.parameters():
                for name in ("grad", "main_grad", "main_grad_copy_in_grad_buffer"):
                    if (gradient := getattr(parameter, name, None)) is not None:
                        setattr(parameter, name, None)
                        yield partial(setattr, parameter, name, gradient)
        else:
            with torch.no_grad():  # a backward of a forward from before raises, as after a write in place
                torch.autograd.graph.increment_version(list(self._module.parameters()))
            yield from self._hide_model()

    def _hide_model(self) -> Iterator[Callable[[], None]]:
        plain = []
        for owner, name in self._engine.holders_of_shards():
            yield from _replace(vars(owner), [name])
        for parameter in self._module.parameters():
            if (elements := kept_range(parameter)) is not None:
                keep_range(parameter, (ReleasedTensor(elements[0]), elements[1]))
                yield partial(keep_range, parameter, elements)
            if isinstance(parameter, DTensor):
                local, parameter._local_tensor = parameter._local_tensor, ReleasedTensor(parameter._local_tensor)
                yield partial(setattr, parameter, "_local_tensor", local)
            elif can_be_pending(parameter):
                plain.append(parameter)
        for module in self._module.modules():
            # Before the wrapper's own hooks, which gather.
            yield module.register_forward_pre_hook(_raise_used, prepend=True).remove
            yield from _replace(module._buffers)
            others = (name for name, parameter in module._parameters.items() if not _can_raise(parameter))
            yield from _replace(module._parameters, others)
        make_pending(plain, _raise_used)
        yield partial(end_pending, plain)


def _can_raise(parameter: Any) -> bool:
    """Returns whether a parameter itself raises when it is used. One of another class is replaced in its module."""
    return isinstance(parameter, DTensor) or parameter is None or can_be_pending(parameter)


def _replace(items: MutableMapping[str, Any], names: Iterable[str] | None = None) -> Iterator[Callable[[], None]]:
    """Shows a `ReleasedTensor` in the place of each tensor without memory. Yields what puts it back."""
    for name in list(items if names is None else names):
        if _is_freed(value := items[name]):
            items[name] = ReleasedTensor(value)
            yield partial(items.__setitem__, name, value)


def _is_freed(value: Any) -> bool:
    with without_waiting():
        is_tensor = isinstance(value, Tensor) and value.numel() > 0
        return is_tensor and not local_part(value).untyped_storage().nbytes()


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
