"""Keeps the weights of freed units readable: those that autograd has saved, and those that outlive a forward.

A unit's weights are gathered into memory that is freed, or given to another unit, after its forward. Backward gathers
the unit again when it reaches one of its outputs. It may reach an operation of the unit on another path before that: a
router's loss that a layer keeps in an attribute, a result inside an object. Autograd unpacks a saved weight right
before it is read: then the unit is gathered, and the weight is read from where it is now. A view of a weight that is
in use after the forward (returned, or kept in an attribute) cannot follow; the unit then has to keep its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..dtensors import local_part

_Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""How a tensor is packed when autograd saves it, and unpacked when it is read."""


def in_use_message(unit: str) -> str:
    """Returns the warning for a unit that has to keep its memory."""
    return (
        f"weights of unit {unit} are used outside of its forward; it keeps its memory from now on, as with "
        f"reshard_overrides=({unit + '=False'!r},)"
    )


class SavedWeights:
    """Hooks of autograd (`torch.autograd.graph.saved_tensors_hooks`) around each forward of one unit.

    Tensors that are no weights go to the hooks around it, such as those of `save_on_cpu` or of a checkpoint. Without
    such hooks they are saved as they are, and checked for writes when they are read, as autograd does without hooks.

    Args:
        memory: returns the tensors that the unit is gathered into; the same storages while a forward runs.
        gather: gathers the unit unless it is gathered; called on the thread that runs backward.
    """

    def __init__(self, memory: Callable[[], Sequence[Tensor]], gather: Callable[[], None]) -> None:
        self._memory, self._gather = memory, gather
        # Forwards of the unit that are running, on the thread that runs them. `begin` and `end` count.
        self._running = 0
        # The least number of tensors in each storage of the memory at the beginning of a forward: the parameters, and
        # what the engine holds. `begin` updates it.
        self._least_uses: dict[int, int] = {}

    def begin(self) -> None:
        """Begins a forward of the unit, which is gathered."""
        for storage, uses in self._uses().items():
            self._least_uses[storage] = min(uses, self._least_uses.get(storage, uses))
        around: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = partial(self._pack, around), partial(_unpack, around)
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        self._running += 1

    def end(self) -> None:
        """Ends the last forward that has begun, if any; it may have raised."""
        if self._running:
            self._running -= 1
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def end_all(self) -> None:
        """Ends forwards that something other than an `Exception` has interrupted, such as a signal."""
        while self._running:
            self.end()

    def are_in_use(self) -> bool:
        """Returns whether a view of a weight has outlived the forwards of the unit."""
        return any(uses > self._least_uses.get(storage, uses) for storage, uses in self._uses().items())

    def _uses(self) -> dict[int, int]:
        storages = (tensor.untyped_storage()._cdata for tensor in self._memory())
        return {storage: torch._C._storage_Use_Count(storage) for storage in storages}

    def _pack(self, around: _Hooks | None, tensor: Tensor) -> Any:
        with torch.no_grad():
            local = local_part(tensor)
        storage = local.untyped_storage()._cdata
        for index, memory in enumerate(self._memory()):
            if memory.untyped_storage()._cdata == storage:
                return _SavedWeight(self, index, tensor, local)
        return _Saved(tensor) if around is None else around[0](tensor)

    def read(self, index: int) -> Tensor:
        """Returns a tensor of the gathered memory."""
        self._gather()
        return self._memory()[index]


class _SavedWeight:
    """The place of a saved weight, or of a view of one, in the memory that its unit is gathered into."""

    __slots__ = ("dtype", "index", "mesh", "owner", "place")

    def __init__(self, owner: SavedWeights, index: int, tensor: Tensor, local: Tensor) -> None:
        self.owner, self.index, self.dtype = owner, index, local.dtype
        self.place = local.shape, local.stride(), local.storage_offset()
        self.mesh: Any = None
        if isinstance(tensor, DTensor):  # of tensor parallelism
            self.mesh = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def read(self) -> Tensor:
        local = self.owner.read(self.index).view(self.dtype).as_strided(*self.place)
        if self.mesh is None:
            return local
        mesh, placements, shape, stride = self.mesh
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class _Saved:
    """A tensor as autograd saves it without hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # An operation that saves its own output would keep itself alive for ever.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version

    def read(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


def _unpack(around: _Hooks | None, packed: Any) -> Tensor:
    unpacked: Tensor = packed.read() if around is None or isinstance(packed, _SavedWeight) else around[1](packed)
    return unpacked
