"""What FSDP2 keeps to itself: the only file that reads, and sets, its private state; its tests pin what it reads.

Gradients that a sharded model holds whole, because `no_sync` kept them on this rank: FSDP2 reduces a unit's gradient
from the backward hook that produced it, and after a last micro-batch inside `no_sync`, or one that did not reach every
unit, whole gradients are left over; torch has no public way to reduce or to drop them. Gathers that were started
ahead of a use that never came. The ranks among which a unit stays gathered between forward and backward. What units
are gathered and reduced by, and the memory that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState

from ..._torch_compat import fsdp_param_groups
from ...diagnostics.stale_optimizers import is_marked, mark_as_gathered
from .exchanged_units import drop_gather_under_way


def reduce_unsharded_gradients(root: nn.Module) -> None:
    """Reduces what is left over, by the same path as the end of a backward; every rank must call it."""
    if any(_has_unsharded_gradient(parameter) for parameter in _fsdp_parameters(root)):
        _state(root)._root_post_backward_final_callback()


def drop_unsharded_gradients(root: nn.Module) -> None:
    """Forgets what is left over, as between two steps of which the first was abandoned."""
    for parameter in _fsdp_parameters(root):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def complete_accumulated_gradients(root: nn.Module) -> None:
    """Gives a zero to each parameter that `no_sync` brought no gradient, in a group where it brought others one.

    What accumulates is of the reduction's dtype; a gradient that is absent, or that comes in the last backward alone,
    is of the computation's, and FSDP2 reduces one dtype at a time.
    """
    for group in _param_groups(root):
        trained = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p._unsharded_param.requires_grad]
        accumulated = (p.unsharded_accumulated_grad for p in trained)
        if (found := next((gradient for gradient in accumulated if gradient is not None), None)) is None:
            continue
        for parameter in trained:
            if parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = torch.zeros_like(parameter._unsharded_param, dtype=found.dtype)


def tolerate_units_never_gathered(root: nn.Module) -> None:
    """Lets `no_sync` end a backward of a model of which no forward has reached some unit: torch asks for its gradient.

    (pytorch/pytorch#194058)
    """
    for parameter in _fsdp_parameters(root):
        parameter.to_accumulated_grad_if_needed = partial(
            _if_gathered_before, parameter, parameter.to_accumulated_grad_if_needed
        )


def _if_gathered_before(parameter: Any, method: Callable[[], None]) -> None:
    if hasattr(parameter, "_unsharded_param"):
        method()


def keep_changes_of_requires_grad(root: nn.Module) -> None:
    """Lets a program freeze or thaw a parameter while it is gathered: torch would forget it with the gathered one.

    (pytorch/pytorch#105371)
    """
    for parameter in _fsdp_parameters(root):
        parameter.to_unsharded = partial(_to_unsharded, parameter, parameter.to_unsharded)
        parameter.to_sharded = partial(_to_sharded, parameter, parameter.to_sharded)


def _to_unsharded(parameter: Any, method: Callable[[], None]) -> None:
    method()
    parameter.requires_grad_when_gathered = parameter._unsharded_param.requires_grad


def _to_sharded(parameter: Any, method: Callable[[], None]) -> None:
    gathered = getattr(parameter, "_unsharded_param", None)
    if gathered is not None and gathered.requires_grad != parameter.requires_grad_when_gathered:
        parameter.sharded_param.requires_grad_(gathered.requires_grad)
        parameter.requires_grad_when_gathered = gathered.requires_grad
    method()


def free_partial_shards(root: nn.Module) -> None:
    """Frees what `PartialReshard` keeps after a forward, where the unit went back to its shard without a backward."""
    for group in _param_groups(root):
        if group.is_sharded:
            for parameter in group.fsdp_params:
                parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None


def is_in_forward(root: nn.Module) -> bool:
    """Whether a forward of the sharded model, or of a unit called by itself, is running."""
    return _state(root)._state_ctx.iter_forward_root is not None


def has_failed_in_backward(root: nn.Module) -> bool:
    """Whether the last backward raised before FSDP2's callback at its end; to be asked outside of any backward."""
    return bool(_state(root)._state_ctx.post_backward_final_callback_queued)


def reset_iteration(root: nn.Module) -> None:
    """Brings units back to their shards and FSDP2 to the state between steps, after a forward or backward raised.

    Gradients stay, those that accumulate on this rank too.
    """
    state = _state(root)
    if hasattr(state, "_reset_iter_state"):  # torch 2.13
        state._reset_iter_state()
        return
    drop_pending_gathers(root)
    for each in state._state_ctx.all_states:
        each._training_state = TrainingState.IDLE
    for group in _param_groups(root):
        group._training_state = TrainingState.IDLE
        group.finalize_backward()
        group._to_sharded()
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def forget_forward_order(root: nn.Module) -> None:
    """Empties torch's list of the forwards since the last backward, which evaluations make longer and longer.

    A backward that follows all the same gathers its units when it reaches them.
    """
    comm_ctx = getattr(_state(root), "_comm_ctx", None)
    if comm_ctx is not None and hasattr(comm_ctx, "post_forward_order"):  # else no forward has run
        comm_ctx.post_forward_order.clear()
        for group in _param_groups(root):
            group._post_forward_indices.clear()


def shard_versions(root: nn.Module) -> list[int]:
    """For each parameter a number that grows when its shard is written, as a DTensor or as the local tensor in it."""
    return [
        parameter.sharded_param._version + parameter._sharded_param_data._version
        for parameter in _fsdp_parameters(root)
    ]


def gathered_versions(root: nn.Module) -> dict[Any, int]:
    """The same of the gathered parameters that modules compute with, by torch's object; a gather is no write."""
    parameters = (p for p in _fsdp_parameters(root) if hasattr(p, "_unsharded_param"))
    return {parameter: parameter._unsharded_param._version for parameter in parameters}


def name_of_parameter(parameter: Any) -> str:
    """The name below the root, of torch's object for a sharded parameter."""
    return str(parameter._param_fqn or parameter._module_info.param_name)


def mark_gathered_parameters(root: nn.Module) -> None:
    """Marks what an optimizer must not be built from: its step then says so."""
    for parameter in _fsdp_parameters(root):
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is not None and not is_marked(gathered):
            mark_as_gathered(gathered, name_of_parameter(parameter))


def allocate_gathered_parameters(root: nn.Module) -> None:
    """Makes the tensors that parameters are gathered into, unit by unit, as the first forward would.

    Every rank calls it. Made inside `torch.inference_mode` they could never be trained.
    """
    with torch.inference_mode(False), torch.no_grad():
        for module in root.modules():
            if isinstance(module, FSDPModule):
                groups = fsdp_param_groups(_state(module))
                if any(not hasattr(parameter, "_unsharded_param") for g in groups for parameter in g.fsdp_params):
                    module.unshard()
                    module.reshard()


def drop_pending_gathers(root: nn.Module) -> None:
    """Waits for all-gathers that were started for a unit which then was not used, and forgets what they brought.

    Else that unit's next use would take them, and compute with parameters from before the optimizer's step. FSDP2
    does so itself at the end of a backward, but no backward follows an evaluation.
    """
    for group in _param_groups(root):
        drop_gather_under_way(group)
        result, group._all_gather_result = group._all_gather_result, None
        if result is not None and result.all_gather_event is not None:  # else its memory is reused while it fills
            group.device_handle.current_stream().wait_event(result.all_gather_event)
        if result is not None and result.all_gather_work is not None:
            result.all_gather_work.wait()


def take_root(root: nn.Module) -> None:
    """Makes `root` what FSDP2 calls the root, which otherwise is the first module to run, and for good."""
    _state(root)._lazy_init()


class PartialReshard:
    """Lets units keep each parameter whole among `size` neighbours of the ranks `shard_group` after their forward.

    Torch makes new process groups for every unit that is given such a number, named so that groups of other
    tensor-parallel ranks would collide with them; here all units of a model share two.

    Args:
        size: a divisor of the size of `shard_group`, neither 1 nor all.
        device_type: of the mesh.
    """

    def __init__(self, shard_group: dist.ProcessGroup, size: int, device_type: str) -> None:
        ranks = torch.tensor(dist.get_process_group_ranks(shard_group)).view(-1, size)
        row, column = divmod(shard_group.rank(), size)
        options: dict[str, Any] = {"timeout": _timeout_of(shard_group, device_type), "use_local_synchronization": True}
        shard = dist.new_group(ranks[row].tolist(), **options)
        replicate = dist.new_group(ranks[:, column].tolist(), **options)
        names = ("replicate", "shard")
        mesh = DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=names)
        self._mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def apply_to(self, module: nn.Module) -> None:
        """Sets it for the unit of this module, which reshards after forward already."""
        for group in fsdp_param_groups(_state(module)):
            group.post_forward_mesh_info = self._mesh_info
            for parameter in group.fsdp_params:
                parameter.post_forward_mesh_info = self._mesh_info
                size = parameter._orig_size
                chunks = torch.empty(size, device="meta").chunk(self._mesh_info.shard_mesh_size)
                rank = self._mesh_info.shard_mesh_rank
                own = chunks[rank].shape if rank < len(chunks) else torch.Size([0, *size[1:]])
                parameter.sharded_post_forward_size = own
                parameter.contiguous_sharded_post_forward_stride = torch.empty(own, device="meta").stride()


def communication_of(module: FSDPModule) -> tuple[Any, Any] | None:
    """What a module gathers and reduces with; None where it has no parameters of its own."""
    for group in fsdp_param_groups(_state(module)):  # type: ignore[arg-type]
        return group._all_gather_comm, group._reduce_scatter_comm
    return None


def whole_gradients(root: nn.Module) -> Iterator[torch.Tensor]:
    """Gradients that this rank holds whole, until they are reduced."""
    for parameter in _fsdp_parameters(root):
        unsharded = getattr(parameter, "_unsharded_param", None)
        for gradient in (parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
            if gradient is not None:
                yield gradient


def _has_unsharded_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    unsharded = getattr(parameter, "_unsharded_param", None)  # absent before the first all-gather
    return unsharded is not None and unsharded.grad is not None


def _fsdp_parameters(root: nn.Module) -> Iterator[Any]:
    for group in _param_groups(root):
        yield from group.fsdp_params


def _param_groups(root: nn.Module) -> Iterator[Any]:
    """Each group once, though all modules of a unit share its state."""
    states = {id(state): state for m in root.modules() if isinstance(m, FSDPModule) for state in [_state(m)]}
    for state in states.values():
        yield from fsdp_param_groups(state)


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]


# ---- the memory that it takes


def gathered_tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    """What holds gathered parameters now: whole ones, those kept by a part of the ranks, and gathers under way."""
    for group in _param_groups(root):
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs
            if (partial := getattr(parameter, "_sharded_post_forward_param_data", None)) is not None:
                yield partial
        last = group.comm_ctx.all_gather_state
        for result in (group._all_gather_result, None if last is None else last.all_gather_result):
            if result is not None:
                yield result.all_gather_output


def gradient_tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    """What holds gradients now: sharded ones, whole ones that are not reduced yet, and reductions under way."""
    for group in _param_groups(root):
        for parameter in group.fsdp_params:
            held = (parameter.sharded_param.grad, parameter.unsharded_accumulated_grad)
            yield from (tensor for tensor in held if tensor is not None)
        yield from (state.reduce_scatter_input for state in _reductions_under_way(group.comm_ctx))
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
    for parameter in gathered_parameters(root):
        if parameter.grad is not None:
            yield parameter.grad


def shard_tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    """This rank's shards, with their padding."""
    for group in _param_groups(root):
        for parameter in group.fsdp_params:
            yield parameter._sharded_param_data


def gathered_parameters(root: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that modules compute with, and autograd gives gradients to; none before the first all-gather."""
    for parameter in _fsdp_parameters(root):
        if hasattr(parameter, "_unsharded_param"):
            yield parameter._unsharded_param


def _reductions_under_way(comm_ctx: Any) -> list[Any]:
    """Torch before 2.13 keeps one, later ones a list."""
    states = getattr(comm_ctx, "reduce_scatter_states", None)
    if states is None:
        states = [comm_ctx.reduce_scatter_state]
    return [state for state in states if state is not None]


def _timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device(device_type)).options._timeout
    return timeout
