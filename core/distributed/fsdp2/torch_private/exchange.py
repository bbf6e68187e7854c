"""Lets FSDP2 gather without copies, and reduce during the rest of the backward, where ranks exchange messages.

Torch copies the shards of a unit into one buffer, gathers that, and copies the result out into each parameter, so that
NCCL has one large message. Where ranks exchange messages (`comm.gloo.exchanges_directly`) the copies gain nothing,
because the shards of a parameter cut on dim 0 are contiguous in the whole parameter. On CPU, where there are no
streams, torch also waits for each reduction before backward goes on. Torch has no public hook between the gather and
the copies, or after the reduction.

Relies on these names of `FSDPParamGroup`:

- the methods that `DirectExchange` replaces, which torch calls by name on the object; were one called in another way,
  torch's own would run, with copies and without overlap;
- ``_all_gather_result``, set while a gather is running: anything but None keeps torch from gathering again;
- ``_to_unsharded()``, which registers the whole parameters in the modules once they are there;
- ``_training_state`` and ``unshard_in_backward``, by which a backward that reads no weight needs no gather;
- ``_all_gather_comm``, ``_all_gather_process_group``, ``mesh_info``: what a unit is gathered with, and among whom;
- ``reduce_grads``, ``_all_reduce_hook``, ``gradient_divide_factor``, ``force_sum_reduction_for_comms``: what torch
  does with a reduced gradient right after the reduction; were a case missed, it would read unfinished sums.

And of `FSDPParam`: ``init_all_gather_outputs``, ``alloc_all_gather_outputs`` and ``init_unsharded_param``, by which
torch makes the whole parameter; ``sharded_state``, ``fsdp_placement``, ``_sharded_local_tensor`` and the dtypes, which
say whether its shards are the whole parameter, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, _get_param_all_gather_inputs
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState, free_storage
from torch.profiler import record_function

from ...._torch_compat import fsdp_param_groups
from ....comm.gloo import writing_beneath_autograd
from ....comm.lane import Handle, comm_lane

_DIVIDED_BY_THE_BACKEND = (torch.float32, torch.bfloat16)
"""Dtypes of gradients whose mean the reduction computes. Torch divides others itself, after the reduction has
returned."""

_MOST_REDUCTIONS_UNDER_WAY = 2
"""Largest number of reductions that run at once: each holds the whole gradients of a unit."""


class PendingReductions:
    """Reductions of one model's gradients that run while its backward computes; all of its units share it."""

    def __init__(self) -> None:
        # Reductions that were started, the oldest first. `run` adds one, on autograd's thread, and may have waited for
        # it; `finish` empties the list, at the latest when the backward ends.
        self._handles: list[Handle] = []
        # Whether a reduction that is called now may end later: set and cleared by `deferred`.
        self._defers = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Lets reductions that are called inside run on, until `finish`."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def run(self, reduce: Callable[[], None], device: torch.device) -> None:
        """Runs a reduction, or starts it."""
        if not self._defers:
            reduce()
            return
        if len(self._handles) >= _MOST_REDUCTIONS_UNDER_WAY:
            # Each running reduction holds a unit's whole gradients: wait for the oldest.
            self._handles[-_MOST_REDUCTIONS_UNDER_WAY].wait()
        self._handles.append(comm_lane(device).submit(reduce))

    def finish(self) -> None:
        """Waits for all running reductions, and raises the first error of them."""
        errors: list[Exception] = []
        while self._handles:
            try:
                self._handles[0].wait()
            except Exception as error:
                errors.append(error)
            self._handles.pop(0)
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """Waits for all running reductions, whose gradients are dropped after a failure; raises none of their
        errors."""
        with suppress(Exception):
            self.finish()


def exchange_directly(module: FSDPModule, reductions: PendingReductions) -> None:
    """Replaces a unit's gathers and reductions.

    Gathers without copies if its all-gather has ``gather_each``; reduces during backward if its reduce-scatter uses
    `reductions`.
    """
    for group in fsdp_param_groups(module._get_fsdp_state()):
        # Our attribute of torch's object. Set once, never deleted; `drop_gather_under_way` and `abandon_reductions`
        # read it.
        group.direct_exchange = DirectExchange(group, reductions)


def abandon_reductions(group: Any) -> None:
    """Waits for reductions of this parameter group that a failed backward has started; raises none of their errors."""
    if hasattr(group, "direct_exchange"):
        group.direct_exchange.abandon_reductions()


def drop_gather_under_way(group: Any) -> None:
    """Waits for this group's running gather, if any, and frees its result."""
    if hasattr(group, "direct_exchange"):
        group.direct_exchange.drop_gather()


class _Gather(AllGatherResult):
    """A running gather whose messages arrive in the parameters themselves.

    It is the group's ``_all_gather_result`` from `DirectExchange.unshard` to `wait_for_unshard`, or to `drop_gather`
    if nothing used the unit.
    """


class DirectExchange:
    """Replaces methods of one `FSDPParamGroup`, the parameters that FSDP2 gathers and reduces together.

    Results do not change.

    Torch calls these methods by name, on the object: `unshard` and `wait_for_unshard` before a unit runs,
    `post_backward` when its gradients are complete, `finalize_backward` when a backward ends, and, from torch 2.13 on,
    `_reset_iter_state` after an exception.
    """

    def __init__(self, group: Any, reductions: PendingReductions) -> None:
        self._group, self._reductions = group, reductions
        names = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward", "_reset_iter_state")
        # Torch's bound methods, which the replacements call. Never restored.
        self._original_methods = {name: getattr(group, name) for name in names if hasattr(group, name)}
        for name in self._original_methods:
            setattr(group, name, getattr(self, name))

    def unshard(self, async_op: bool = False) -> None:
        if self._needs_no_gather() or not self._can_gather_in_place():
            self._original_methods["unshard"](async_op)
            return
        group = self._group
        ranks = group._all_gather_process_group
        with record_function(group._with_fqn("FSDP::all_gather")), torch.no_grad():
            inputs = [shards[0] for shards in _get_param_all_gather_inputs(group.fsdp_params)]
            for parameter, shard in zip(group.fsdp_params, inputs, strict=True):
                parameter.init_all_gather_outputs([shard.numel()], [shard.dtype], ranks.size(), group.device)
                parameter.alloc_all_gather_outputs()
            outputs = [parameter.all_gather_outputs[0] for parameter in group.fsdp_params]
            with writing_beneath_autograd(outputs):
                work = group._all_gather_comm.gather_each(outputs, inputs, ranks)
        group._all_gather_result = _Gather(outputs[0].new_empty(0), None, work, [], [], [])
        if not async_op:
            work.wait()

    def wait_for_unshard(self) -> None:
        group = self._group
        result = group._all_gather_result
        if not isinstance(result, _Gather):
            self._original_methods["wait_for_unshard"]()
            return
        cast(torch.distributed.Work, result.all_gather_work).wait()
        for parameter in group.fsdp_params:
            parameter.init_unsharded_param()
        group._to_unsharded()
        group._all_gather_result = None

    def post_backward(self, *unused: Any) -> None:
        if not self._may_reduce_later():
            self._reductions.finish()
            self._original_methods["post_backward"](*unused)
            return
        with self._reductions.deferred():
            self._original_methods["post_backward"](*unused)

    def finalize_backward(self) -> None:
        self.drop_gather()
        self._reductions.finish()
        self._original_methods["finalize_backward"]()

    def _reset_iter_state(self) -> None:
        self.drop_gather()
        self._reductions.abandon()
        self._original_methods["_reset_iter_state"]()

    def abandon_reductions(self) -> None:
        """Waits for the model's running reductions, and raises none of their errors."""
        self._reductions.abandon()

    def drop_gather(self) -> None:
        """Waits for the running gather, if any, and frees its result."""
        result = self._group._all_gather_result
        if isinstance(result, _Gather):
            self._group._all_gather_result = None  # first: a gather that failed raises once
            cast(torch.distributed.Work, result.all_gather_work).wait()
            for parameter in self._group.fsdp_params:
                for output in parameter.all_gather_outputs:
                    free_storage(output)

    def _needs_no_gather(self) -> bool:
        group = self._group
        reads_no_weight = not group.unshard_in_backward and group._training_state == TrainingState.PRE_BACKWARD
        return group._all_gather_result is not None or group.is_unsharded or reads_no_weight

    def _may_reduce_later(self) -> bool:
        """Returns whether torch leaves the reduced gradient unread until backward ends."""
        group = self._group
        return (
            group.reduce_grads
            and not isinstance(group.mesh_info, DDPMeshInfo)
            and group._all_reduce_hook is None
            and group.gradient_divide_factor in ((1.0,) if group.force_sum_reduction_for_comms else (None, 1.0))
            and all(
                (parameter.reduce_dtype or parameter.param_dtype or parameter.orig_dtype) == parameter.orig_dtype
                and parameter.orig_dtype in _DIVIDED_BY_THE_BACKEND
                and parameter.sharded_param.grad is None
                and not parameter.offload_to_cpu
                and not getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None)
                for parameter in group.fsdp_params
            )
        )

    def _can_gather_in_place(self) -> bool:
        group = self._group
        return (
            hasattr(group._all_gather_comm, "gather_each")
            and isinstance(group.mesh_info, FSDPMeshInfo)
            and group._all_gather_process_group.size() > 1
            and torch._C._functorch.peek_interpreter_stack() is None  # under vmap or grad tensors are wrapped
            and all(
                parameter.sharded_state == ShardedState.SHARDED
                and parameter.fsdp_placement.dim == 0
                and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
                for parameter in group.fsdp_params
            )
        )
