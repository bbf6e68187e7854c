"""Says which part of a parameter this rank has, and when its values can be read.

A rank has a shard of a DTensor, and a range of the elements of a parameter in flat memory, which the wrapper notes on
the parameter.

An optimizer that shards its state leaves the all-gather of the parameters running. The first use of a parameter waits
until it is gathered, or raises where it is no longer the model's. A module's forward is not the only reader: a parent
may read its child's weights (`torch.nn.MultiheadAttention`), and so may hooks, a state dict, or code that clamps or
averages weights. The wait is therefore in the parameter: while it is pending, its class is a subclass whose
``__torch_function__`` waits for the gather, restores `nn.Parameter` as the class of all parameters of that gather, and
runs the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

Group = ProcessGroup | None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local tensor, or a plain tensor itself. Shares storage, and stays in the autograd graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def packing_of(param: Tensor) -> dict[str, Any]:
    """Returns the attributes by which a layer unpacks a parameter whose elements are codes, not numbers.

    They are bitsandbytes' names: ``quant_state`` in 4 bits; in 8 bits ``SCB``, the scales of rows, and ``CB``, the
    codes that the layer reads. ``holds_codes`` is ours, of views. None does not count.
    """
    names = ("quant_state", "SCB", "CB", "holds_codes")
    return {name: state for name in names if (state := getattr(param, name, None)) is not None}


def is_packed(param: Tensor) -> bool:
    """Returns whether a parameter's elements are codes, which no cast may touch and no gradient can change."""
    return bool(packing_of(param))


_RANGE = "held_range"
"""An attribute of a parameter: its elements on this rank. Set by `keep_range` when the model is wrapped, to None
inside `whole_parameters`. The elements are a view of the wrapper's memory, valid as long as the wrapper exists."""


def keep_range(param: Tensor, elements: tuple[Tensor, int] | None) -> None:
    """Notes on a parameter which of its elements this rank keeps, and where.

    Args:
        elements: `[n]`, contiguous, and the first one's place in the flattened parameter. None where the
            parameter itself has its values.
    """
    setattr(param, _RANGE, elements)


def kept_range(param: Tensor) -> tuple[Tensor, int] | None:
    """Returns what `keep_range` has noted."""
    elements: tuple[Tensor, int] | None = getattr(param, _RANGE, None)
    return elements


def elements_of(param: Tensor, start: int, end: int) -> Tensor:
    """Returns elements ``[start, end)`` of a flattened parameter, which this rank has: whole, or in its range."""
    values, first = kept_range(param) or (param.detach().view(-1), 0)
    return values[start - first : end - first] if start < end else values[:0]


def whole_shape(parameter: Tensor, tp_group: Group, ep_group: Group = None) -> list[int]:
    """Returns the whole model's shape of a parameter, before it was cut over ranks, by its marks, and sharded."""
    shape = list(parameter.shape)  # a DTensor's shape is that before sharding
    for dim, ranks in _cuts(parameter, tp_group, ep_group):
        shape[dim] *= 1 if ranks is None else ranks.size()
    return shape


def copy_partition(whole: Tensor, parameter: Tensor, tp_group: Group, ep_group: Group = None) -> None:
    """Fills this rank's part from the whole model's tensor, in place and without communication."""
    for dim, ranks in _cuts(parameter, tp_group, ep_group):
        if ranks is not None:
            whole = whole.chunk(ranks.size(), dim)[ranks.rank()]
    copy_shard(whole, parameter)


def _cuts(parameter: Tensor, tp_group: Group, ep_group: Group) -> Iterator[tuple[int, Group]]:
    """Yields the dims by which ranks share a parameter, by its marks, and the ranks of each."""
    if getattr(parameter, "expert_model_parallel", False):
        yield 0, ep_group
    if getattr(parameter, "tensor_model_parallel", False):
        yield parameter.partition_dim, tp_group  # type: ignore[attr-defined]


def copy_shard(whole: Tensor, parameter: Tensor) -> None:
    """Fills a parameter, or this rank's part of a sharded one, from one tensor-parallel rank's tensor `whole`."""
    if (elements := kept_range(parameter)) is not None:
        values, start = elements
        values.copy_(whole.detach().reshape(-1)[start : start + len(values)])
        torch.autograd.graph.increment_version(parameter)  # it counts as a write to the parameter
    elif isinstance(parameter, DTensor):
        # Without a source rank every rank shards its own copy.
        shards = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shards.to_local())
    else:
        parameter.copy_(whole)


_WAIT = "_wait_until_gathered"
"""An attribute of a parameter: the function that its first reader calls. `make_pending` sets it and `end_pending`
deletes it. It exists exactly while the parameter's class is `_PendingParameter`."""

_VIEW = "pending_view"
"""An attribute of a parameter: the function that returns its ``detach()`` and ``data`` while it is pending.
`set_pending_view` sets it when the model is wrapped. It is never removed."""


without_waiting = torch._C.DisableTorchFunctionSubclass
"""A context manager: reads metadata and ``grad`` of many parameters without asking for each whether it is pending."""


def can_be_pending(param: nn.Parameter) -> bool:
    """Returns whether the class is `nn.Parameter` itself. A subclass may depend on its class, so it is left alone."""
    return type(param) is nn.Parameter


def make_pending(params: Iterable[nn.Parameter], wait: Callable[[], None]) -> None:
    """Makes the first function that reads one of `params` call `wait`, which has to call `end_pending`."""
    for param in params:
        setattr(param, _WAIT, wait)
        param.__class__ = _PendingParameter


def end_pending(params: Iterable[nn.Parameter]) -> None:
    """Makes `params` ordinary parameters again."""
    for param in params:
        if type(param) is _PendingParameter:
            param.__class__ = nn.Parameter  # type: ignore[assignment]
            delattr(param, _WAIT)


class _PendingParameter(nn.Parameter):
    """A parameter whose values are still being gathered."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _aliases() and hasattr(args[0], _VIEW):
            return getattr(args[0], _VIEW)()
        has_address = func is Tensor.data_ptr and hasattr(args[0], _VIEW)
        if func not in readers_without_values() and not has_address:
            for value in torch.utils._pytree.tree_leaves((args, kwargs)):
                if type(value) is _PendingParameter:
                    getattr(value, _WAIT)()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        getattr(self, _WAIT)()
        return self.__deepcopy__(memo)  # of `nn.Parameter`, which is the class again

    def __reduce_ex__(self, protocol: Any) -> Any:
        getattr(self, _WAIT)()
        return self.__reduce_ex__(protocol)


def set_pending_view(param: nn.Parameter, view: Callable[[], Tensor]) -> None:
    """Makes a pending parameter's ``detach()`` and ``data`` return ``view()``. They and its address do not wait."""
    setattr(param, _VIEW, view)


@functools.cache
def _aliases() -> frozenset[Any]:
    data: Any = Tensor.data
    return frozenset({Tensor.detach, data.__get__})


@functools.cache
def readers_without_values() -> frozenset[Any]:
    """Returns the functions that do not read values: of metadata such as the shape, of the gradient, and of hooks."""
    names = ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "is_cuda", "is_meta", "is_sparse", "is_cpu")
    getters = {getattr(Tensor, name).__get__ for name in (*names, "requires_grad", "grad", "grad_fn", "_version")}
    descriptors: list[Any] = [Tensor.grad, Tensor.requires_grad]
    setters = {descriptor.__set__ for descriptor in descriptors} | {descriptors[0].__delete__}
    methods = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size}
    others = {Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_, Tensor.is_contiguous, Tensor.__len__}
    # Constructors of optimizers call these.
    others |= {torch.is_complex, torch.is_floating_point, torch.zeros_like, torch.ones_like, torch.full_like}
    others |= {torch.empty_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty}
    hooks = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}
    return frozenset(getters | setters | methods | others | hooks)
