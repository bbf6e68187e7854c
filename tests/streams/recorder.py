"""Notes what each operation of torch reads and writes, and each collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from core.transformer import document_attention, piecewise_attention
from tests.streams.simulation import Event, Simulation, Stream

HOST = torch.device("cpu", 0)
"""The device of the host's memory in a simulation, where that of the GPU is the CPU without an index."""

_IN_PYTHON = {
    module.OPERATION + suffix: implementation
    for module in (document_attention, piecewise_attention)
    for suffix, implementation in (("", module._operation), ("_backward", module._backward_operation))
}
"""What the project's own operations of torch call, by their names."""

_TOUCH_NOTHING = {
    *("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"),
    *("aten::detach", "aten::empty_permuted"),
}
_RECORD_NO_GRAPH = {*_TOUCH_NOTHING, "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros"}
_COPIES = {"aten::copy_", "aten::_to_copy"}
_READ_BY_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors with memory in lists, tuples and dicts."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.device.type == "cpu" and leaf.layout is torch.strided]


class Recorder(TorchDispatchMode):
    """Gives every operation of this thread to a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # which first becomes its local tensors
        if FakeTensor in types:
            return func(*args, **kwargs)
        name = func._schema.name
        if name in _IN_PYTHON:  # an operation of the project's is the operations inside it
            with self, torch.no_grad():
                return _IN_PYTHON[name](*args, **kwargs)
        output = func(*args, **kwargs)
        if not name.startswith("c10d::"):  # which `collective` notes
            self._note(name, func._schema, args, kwargs, output)
        return output

    def _note(self, name: str, schema: Any, args: Any, kwargs: Any, output: Any) -> None:
        simulation, reads, writes = self._simulation, list[Tensor](), list[Tensor]()
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(output)
        if torch.is_grad_enabled() and name not in _RECORD_NO_GRAPH and any(t.requires_grad for t in inputs):
            simulation.graph_recorded(name)
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if is_view:
            return
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        device, to_host = kwargs.get("device"), any(simulation.memory(tensor).is_host for tensor in inputs)
        if device is not None:
            to_host = torch.device(device) == HOST
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
        for tensor in fresh:
            simulation.allocated(tensor, is_host=to_host, is_pinned=bool(kwargs.get("pin_memory")))
        if name in _TOUCH_NOTHING:
            return
        for index, argument in enumerate(schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            info = argument.alias_info
            (writes if info is not None and info.is_write else reads).extend(tensors_in(value))
        writes += fresh
        simulation.operation(name, reads, writes, blocks=self._blocks(name, args, kwargs, reads, writes))

    def _blocks(self, name: str, args: Any, kwargs: Any, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> bool:
        if name in _READ_BY_HOST:
            return True
        memories = [self._simulation.memory(tensor) for tensor in (*reads, *writes)]
        if name not in _COPIES or len({memory.is_host for memory in memories}) < 2:
            return False
        asked = kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
        return not asked or not all(memory.is_pinned for memory in memories if memory.is_host)


class Devices(TorchFunctionMode):
    """Makes tensors in the host's memory differ from the GPU's by their device, for this thread."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE and self._is_host(args[0]):
            return HOST
        if func is Tensor.to and self._is_host(args[0]) and torch.device("cpu") in (*args[1:], *kwargs.values()):
            tensor, dtypes = args[0], [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
            copied = torch.empty(tensor.shape, dtype=dtypes[0] if dtypes else tensor.dtype)
            return copied.copy_(tensor, non_blocking=kwargs.get("non_blocking", False))
        return func(*args, **kwargs)

    def _is_host(self, tensor: Tensor) -> bool:
        return type(tensor) in (Tensor, torch.nn.Parameter) and self._simulation.memory(tensor).is_host


_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]

IN_TWO = (
    *("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base", "all_to_all_single"),
    *("alltoall_base", "allgather", "reduce_scatter", "alltoall", "gather", "scatter", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "all_gather_single_coalesced"),
    "reduce_scatter_single_coalesced",
)
"""Methods of a process group, of any version of torch, that write their first argument and read their second."""
IN_PLACE = ("allreduce", "broadcast", "reduce", "allreduce_coalesced", "send", "recv")
"""Those that read and write their first."""


class SimulatedWork(dist.Work):
    """Work on a backend's stream. Keeps its tensors until it is waited for, as NCCL's does."""

    def __init__(self, work: Any, simulation: Simulation, end: Event | None, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._simulation, self._end, self._tensors = work, simulation, end, tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._end is not None:
            self._end.wait()
        self._tensors = ()
        return True


def collective(simulation: Simulation, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of a process group that notes the call: on the current stream, or, where it is asynchronous, on
    the group's own, which waits for the current one."""

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        options = [each for each in (*args, *kwargs.values()) if hasattr(each, "asyncOp")]
        is_asynchronous = bool(options) and options[0].asyncOp
        given = [*args, *kwargs.values()]
        outputs, inputs = tensors_in(given[0]), tensors_in(given[1] if name in IN_TWO else given[0])
        stream = None
        if is_asynchronous:
            stream = Stream(simulation, f"backend of group {group.group_name}")
            stream.wait_stream(simulation.current)
        simulation.operation(f"{name} of ranks", inputs, outputs, stream=stream)
        work = real(group, *args, **kwargs)
        if name in IN_TWO and isinstance(given[0], Tensor) and outputs:
            _fill(name, given[0], given[1], group)
        end = None if stream is None else stream.record_event()
        return SimulatedWork(work, simulation, end, [*outputs, *inputs])

    return call


def _fill(name: str, output: Tensor, input_: Tensor, group: Any) -> None:
    """Gives an output the values that it had if all ranks had those of this one; a sum is that of one rank."""
    size = group.size()
    with _disable_current_modes(), torch.no_grad():
        if "gather" in name:
            output.view(size, -1).copy_(input_.reshape(1, -1).expand(size, -1))
        else:
            own = input_.reshape(size, -1)[group.rank()]
            output.view(-1, own.numel()).copy_(own.expand(output.numel() // own.numel(), -1))
