"""Finishes what an exception or an evaluation leaves unfinished in FSDP2's state of a forward and backward.

Relies on these fields of torch, which its hooks set and clear:

- ``_state_ctx.iter_forward_root``: the root while its forward runs, else None. If it stayed set, no forward would look
  for changed shards.
- ``_state_ctx.post_backward_final_callback_queued``: True from a backward's first hook to its end, and after one that
  raised. If it were cleared, a failed backward would look complete.
- ``_comm_ctx.post_forward_order``: grows with each forward; a backward clears it. Evaluations would make it longer and
  longer.
- ``_is_root``: None before the first forward. If it were never None, what is replaced until then would be used.
- ``_all_gather_result`` of a group: a gather that nothing has waited for, else None. If it were kept, the next forward
  would use old weights.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from ...._torch_compat import fsdp_param_groups
from .exchange import abandon_reductions, drop_gather_under_way
from .parameters import reject_assigned
from .states import param_groups, state_of


def is_in_forward(root: nn.Module) -> bool:
    """Returns whether a forward of the sharded model, or of a unit called on its own, is running."""
    return state_of(root)._state_ctx.iter_forward_root is not None


def has_failed_in_backward(root: nn.Module) -> bool:
    """Returns whether the last backward raised before FSDP2's callback at its end; to be asked outside of any
    backward."""
    return bool(state_of(root)._state_ctx.post_backward_final_callback_queued)


def reset_iteration(root: nn.Module) -> None:
    """Brings units back to their shards and FSDP2 to the state between steps, after a forward or backward raised.

    Gradients stay, those that accumulate on this rank too.
    """
    state = state_of(root)
    if hasattr(state, "_reset_iter_state"):  # torch 2.13
        state._reset_iter_state()
        return
    drop_pending_gathers(root)
    for each in state._state_ctx.all_states:
        each._training_state = TrainingState.IDLE
    for group in param_groups(root):
        abandon_reductions(group)
        group._training_state = TrainingState.IDLE
        group.finalize_backward()
        group._to_sharded()
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def forget_forward_order(root: nn.Module) -> None:
    """Empties torch's list of the forwards since the last backward, which evaluations make longer and longer.

    A backward that follows nevertheless gathers its units when it reaches them.
    """
    comm_ctx = getattr(state_of(root), "_comm_ctx", None)
    if comm_ctx is not None and hasattr(comm_ctx, "post_forward_order"):  # else no forward has run
        comm_ctx.post_forward_order.clear()
        for group in param_groups(root):
            group._post_forward_indices.clear()


def drop_pending_gathers(root: nn.Module) -> None:
    """Waits for all-gathers that no unit has used, and drops their results.

    Otherwise the unit's next use would take the result, with parameters from before the optimizer's step. FSDP2 does
    this itself at the end of a backward, but no backward follows an evaluation.
    """
    for group in param_groups(root):
        drop_gather_under_way(group)
        result, group._all_gather_result = group._all_gather_result, None
        if result is not None and result.all_gather_event is not None:  # else its memory is reused while it fills
            group.device_handle.current_stream().wait_event(result.all_gather_event)
        if result is not None and result.all_gather_work is not None:
            result.all_gather_work.wait()


def set_fsdp_root(root: nn.Module) -> None:
    """Makes `root` what FSDP2 calls the root, which is otherwise the first module to run; it never changes.

    Raises:
        UnitError: a parameter was replaced since the model was sharded.
    """
    if state_of(root)._is_root is None:  # the first time
        for group in param_groups(root):
            reject_assigned(group, takes_shards=True)
    state_of(root)._lazy_init()


def allocate_gathered_parameters(root: nn.Module) -> None:
    """Makes the tensors that parameters are gathered into, unit by unit, as the first forward would.

    Every rank calls it. Made inside `torch.inference_mode` they could never be trained.
    """
    with torch.inference_mode(False), torch.no_grad():
        for module in root.modules():
            if isinstance(module, FSDPModule):
                groups = fsdp_param_groups(state_of(module))
                if any(not hasattr(parameter, "_unsharded_param") for g in groups for parameter in g.fsdp_params):
                    module.unshard()
                    module.reshard()
