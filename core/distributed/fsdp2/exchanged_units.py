"""FSDP2 where ranks exchange messages: gathers without copies, and reductions during the rest of the backward.

Torch copies the shards of a unit into one buffer, gathers that, and copies the result out into each parameter, so that
NCCL has one large message. Where ranks exchange messages (`comm.gloo.exchanges_directly`) that buys nothing: a
parameter that is cut on its first dimension is, whole, its shards one after the other. And on CPU, where there are no
streams, torch waits for each reduction before backward goes on. It has no public way between the gather and the
copies, nor behind the reduction, so that this file, like `fsdp_state`, knows FSDP2's inside; its tests pin what it
relies on.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, _get_param_all_gather_inputs
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.profiler import record_function

from ..._torch_compat import fsdp_param_groups
from ...comm.lane import Handle
from .direct_collectives import reductions_may_end_later, writing_beneath_autograd


def exchange_directly(module: FSDPModule) -> None:
    """Makes the unit of an FSDP module gather without copies, where what it gathers with has ``gather_each``.

    And reduce while the backward computes, where it reduces with `DirectReduceScatter`.
    """
    for group in fsdp_param_groups(module._get_fsdp_state()):
        group.__class__ = _ExchangedParamGroup


def drop_gather_under_way(group: Any) -> None:
    """Waits for a gather of this parameter group that is under way, and frees what it brought; else does nothing."""
    if isinstance(group, _ExchangedParamGroup):
        group.drop_gather()


class _Gather(AllGatherResult):
    """A gather under way whose messages arrive in the parameters themselves."""


class _ExchangedParamGroup(FSDPParamGroup):
    """What FSDP2 gathers and reduces together; what it computes is torch's."""

    def unshard(self, async_op: bool = False) -> None:
        if self._is_gathered_or_under_way() or not self._can_gather_in_place():
            super().unshard(async_op)
            return
        group = self._all_gather_process_group
        with record_function(self._with_fqn("FSDP::all_gather")), torch.no_grad():
            inputs = [shards[0] for shards in _get_param_all_gather_inputs(self.fsdp_params)]
            for parameter, shard in zip(self.fsdp_params, inputs, strict=True):
                parameter.init_all_gather_outputs([shard.numel()], [shard.dtype], group.size(), self.device)
                parameter.alloc_all_gather_outputs()
            outputs = [parameter.all_gather_outputs[0] for parameter in self.fsdp_params]
            with writing_beneath_autograd(outputs):
                work = cast(Any, self._all_gather_comm).gather_each(outputs, inputs, group)
        self._all_gather_result = _Gather(outputs[0].new_empty(0), None, work, [], [], [])
        if not async_op:
            work.wait()

    def wait_for_unshard(self) -> None:
        result = self._all_gather_result
        if not isinstance(result, _Gather):
            super().wait_for_unshard()
            return
        cast(torch.distributed.Work, result.all_gather_work).wait()
        for parameter in self.fsdp_params:
            parameter.init_unsharded_param()
        self._to_unsharded()
        self._all_gather_result = None

    def post_backward(self, *unused: Any) -> None:
        if not self._may_reduce_later():
            self._finish_reductions()
            super().post_backward(*unused)
            return
        with reductions_may_end_later(self._reductions):
            super().post_backward(*unused)

    def finalize_backward(self) -> None:
        self.drop_gather()
        self._finish_reductions()
        super().finalize_backward()

    def _reset_iter_state(self) -> None:
        self.drop_gather()
        self._finish_reductions()
        super()._reset_iter_state()

    @property
    def _reductions(self) -> list[Handle]:
        """Of all groups of a model, the oldest first."""
        under_way: list[Handle] = self.comm_ctx.__dict__.setdefault("reductions_under_way", [])
        return under_way

    def _finish_reductions(self) -> None:
        while self._reductions:
            self._reductions.pop(0).wait()

    def drop_gather(self) -> None:
        """Waits for a gather that is under way, and frees what it brought."""
        result = self._all_gather_result
        if isinstance(result, _Gather):
            cast(torch.distributed.Work, result.all_gather_work).wait()
            self._all_gather_result = None
            for parameter in self.fsdp_params:
                for output in parameter.all_gather_outputs:
                    free_storage(output)

    def _is_gathered_or_under_way(self) -> bool:
        is_for_nothing = not self.unshard_in_backward and self._training_state == TrainingState.PRE_BACKWARD
        return self._all_gather_result is not None or self.is_unsharded or is_for_nothing

    def _may_reduce_later(self) -> bool:
        """Whether torch computes nothing with what a reduction brings before the backward ends."""
        return (
            self.reduce_grads
            and not isinstance(self.mesh_info, DDPMeshInfo)
            and self._all_reduce_hook is None
            and self.gradient_divide_factor in (None, 1.0)
            and all(
                (parameter.reduce_dtype or parameter.param_dtype or parameter.orig_dtype)
                == parameter.orig_dtype
                != torch.float16
                and parameter.sharded_param.grad is None
                and not parameter.offload_to_cpu
                and not getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None)
                for parameter in self.fsdp_params
            )
        )

    def _can_gather_in_place(self) -> bool:
        return (
            hasattr(self._all_gather_comm, "gather_each")
            and isinstance(self.mesh_info, FSDPMeshInfo)
            and self._all_gather_process_group.size() > 1
            and torch._C._functorch.peek_interpreter_stack() is None
            and all(
                parameter.sharded_state == ShardedState.SHARDED
                and parameter.fsdp_placement.dim == 0
                and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
                for parameter in self.fsdp_params
            )
        )
