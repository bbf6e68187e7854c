"""Hides differences between the torch versions that `pyproject.toml` allows."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.fsdp import FSDPModule


def all_gather_single(output: Tensor, input_: Tensor, group: ProcessGroup, async_op: bool = False) -> Work | None:
    """Gathers every rank's `input_` into `output`, along dim 0. Torch before 2.13 has another name for it."""
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    work: Work | None = gather(output, input_, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: Tensor, input_: Tensor, group: ProcessGroup, async_op: bool = False, op: ReduceOp.RedOpType = ReduceOp.SUM
) -> Work | None:
    """Reduces `input_` over ranks. Each rank keeps its part of dim 0. See :func:`all_gather_single`."""
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    work: Work | None = scatter(output, input_, op=op, group=group, async_op=async_op)
    return work


def group_of_name(name: str) -> ProcessGroup:
    """Returns the process group of this name, which code that is compiled takes in place of the group."""
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    group: ProcessGroup = resolve(name)
    return group


def named_group(name: str, ranks: Sequence[int], timeout: timedelta | None = None) -> ProcessGroup:
    """Makes a group of some ranks, which only they call. `name` is new to each of them.

    Torch names such a group by its ranks and a count: of the groups that a rank is in, before 2.15, or of its calls.
    Ranks with other counts use other names, and wait for each other. From 2.15 on the call itself is counted, on these
    ranks alone, and the next group that all ranks make hangs. The function that is replaced names and counts groups;
    under another name of it both hangs come back.
    """
    torch_names: Any = vars(dist.distributed_c10d)
    by_count = torch_names["_process_group_name"]
    torch_names["_process_group_name"] = lambda *_, **__: name
    try:
        group: ProcessGroup = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        torch_names["_process_group_name"] = by_count
    return group


def reduce_parameters_without_gradient(module: FSDPModule) -> None:
    """Lets an FSDP2 module reduce zeros for a parameter that backward did not reach on this rank.

    Torch before 2.13 has no such setting, and would reduce on some ranks a gradient that others leave out: there the
    parameter gets zeros just before the module collects its gradients.
    """
    setter = getattr(module, "set_reduce_scatter_unused_params", None)
    if setter is not None:
        setter(True)
        return
    state = module._get_fsdp_state()
    # Both replacements stay on torch's own objects, never restored. torch's post-backward calls the method for each
    # parameter just before it collects gradients; under another name zeros would no longer be added.
    state._state_ctx.all_states = _UniqueList()
    for group in fsdp_param_groups(state):
        for parameter in group.fsdp_params:
            accumulate = parameter.accumulate_unsharded_grad_if_needed
            parameter.accumulate_unsharded_grad_if_needed = partial(_or_zeros, accumulate, parameter, group)


class _UniqueList(list[Any]):
    """A list without duplicates for the states that torch before 2.13 appends, one for each module of a unit.

    Modules of one unit share a state, whose gradients would otherwise be collected several times.
    """

    def append(self, state: Any) -> None:
        if not any(state is other for other in self):
            super().append(state)


def _or_zeros(accumulate: Callable[[], None], parameter: Any, group: Any) -> None:
    accumulate()
    whole = getattr(parameter, "_unsharded_param", None)  # absent before the first all-gather
    if not group.reduce_grads or whole is None or not whole.requires_grad:
        return
    if whole.grad is None and parameter.unsharded_accumulated_grad is None:
        whole.grad = torch.zeros_like(whole)  # torch's post-backward reduces and clears it


def accumulates_into_leaf(node: Any) -> bool:
    """Returns whether the backward that is running adds into the ``.grad`` of `node`'s parameter.

    `node` is a leaf node of the graph. Under `torch.autograd.grad` the caller gets the gradient instead.
    """
    if not hasattr(node, "variable"):
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch raises it under `grad`
        return False


NO_BACKWARD = -1


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the unique number of the running backward, or `NO_BACKWARD` outside of any.

It is torch's own function, because hooks ask it several times for each layer."""


def fsdp_param_groups(state: Any) -> list[Any]:
    """Returns the parameter groups of an FSDP2 module's state, which is a list in newer torch, one or None before."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def forget_sharding_decisions() -> None:
    """Empties DTensor's caches of operator layouts. Call it when process groups are destroyed.

    DTensor looks up cached layouts by the *contents* of a mesh and returns the first mesh object. After groups were
    destroyed and meshes of the same ranks built, new DTensors would get the old mesh, whose groups no longer exist.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return  # nothing is cached, and importing it is slow
    from torch.distributed.tensor import debug

    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        if (clear := getattr(debug, name, None)) is not None:
            clear()


def group_time_limit(group: ProcessGroup) -> timedelta:
    """Returns how long a backend lets a collective of a group take, or torch's default where it does not say."""
    for kind in ("cuda", "cpu"):
        try:
            limit = group._get_backend(torch.device(kind)).options._timeout
        except (AttributeError, RuntimeError):  # no backend for such tensors, or one without options
            continue
        if isinstance(limit, timedelta):
            return limit
    return dist.constants.default_pg_timeout


def abort_process_groups() -> None:
    """Ends the communicators of all groups, and forgets the groups. NCCL alone knows it: collectives that the device
    waits in end there without a result."""
    dist.distributed_c10d._abort_process_group()


def flight_recorder() -> list[dict[str, Any]]:
    """Returns torch's record of this process's collectives, the oldest first. Some builds and backends have none.

    NCCL records `TORCH_FR_BUFFER_SIZE` entries (`TORCH_NCCL_TRACE_BUFFER_SIZE` before 2.10); gloo has a record from
    2.9 on. Each entry has ``profiling_name``, ``collective_seq_id`` and ``state``.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries") or []
    return entries


Function = TypeVar("Function", bound=Callable[..., Any])


def called_while_compiled(function: Function) -> Function:
    """Marks a function of constants that compiled code does not call: its result is a constant of the code.

    As `torch.compiler.assume_constant_result`, which imports the compiler, and that takes longer than the rest of this
    package. Without the mark the compiler would trace the function, and break the graph of a layer at it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_functionalized() -> bool:
    """Returns whether torch's compiler runs Python code to trace its operations, forward and backward."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def compile_variants(function: Function, most: int) -> Function:
    """Compiles a function of tensors with any number of rows, once for each kind of tensors, beyond which torch calls
    the function directly: up to `most` times where `torch.compile` takes a limit (torch 2.13), else up to 8 times."""
    takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    limit: Any = {"recompile_limit": most} if takes_limit else {}
    compiled: Any = torch.compile(function, dynamic=True, **limit)
    return compiled  # type: ignore[no-any-return]


def replace_returned(operation: Any, replacement: Any) -> bool:
    """Makes torch's default compiler call another operation where compiled code returns an operation's result to its
    caller, and does nothing else with it.

    Only there may the result be memory that others own: the compiler reuses the memory of results that it has read,
    for other results. CUDA graphs own all memory, so nothing is replaced in them. Other compilers replace nothing.

    Args:
        replacement: has the operation's arguments and results.

    Returns:
        Whether torch has the private names that this takes.
    """
    try:
        from torch._inductor import config
        from torch._inductor.graph import GraphLowering
        from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
        from torch._inductor.virtualized import V
    except ImportError:
        return False

    def lower(*args: Any) -> Any:
        # A graph within another is of another type. What it returns is a result like any other.
        is_returned = type(V.graph) is GraphLowering and all(u.op == "output" for u in V.graph.current_node.users)
        called = replacement if is_returned and not config.triton.cudagraphs else operation
        return fallback_handler(called.default)(*args)

    if operation.default not in lowerings:
        register_lowering(operation.default, type_promotion_kind=None)(lower)
    return True


def compiles_for_gpus() -> bool:
    """Returns whether torch finds Triton, and a GPU that it compiles for."""
    from torch.utils._triton import has_triton

    return has_triton()


_REMEDIES = {
    "InvalidCxxCompiler": "install a C++ compiler (g++), or name one in CXX",
    "TritonMissing": "install triton, which torch's packages for CUDA bring along",
    "GPUTooOldForTriton": "compile for a newer GPU",
}
"""What to do about errors of torch's compiler, by the names of their types: importing these takes a second."""


def missing_compiler(error: BaseException) -> tuple[str, str] | None:
    """Returns what torch says and what to do, if an error means that torch cannot compile here at all, else None."""
    cause: BaseException = getattr(error, "inner_exception", error)  # what the compiler met
    remedy = _REMEDIES.get(type(cause).__name__)
    return None if remedy is None else (str(cause).splitlines()[0], remedy)
