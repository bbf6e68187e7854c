"""The base of wrappers that reduce gradients on flat buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from torch import Tensor, nn

from ..base.device import current_device
from ..base.errors import OptimizerError, ShardstackError, WrapError
from ..base.host_memory import transient_memory
from ..base.memory_categories import Held
from ..base.parameters import kept_range, without_waiting
from ..comm.collectives import Allocate
from ..comm.lane import comm_lane
from .data_parallel_base import _BaseDataParallel, unwrap_model
from .distributed_data_parallel_config import DistributedDataParallelConfig
from .engine.bucket import Bucket
from .engine.buffer import BucketReduction, FlatBuffer
from .engine.steps import ParamPlacement, ReductionSchedule, ShownGradients, shows_main_grad
from .engine.unit import build_units
from .gradient_state import Phase
from .groups import ParameterKind, managed_parameters, twin_group
from .plan import Plan
from .verbs import UNREADABLE, is_unreadable


class _FlatDataParallel(_BaseDataParallel):
    """Backward moves each gradient into its place in a flat bucket, which is reduced in place when it is complete.

    The thread that runs a backward calls `_take_gradient`, and at its end `finish_grad_sync` with
    `plan.finishes_in_backward`; the main thread calls everything else, between backwards.

    Args:
        plan: the model's plan. A subclass calls `_build` and `_take_gradients`.

    Attributes:
        units: parameters that are gathered together.
        intra_instance_group: the ranks that share each gradient after it is reduced, by Megatron-LM's name.
        inter_instance_group: the ranks with the same shard, one per optimizer instance; None with one instance.
    """

    plan: Plan
    checks_placement = True

    def __init__(self, config: Any, module: nn.Module, ddp_config: DistributedDataParallelConfig, plan: Plan) -> None:
        super().__init__(config, module, ddp_config, plan)
        # All fixed. The groups have Megatron-LM's names, for scripts that read them.
        self._is_sharded = not plan.is_replicated
        self.intra_instance_group = plan.groups.shard if self._is_sharded else plan.groups.whole
        self.inter_instance_group = plan.groups.replicate if self._is_sharded else None

    def _build(
        self,
        named_params: Mapping[str, nn.Parameter],
        *,
        has_own_lane: bool = False,
        allocate_grads: Allocate = transient_memory,
        allocate_slots: Allocate = transient_memory,
    ) -> None:
        """Builds buffers, buckets and units as planned. A constructor calls it once.

        Args:
            named_params: the model's parameters, by name.
            has_own_lane: reduces in twins of the groups of shards and in a second lane, next to gathers of parameters.
            allocate_grads: allocates whole gradients, where buckets release theirs.
            allocate_slots: allocates the memory that units are gathered into.
        """
        plan = self.plan
        # All that is trained is on one device (`reject_unfit`); what is frozen may be elsewhere.
        device = next((param.device for param in named_params.values() if param.requires_grad), current_device())
        lane = comm_lane(device, int(has_own_lane))
        # Own all memory of gradients, and of parameters or their shards if a strategy shards, for the wrapper's
        # lifetime. Like the two below fixed: parameters never change buckets.
        self._flat_buffers: list[FlatBuffer] = []
        # All buckets, by their place in the buffers of the plan.
        self._bucket_at: dict[tuple[int, int], Bucket] = {}
        reductions = dict[ParameterKind, BucketReduction]()
        for pieces in plan.buffers:
            kind, on = pieces[0].kind, named_params[pieces[0].params[0].name].device
            if kind not in reductions:
                over_ranks = plan.over_ranks_of(kind)
                groups = over_ranks.groups
                if has_own_lane and kind == "replicated":  # reduced over the ranks that gather others
                    groups = replace(groups, replicate=twin_group(groups.whole))
                elif has_own_lane:
                    groups = replace(groups, shard=twin_group(groups.shard))
                over_ranks = replace(over_ranks, groups=groups)
                reductions[kind] = BucketReduction(over_ranks, lane, self._inspect, self._tree)
            buffer = FlatBuffer(plan, pieces, on, allocate_grads)
            self._flat_buffers.append(buffer)
            for piece in pieces:
                self._bucket_at[piece.bucket] = Bucket(buffer, piece, named_params, reductions[kind])  # type: ignore[index]
        # Those with gradients, in the order in which they leave.
        self._buckets = [self._bucket_at[place] for place in plan.reduction_order]
        # In the plan's order, the root last; fixed. Their slots own the memory that parameters are gathered into.
        self.units = build_units(plan, self._bucket_at, allocate_slots)

    def _take_gradients(self) -> None:
        """Lets backwards bring their gradients to the buckets. A constructor calls it last."""
        # The bucket of each parameter with a gradient; fixed.
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        slots = ((slot.name, slot.param) for bucket in self._buckets for slot in bucket.slots)
        # Where parameters were when the wrapper was built. Units tell it when they move them.
        self._placement = ParamPlacement(unwrap_model(self), slots)
        finish = _weakly(self.finish_grad_sync) if self.plan.finishes_in_backward else None
        # Sends buckets and knows which have left; `_drop_gradients` and `_open_reduced_gradients` restart it.
        self._schedule = ReductionSchedule(self._buckets, self.plan, finish, self._tree)
        # Sets ``param.grad`` when gradients are reduced, and clears it after a step.
        self._shown_gradients = ShownGradients(self._bucket_of, self._is_sharded)
        for param, bucket in self._bucket_of.items():
            param.has_buffer = True  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(_weakly(self._take_gradient))
            if self.plan.lends_gradients:
                param.lend_gradient_memory = partial(bucket.lend, param)  # type: ignore[attr-defined]
            if self.plan.layers_add_gradients:
                bucket.slot_of(param).is_written_by_layer = True
        self._finish_construction()

    def expect_micro_batches(self, count: int, *, divides_by_ranks: bool = True) -> None:
        super().expect_micro_batches(count, divides_by_ranks=divides_by_ranks)
        if self._tree is not None:
            for buffer in self._flat_buffers:
                buffer.grad_memory.keep_all(self._tree.sets_whole_gradients_aside)

    def elements_of(self, param: nn.Parameter, start: int, end: int) -> Tensor:
        """Returns elements ``[start, end)`` of a flattened parameter, those that the plan gives this rank to
        update."""
        values, first = kept_range(param) or (param.detach().view(-1), 0)
        return values[start - first : end - first] if start < end else values[:0]

    def publish_update(self) -> None:
        """All-gathers the updated shards, where ranks update shards. Every rank calls it."""

    def note_step(self) -> None:
        self._shown_gradients.hide_after_step()

    def _take_gradient(self, param: nn.Parameter) -> None:
        """Takes a parameter's gradient when autograd has finished it in one backward.

        Raises:
            ShardstackError: the gradient has a graph.
        """
        if self.plan.finishes_in_backward and self._schedule.has_lost_a_backward:
            self._drop_gradients()
        gradient: Tensor | None = vars(param.grad).pop("added") if is_unreadable(param.grad) else param.grad
        if gradient is None:
            return
        if gradient.requires_grad:
            raise ShardstackError(
                f"a backward with create_graph=True reached parameters of a {type(self).__name__}, whose buffers "
                "keep no graph of a gradient; take such gradients with torch.autograd.grad(..., create_graph=True)"
            )
        self.gradient_state.note_backward(self._open_reduced_gradients)
        param.grad = None
        if self.gradient_state.phase is Phase.LATE:  # drop it, so that the next use of gradients raises
            return
        bucket, is_added = self._bucket_of[param], param.grad_added_to_main_grad  # type: ignore[attr-defined]
        if not bucket.add_gradient(param, None if is_added else gradient):
            self.gradient_state.note_late(self._name_of(param))
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        del gradient  # its memory may serve for what the reduction allocates
        self._schedule.note_gradients(bucket, (param,), self._syncs_gradients)

    def _inspect(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        self._gradient_checks.check(gradients, self._step)

    def start_grad_sync(self, *unused: Any) -> None:
        """Sends every bucket that has not left yet."""
        self._schedule.send_all()

    def _finish_grad_sync(self) -> None:
        self.settle_parameters()
        self._placement.check_unless_optimizer_does()
        if not self.gradient_state.is_reduced:
            self._shown_gradients.take_written()
        self.start_grad_sync()
        for bucket in self._buckets:
            bucket.finish_grad_sync()
        try:
            self._shown_gradients.show()
        except RuntimeError:  # a parameter of another dtype than its gradient
            self._placement.check()
            raise

    def gather_gradients(self, *, again: bool = False) -> None:
        super().gather_gradients(again=again)
        for bucket in self._buckets:
            if bucket.is_whole or not again:
                bucket.gather_grads()

    def _open_reduced_gradients(self) -> bool:
        if self._is_sharded or not all(self._adds_exactly(p) for p in self._bucket_of if shows_main_grad(p)):
            return False
        self._schedule.restart()
        for bucket in self._buckets:
            bucket.open_again([param for param in bucket.params if not shows_main_grad(param)])
        return True

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if not self._is_sharded or parameter not in self._bucket_of:
            return super().local_gradient(parameter)
        bucket = self._bucket_of[parameter]
        if not (bucket.has_reduced and self._shown_gradients.has_gradient(parameter)):
            return None
        return bucket.local_grad(parameter)

    def check_may_step(self, optimizer: str) -> None:
        super().check_may_step(optimizer)
        try:
            self._placement.check_step()
        except WrapError as error:
            raise OptimizerError(str(error)) from None
        if (assigned := self._shown_gradients.find_written()) is not None:
            raise OptimizerError(
                f"parameter {self._name_of(assigned)} has a .grad of its own, but the sharding strategy "
                f"{self.plan.strategy!r} keeps the gradient of a shard on each rank, which the optimizer reads "
                "instead; set .grad before finalize_model_grads, or use the sharding strategy 'no_shard'"
            )

    def check_may_step_directly(self, optimizer: str) -> None:
        if self._is_sharded:
            raise ShardstackError(
                f"{optimizer} was to step parameters whose gradients {type(self).__name__} shards over ranks: it "
                "would see this rank's part alone; use core.optimizer.get_megatron_optimizer, or the sharding "
                "strategy 'no_shard'"
            )
        super().check_may_step_directly(optimizer)
        if any(is_unreadable(param.grad) for param in self._bucket_of):
            raise ShardstackError(UNREADABLE)

    def _name_of(self, param: nn.Parameter) -> str:
        return self._bucket_of[param].slot_of(param).name

    def _reduced_gradients(self) -> list[Tensor]:
        return [tensor for bucket in self._buckets for tensor in (bucket.local_grad_shard, *bucket.accumulators)]

    def _drop_gradients(self) -> None:
        self._schedule.give_up()
        for bucket in self._buckets:
            bucket.clear_grads()

    def _zero_gradients(self) -> None:
        self._drop_gradients()
        with without_waiting():
            for _, parameter in managed_parameters(self.module):
                parameter.grad = None
                if parameter in self._bucket_of:
                    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def held_tensors(self) -> dict[Held, list[Tensor]]:
        memory = [tensor for bucket in self._buckets for tensor in bucket.held()]
        memory += [t for buffer in self._flat_buffers for t in buffer.grad_memory.kept]
        grads = [p.grad for p in self.module.parameters() if p.grad is not None and not is_unreadable(p.grad)]
        parameters = [*self.module.parameters(), *self.module.buffers()]
        whole = [b.grad_data for b in self._buckets if b.releases_grads and b.grad_data is not None]
        return {
            "parameters": parameters,
            "gathered parameters": [],
            "gradients": [*memory, *grads],
            "gradients not reduced yet": whole,
        }


def shards_buffers(wrapper: object) -> TypeGuard[_FlatDataParallel]:
    """Returns whether a wrapper cuts flat buffers, of which each rank updates a part."""
    return isinstance(wrapper, _FlatDataParallel) and not wrapper.plan.is_replicated


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Returns the bound method without its object, which it does not keep alive.

    torch holds hooks after accumulation where the collector does not look: one that leads back to its parameter would
    keep the wrapper, the model and their process groups for as long as the process runs (torch 2.13).

    Raises:
        WrapError: when called, if the object has gone.
    """
    reference, kind = weakref.WeakMethod(method), type(method.__self__).__name__  # type: ignore[attr-defined]

    def call(*args: Any) -> None:
        bound = reference()
        if bound is None:
            raise WrapError(
                f"a backward reached parameters whose {kind} no longer exists, so that no rank would "
                "reduce their gradients; keep the wrapper for as long as its module trains"
            )
        bound(*args)

    return call
