"""Runs real code on tensors whose values are never computed, and records what it allocates, computes and sends.

A phantom tensor is an ordinary tensor on the CPU with memory that the system never backs with pages, because nothing
writes to it. Torch's meta kernels give the shapes of results. Small tensors have their values, since code branches on
counts. `FakeTensorMode` would replace the class of parameters, which engines depend on.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from .recorder import HOST, ON_HOST, Kind, Ranks, Recorder, Transfer, Work

MOST_VALUES = 2**12
"""Elements of the largest tensor whose values are computed. Larger ones are phantoms, integers apart."""

MOST_INTEGER_BYTES = 2**21
"""Largest tensor of integers whose values are computed, in bytes: a quarter of a million tokens. Sums of the bits of
large weights are larger."""

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's, which Python names from 3.13 on."""


def _has_values(tensor: Tensor) -> bool:
    """Returns whether the values are computed. A small part of a large phantom has what was in its memory before."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.nbytes <= MOST_INTEGER_BYTES
    most = MOST_VALUES * tensor.itemsize
    return tensor.nbytes <= most and (tensor.is_sparse or tensor.untyped_storage().nbytes() <= most)


_COLLECTIVES: dict[str, tuple[Kind, int]] = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::allgather_": ("all-gather", 0),
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::send": ("send", 0),
}
"""The kind of each collective of torch, and which argument is its whole tensor."""

_META = torch.device("meta")
_RUN_AS_THEY_ARE = {
    *("aten::set_", "aten::resize_", "aten::lift_fresh", "aten::_local_scalar_dense", "aten::is_pinned"),
    *("aten::sparse_coo_tensor", "aten::_sparse_coo_tensor_with_dims_and_tensors"),  # made of two tensors that exist
}


class PhantomMode(TorchDispatchMode):
    """Runs operations on phantom tensors, and records them.

    Args:
        casts_in_memory: an elementwise operation on tensors of two dtypes casts one as a whole, as on the CPU. On an
            accelerator the kernel casts each element.
    """

    def __init__(self, recorder: Recorder, *, casts_in_memory: bool = False) -> None:
        super().__init__()
        self._recorder, self._casts_in_memory = recorder, casts_in_memory
        # Results on meta by operation and the shapes of its inputs. `_shapes_of` adds them.
        self._shapes: dict[Any, Any] = {}
        # The ranks of each process group, added at its first collective.
        self._ranks: dict[ProcessGroup, Ranks] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # which first becomes its local tensors
        if _is_view(func):
            return func(*args, **kwargs)
        name = func._schema.name
        if name.startswith("c10d::"):
            return self._collective(name, args)
        output = self._run(func, name, args, kwargs)
        for tensor in _tensors(output):
            if tensor.device.type == "cpu" and not tensor.is_sparse:
                is_new = self._recorder.follow(tensor)
                if (
                    is_new
                    and self._recorder.uses_host
                    and any(map(self._recorder.is_on_host, _tensors([args, kwargs])))
                ):
                    self._recorder.sort_into(ON_HOST, [tensor])  # what is computed from the host's memory
                if self._casts_in_memory and torch.Tag.pointwise in func.tags:
                    self._cast(args, tensor.dtype)
        return output

    def _cast(self, args: Any, dtype: torch.dtype) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() and arg.dtype != dtype]
        casts = [torch.empty(arg.shape, dtype=dtype) for arg in tensors if dtype.is_floating_point]
        for cast in casts:  # which live at the same time
            self._recorder.follow(cast)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        leaves = _leaves((args, kwargs))
        inputs = [leaf.values() if leaf.is_sparse else leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_on_meta = kwargs.get("device") == _META or any(tensor.is_meta for tensor in inputs)
        if is_on_meta or name in _RUN_AS_THEY_ARE:
            return func(*args, **kwargs)
        if name == "fsdp::all_gather_copy_in":  # returns views of its output
            whole, numel, rank = args[1], args[3], args[4]
            return whole.narrow(0, numel * rank, numel), whole
        has_values = all(map(_has_values, inputs))
        if not func._schema.returns or name == "aten::equal":
            output = func(*args, **kwargs) if has_values else (True if func._schema.returns else None)
        else:
            try:
                shapes = self._shapes_of(func, args, kwargs, leaves)
            except (NotImplementedError, RuntimeError):
                if not has_values:
                    raise
                shapes = None  # it depends on values
            if has_values and all(map(_has_values, _tensors(shapes))):
                output = func(*args, **kwargs)
            else:
                output = _results(func._schema, args, kwargs, shapes)
        self._note(func, args, kwargs, inputs, output)
        return output

    def _shapes_of(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        """Returns the results of an operation on meta. Equal layers ask for equal ones."""
        if func._schema.name == "aten::_grouped_mm":  # which torch refuses on meta in fp32
            rows, matrices = args[:2]
            groups = (len(kwargs["offs"] if "offs" in kwargs else args[2]),) if matrices.dim() == 2 else ()
            return rows.new_empty(*groups, len(rows), matrices.shape[-1], device="meta")
        key = (func, *kwargs, *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves))
        if key not in self._shapes:
            self._shapes[key] = func(*_on_meta(args), **_on_meta(kwargs))
        return self._shapes[key]

    def _note(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], output: Any) -> None:
        if (name := func._schema.name) in _WRITE_NOTHING:
            return
        count = _FLOPS.get(name) or flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **kwargs, out_val=output)) if count else 0
        outputs, on_host = _tensors(output), [*map(self._recorder.is_on_host, inputs)]
        if name == "aten::copy_" and on_host[0] != on_host[1]:
            copy = Transfer("to the host" if on_host[0] else "from the host", inputs[0].nbytes, HOST)
            self._recorder.send(copy, [], outputs)
            return
        nbytes, awaits = sum(t.nbytes for t in (*inputs, *outputs)), self._recorder.read(inputs)
        if nbytes > MOST_VALUES or flops or awaits:
            itemsize = max((tensor.itemsize for tensor in outputs), default=0)
            work = Work(name.removeprefix("aten::"), flops, nbytes, itemsize, awaits, any(on_host))
            self._recorder.events.append((self._recorder.where, work))

    def _collective(self, name: str, args: Any) -> Any:
        """Records a collective. Every rank is taken to have this one's values."""
        work = FakeWork().boxed()
        if name not in _COLLECTIVES:
            return work
        kind, index = _COLLECTIVES[name]
        whole = _tensors(args[index])
        group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        if group not in self._ranks:
            self._ranks[group] = Ranks(torch.distributed.get_process_group_ranks(group))
        ranks = self._ranks[group]
        if kind == "send":
            ranks = Ranks((ranks[group.rank()], ranks[args[2]]))
        collective = Transfer(kind, sum(tensor.nbytes for tensor in whole), ranks)
        if kind == "send":  # nothing here waits for it, and its tensors stay what they are
            self._recorder.events.append((self._recorder.where, collective))
            return work
        outputs, inputs = ([*filter(self._recorder.is_on_host, _tensors(arg))] for arg in args[:2])
        if inputs:
            self._recorder.send(Transfer("from the host", sum(t.nbytes for t in inputs), HOST), [], [])
        on_device = [torch.empty_like(tensor) for tensor in outputs]  # until they are copied to the host
        for tensor in on_device:
            self._recorder.follow(tensor)
        self._recorder.send(collective, [*_tensors(args), *on_device], _tensors(args[0]))
        if outputs:
            self._recorder.send(Transfer("to the host", sum(t.nbytes for t in outputs), HOST), [], outputs)
        if kind == "all-gather" and all(map(_has_values, whole)):
            (own,) = _tensors(args[1])
            for tensor in whole:
                tensor.view(-1, *own.shape).copy_(own.expand(tensor.numel() // max(own.numel(), 1), *own.shape))
        elif kind == "all-to-all" and _has_values(args[0]) and args[0].numel() == args[1].numel():
            args[0].view(len(ranks), -1).copy_(args[1].view(len(ranks), -1)[group.rank()])
        return work if name == "c10d::alltoall_base_" else (args[index], work)


_WRITE_NOTHING = {
    f"aten::{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
}


@functools.cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)


def _leaves(values: Any) -> list[Any]:
    """Returns what is in tuples, lists and dicts, in order: quicker than torch's trees, and called for all."""
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return [values]
    leaves = []
    for value in values:
        if isinstance(value, (tuple, list, dict)):
            leaves += _leaves(value)
        else:
            leaves.append(value)
    return leaves


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(values) if isinstance(leaf, Tensor)]


def _on_meta(values: Any) -> Any:
    def shape_of(tensor: Tensor) -> Tensor:
        if tensor.is_sparse:  # added to a dense one
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    if isinstance(values, dict) and "device" in values:
        values = {**values, "device": _META}
    return tree_map_only(Tensor, shape_of, values)


def _results(schema: Any, args: Any, kwargs: Any, shapes: Any) -> Any:
    """Allocates the results of an operation with these shapes. What it writes in place is its argument."""
    written = {
        str(argument.alias_info.before_set): args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }

    results = [
        written[str(each.alias_info.before_set)]
        if each.alias_info is not None
        else tree_map_only(Tensor, _memory, shape)
        for each, shape in zip(schema.returns, shapes if len(schema.returns) > 1 else (shapes,), strict=True)
    ]
    return results[0] if len(results) == 1 else tuple(results)


def _memory(shape: Tensor) -> Tensor:
    try:
        memory = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    except RuntimeError:  # more than Linux promises at once on this machine: it need not promise what nobody writes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mapped = mmap.mmap(-1, shape.untyped_storage().nbytes(), flags=flags)
        return torch.frombuffer(mapped, dtype=shape.dtype).as_strided(shape.shape, shape.stride())
    return memory.zero_() if _has_values(shape) else memory


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *options: Any, products: int = 2, **_: Any) -> int:
    """Products for each pair of a query and a key that it attends to, exact for a causal mask.

    Args:
        options: dropout, and whether the mask is causal.
        products: two forward; five backward, one of forward again and the gradients of query, key and value.
    """
    batch, heads, queries, width = query.shape
    is_causal = len(options) > 1 and options[1]
    pairs = queries * (queries + 1) // 2 if is_causal else queries * key.shape[2]
    return products * batch * heads * pairs * (width + value.shape[3])


_FLOPS: dict[str, Callable[..., int]] = {
    "aten::_grouped_mm": lambda rows, matrices, *_, **__: 2 * rows.shape[0] * rows.shape[1] * matrices.shape[-1],
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda grad, *inputs, **_: _attention_flops(
        *inputs[:3], *inputs[5:], products=5
    ),
}


@contextmanager
def replaced_in_torch(owner: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Puts a function in the place of a method of torch's that no mode of torch sees: `TorchDispatchMode` sees no
    resized storage and no move that does nothing, and `TorchFunctionMode` nothing that hooks of a backward call.

    FSDP2 calls both in such hooks. If it frees units by another call than ``UntypedStorage.resize_``, a plan counts
    them as held to the end, and if it moves offloaded shards by another than ``Tensor.to``, as never moved: tests
    compare plans with real steps.
    """
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def phantoms(recorder: Recorder, *, casts_in_memory: bool = False) -> Iterator[None]:
    """Makes every tensor of this thread a phantom, and records it. Takes what `PhantomMode` takes."""
    resize = torch.UntypedStorage.resize_

    def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
        resized = resize(storage, size)
        recorder.resized(storage)
        return resized

    with (
        PhantomMode(recorder, casts_in_memory=casts_in_memory),
        replaced_in_torch(torch.UntypedStorage, "resize_", resize_and_record),
    ):
        yield
