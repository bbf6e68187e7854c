"""Hooks around forwards, in either engine: the work around a call of a module, and weights that autograd saves in it.

`WrapperHook` and `enclose` put a wrapper's work around `forward` and around other methods. `SavedTensors` are hooks
around what autograd saves in a forward. `SavedWeights` keeps the
weights of freed units readable: those that autograd has saved, and those that outlive a forward. They are gathered
into memory that is freed, or given to another unit, after the forward. Backward gathers the unit again when it
reaches one of its outputs. It may reach an operation of the unit on another path before that: a router's loss that a
layer keeps in an attribute, a result inside an object. Autograd unpacks a saved weight right before it is read: then
the unit is gathered, and the weight is read from where it is now. A view of a weight that is in use after the forward
(returned, or kept in an attribute) cannot follow; the unit then has to keep its memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ...base.parameters import local_part


class WrapperHook:
    """A hook that a wrapper puts on modules. In a copied or pickled module, which no wrapper trains, it does nothing.

    Args:
        call: the hook itself.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        # Fixed: it leads to the wrapper, whose process groups can neither be copied nor pickled.
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return WrapperHook, (_do_nothing,)


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


def enclose(
    method: Callable[..., Any], before: Callable[[Any, Any, Any], Any], after: Callable[[Any, Any, Any], Any]
) -> Callable[..., Any]:
    """Returns a method of a module with the work of hooks of its forward around it.

    Args:
        before: a forward pre-hook with keyword arguments, called without the module. Returns other arguments, or None.
        after: a forward hook that is always called, with None for the output of a method that raised.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(None, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            new_output = after(None, args, output)
        return output if new_output is None else new_output

    return run


def watch_outputs(output: Any, hook: Callable[[Tensor], None]) -> None:
    """Makes backward call `hook` with the gradient of each tensor in `output`, when it reaches one."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(hook)


# ---- weights that autograd saves

Place = Callable[[Tensor], Callable[[], Tensor] | None]
"""Is given a tensor that autograd saves. Returns what reads it again, or None to leave it to the hooks around."""


class SavedTensors:
    """Hooks of autograd (`torch.autograd.graph.saved_tensors_hooks`) around forwards, which may end by an exception.

    Tensors that have no place go to the hooks around these, such as those of `save_on_cpu` or of a checkpoint. Without
    such hooks they are saved as they are, and checked for writes when they are read, as autograd does without hooks.
    """

    def __init__(self) -> None:
        # Forwards that are running, on the thread that runs them. `begin_with` and `end` count.
        self._num_running = 0

    def begin_with(self, place: Place) -> None:
        """Begins a forward."""
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack_around, unpack_around = (keep, read_kept) if around is None else around

        def pack(tensor: Tensor) -> Any:
            return place(tensor) or (pack_around(tensor),)

        def unpack(packed: Any) -> Any:
            return unpack_around(packed[0]) if type(packed) is tuple else packed()

        # Torch's context manager, in two halves: a forward begins and ends in two hooks of its module. Hooks of torch
        # do not chain by themselves, only the innermost are called: hence `around`.
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        self._num_running += 1

    def end(self) -> None:
        """Ends the last forward that has begun, if any. It may have raised."""
        if self._num_running:
            self._num_running -= 1
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def end_all(self) -> None:
        """Ends forwards that something other than an `Exception` has interrupted, such as a signal."""
        while self._num_running:
            self.end()


def in_use_message(unit: str) -> str:
    """Returns the warning for a unit that has to keep its memory."""
    return (
        f"weights of unit {unit} are used outside of its forward; it keeps its memory from now on, as with "
        f"reshard_overrides=({unit + '=False'!r},)"
    )


class SavedWeights(SavedTensors):
    """Keeps weights readable that autograd saves in the forwards of one unit, wherever the unit is gathered later.

    Args:
        memory: returns the tensors that the unit is gathered into; the same storages while a forward runs.
        gather: gathers the unit unless it is gathered; called on the thread that runs backward.
    """

    def __init__(self, memory: Callable[[], Sequence[Tensor]], gather: Callable[[], None]) -> None:
        super().__init__()
        self._memory, self._gather = memory, gather
        # Index in the memory, by storage; the unit may move. `begin` sets it, on the thread of the forward.
        self._index_of: dict[int, int] = {}
        # The least number of tensors in each storage at the beginning of a forward: the parameters, and what the
        # engine holds. `begin` updates it.
        self._least_uses: dict[int, int] = {}

    def begin(self) -> None:
        """Begins a forward of the unit, which is gathered."""
        self._index_of = {tensor.untyped_storage()._cdata: i for i, tensor in enumerate(self._memory())}
        # A view holds its storage, not the parameter: only torch's count of the storage tells that one lives.
        for storage in self._index_of:
            uses = torch._C._storage_Use_Count(storage)
            self._least_uses[storage] = min(uses, self._least_uses.get(storage, uses))
        self.begin_with(self._place)

    def are_in_use(self) -> bool:
        """Returns whether a view of a weight has outlived the forwards of the unit."""
        return any(torch._C._storage_Use_Count(storage) > self._least_uses[storage] for storage in self._index_of)

    def _place(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Returns what reads a tensor again if it is a weight of the unit, or a view of one."""
        local = tensor
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                local = local_part(tensor)
        if local.layout != torch.strided:  # sparse, or of another backend: no weight, and without one storage
            return None
        index = self._index_of.get(local.untyped_storage()._cdata)
        if index is None:
            return None
        if type(tensor) is nn.Parameter:  # stays the model's wherever the unit is gathered
            return functools.partial(self._read_parameter, tensor)
        return _SavedView(self, index, tensor, local)

    def _read_parameter(self, param: nn.Parameter) -> Tensor:
        self._gather()
        return param

    def read(self, index: int) -> Tensor:
        """Returns a tensor of the gathered memory."""
        self._gather()
        return self._memory()[index]


class _SavedView:
    """The place of a view of a weight, or of a DTensor, in the memory that its unit is gathered into."""

    __slots__ = ("dtype", "index", "mesh", "owner", "place")

    def __init__(self, owner: SavedWeights, index: int, tensor: Tensor, local: Tensor) -> None:
        # The place of the weight stays, whichever memory its unit is gathered into next.
        self.owner, self.index, self.dtype = owner, index, local.dtype
        self.place = local.shape, local.stride(), local.storage_offset()
        self.mesh: Any = None
        if isinstance(tensor, DTensor):  # of tensor parallelism
            self.mesh = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def __call__(self) -> Tensor:
        memory = self.owner.read(self.index)
        local = (memory if memory.dtype == self.dtype else memory.view(self.dtype)).as_strided(*self.place)
        if self.mesh is None:
            return local
        mesh, placements, shape, stride = self.mesh
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def keep(tensor: Tensor) -> tuple[Tensor, int]:
    """Packs a tensor as it is."""
    # An operation that saves its own output would keep itself alive for ever.
    return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version


def read_kept(packed: tuple[Tensor, int]) -> Tensor:
    """Returns a tensor that `keep` packed, and raises if it was written since, as autograd does without hooks.

    Raises:
        RuntimeError: in torch's words.
    """
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead"
        )
    return tensor
