"""Replicas on contiguous buffers, with optimizer state and gradients sharded over ranks where asked (ZeRO-1, -2)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..comm.lane import comm_lane
from ..diagnostics.stale_optimizers import replaced_parameters_marked
from ..errors import OptimizerError, ParallelConfigError, ShardstackError, WrapError
from ..model_parallel_config import ModelParallelConfig
from ..process_groups_config import ProcessGroupCollection
from .buffers.bucket import Bucket
from .buffers.bucket_group import BucketGroup, GradientLender
from .buffers.forward_hooks import wait_before_forwards
from .buffers.param_and_grad_buffer import ParamAndGradBuffer
from .buffers.param_placement import ParamPlacement
from .buffers.reduction import BucketReduction
from .buffers.schedule import ReductionSchedule
from .buffers.shown_gradients import ShownGradients, shows_main_grad
from .buffers.unreadable_gradient import is_unreadable
from .data_parallel_base import _BaseDataParallel, unwrap_model
from .distributed_data_parallel_config import DistributedDataParallelConfig
from .gradient_state import Phase
from .groups import Ranks, find_groups
from .model.broadcast import broadcast_tensors
from .model.initial_values import start_equal
from .model.same_model import reject_different_models
from .model.unfit_models import reject_unfit
from .parameter_owner import share_gradient
from .plan import FlatPlan, plan_buffers
from .plan.layout import FullParamLayout


class DistributedDataParallel(_BaseDataParallel):
    """Every rank computes with the whole model; gradients are reduced over the group once a step, on flat buffers.

    By the sharding strategy a rank keeps, after `finish_grad_sync`:

    * ``no_shard``: the whole gradient, averaged, in ``param.main_grad``, and the same memory in ``param.grad`` where
      both have one dtype: any optimizer, and `torch.nn.utils.clip_grad_norm_`, may read and write it there;
    * ``optim`` (ZeRO-1): the gradient of its shard of each bucket, inside the buffer of whole gradients; the rest of
      ``main_grad`` is then this rank's own, and not to be read;
    * ``optim_grads`` (ZeRO-2): its shard alone. Whole gradients are allocated when backward reaches their bucket and
      freed when the bucket is reduced, during the last micro-batch's backward; ``main_grad`` is then None.

    With the last two, parameters are views of flat buffers, an optimizer of `core.optimizer` updates this rank's
    shards, and `start_param_sync` gathers the parameters. Backward moves each gradient into ``main_grad`` and frees
    ``param.grad``; a gradient that a layer has added there itself is respected (``param.grad_added_to_main_grad``,
    which is taken back after each use). ``main_grad`` is None between `zero_grad_buffer` and the first gradient.

    Args:
        config: the model's config; ``calculate_per_token_loss`` and ``gradient_accumulation_fusion`` are read where
            present. The latter lets the layers of this package compute gradients in place. In a config that is not of
            this package it says that layers add into ``main_grad`` themselves, which then always exists.
        ddp_config: the wrapper's settings.
        module: the model. Every rank's becomes that of the group's first; on the meta device it is materialized here.
        disable_bucketing: reduce each buffer in one piece; the bucket size is ignored.
        pg_collection: process groups; its `dp_cp` (or `dp`) serves as `process_group`.
        full_param_layout: from `DistributedOptimizer.compute_full_param_layout`; it has to be what the wrapper
            computes itself.
        process_group: the ranks that hold replicas, or a mesh of them, (replicate, shard) for hybrid sharding. Given,
            `core.parallel_state` is not touched; by default it is the data-parallel group with context parallelism.
        finish_in_backward: finish gradients at the end of each backward outside `no_sync`, as torch's DDP does, and
            leave them in ``param.grad``. A backward that finds gradients adds to them; one after they were set to
            None (``zero_grad``) begins anew, as does one after a backward that raised.

    Raises:
        ParallelConfigError: a field that this wrapper cannot honour, or half precision with fp32 parameters.
        WrapError: a parameter that is a DTensor already.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: FullParamLayout | None = None,
        *,
        process_group: Ranks | None = None,
        finish_in_backward: bool = False,
    ) -> None:
        caller = type(self).__name__
        self._reject_unwrappable(module, config)
        groups = find_groups(caller, ddp_config.num_distributed_optimizer_instances, process_group, pg_collection)
        model = unwrap_model(module)
        reject_unfit(module)
        plan = plan_buffers(model, config, ddp_config, groups, caller=caller, disable_bucketing=disable_bucketing)
        if finish_in_backward and plan.strategy != "no_shard":
            raise ParallelConfigError(
                "finish_in_backward leaves whole gradients in param.grad, and the sharding strategy "
                f"{plan.strategy!r} leaves a rank its shard; drop one of the two"
            )
        if full_param_layout is not None and full_param_layout != plan.layout:
            raise ParallelConfigError(
                "full_param_layout is not the layout of this model's buffers; compute it from the same parameters, "
                "bucket_size, number of ranks and ddp_config, or leave it out"
            )
        super().__init__(config, module, ddp_config, plan)
        self.plan: FlatPlan = plan
        self._is_sharded = plan.strategy != "no_shard"
        self.intra_instance_group = groups.shard if self._is_sharded else groups.whole
        self.inter_instance_group = groups.replicate if self._is_sharded else None
        reject_different_models(module, plan)
        with replaced_parameters_marked(module):
            start_equal(module, self.process_group)  # replicas that start different would stay different
        self._grad_buffers = self._build_buffers(model)
        self._bucket_groups = self._build_bucket_groups()
        self._group_of = {param: group for group in self._bucket_groups for param in group.bucket.params}
        self._placement = ParamPlacement(
            (slot.name, slot.param) for group in self._bucket_groups for slot in group.bucket.slots
        )
        self._finishes_in_backward = finish_in_backward
        finish = _weakly(self.finish_grad_sync) if finish_in_backward else None
        self._schedule = ReductionSchedule(self._bucket_groups, plan, finish)
        self._shown = ShownGradients(self._group_of, self._is_sharded)
        # Handles, while forwards wait for parameters: from `enable_forward_pre_hook` to `disable_forward_pre_hook`.
        self._pre_hooks: list[Any] = []
        for param in self._group_of:
            param.has_buffer = True  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(_weakly(self._take_gradient))
            if getattr(config, "gradient_accumulation_fusion", True):
                param.lend_gradient_memory = GradientLender(self._group_of[param], param)  # type: ignore[attr-defined]
            if getattr(config, "gradient_accumulation_fusion", False) and not isinstance(config, ModelParallelConfig):
                self._group_of[param].bucket.note_written_by_layer(param)
        self._own_parameters()
        if plan.overlaps_params:
            self.enable_forward_pre_hook()

    def _build_buffers(self, model: nn.Module) -> list[ParamAndGradBuffer]:
        named = dict(model.named_parameters())
        return [
            ParamAndGradBuffer(
                [(param.name, named[param.name]) for bucket in buffer.buckets for param in bucket.params],
                buffer.grad_dtype,
                [bucket.layout for bucket in buffer.buckets],
                num_shards=self.plan.num_shards,
                shard_index=self.intra_instance_group.rank() if self._is_sharded else 0,
                holds_params=buffer.holds_params,
                releases_grads=buffer.releases_grads,
                accumulated_in_fp32=buffer.accumulated_in_fp32,
            )
            for buffer in self.plan.buffers
        ]

    def _build_bucket_groups(self) -> list[BucketGroup]:
        """In the order in which they leave."""
        reduction = BucketReduction(
            group=self.process_group,
            shard_group=self.intra_instance_group if self._is_sharded else None,
            replica_group=self.inter_instance_group,
            becomes=self.plan.reduction,
            average_in_collective=self.plan.averages_in_collective,
            fp32_accumulation=self.plan.adds_in_fp32,
        )
        buckets = [self._grad_buffers[index].buckets[number] for index, number in self.plan.leaves]
        return [
            BucketGroup(
                bucket,
                reduction,
                self._inspect,
                comm_lane(bucket.buffer.device),
                overlaps_grads=self.plan.overlaps_grads,
                overlaps_params=self.plan.overlaps_params,
                reduces_every_micro_batch=self.plan.reduces_every_micro_batch,
            )
            for bucket in buckets
        ]

    def settle_parameters(self) -> None:
        self.finish_param_sync()

    def note_step(self) -> None:
        self._shown.hide_after_step()

    # Parameters marked ``allreduce=False`` lie in buffers of their own; all are reduced over one group, as long as
    # experts are cut as dense layers are (`reject_expert_parameters`).

    @property
    def buffers(self) -> _BufferList:
        """The flat buffers, in a list, as in Megatron-LM; called, what torch's ``Module.buffers()`` gives."""
        dense = [buffer for buffer in self._grad_buffers if not buffer.holds_experts]
        return _BufferList(dense, lambda *args, **kwargs: nn.Module.buffers(self, *args, **kwargs))

    @property
    def expert_parallel_buffers(self) -> list[ParamAndGradBuffer]:
        """The flat buffers of parameters that carry Megatron-LM's mark of experts."""
        return [buffer for buffer in self._grad_buffers if buffer.holds_experts]

    @property
    def bucket_groups(self) -> list[BucketGroup]:
        """The buckets of `buffers`, in the order in which they leave."""
        return [group for group in self._bucket_groups if not group.bucket.buffer.holds_experts]

    @property
    def expert_parallel_bucket_groups(self) -> list[BucketGroup]:
        """The buckets of `expert_parallel_buffers`, in the order in which they leave."""
        return [group for group in self._bucket_groups if group.bucket.buffer.holds_experts]

    # ---- gradients

    def _take_gradient(self, param: Tensor) -> None:
        """Called by autograd when one backward has finished a parameter's gradient."""
        gradient, group = param.grad, self._group_of[param]  # type: ignore[index]
        if self._finishes_in_backward and self._schedule.has_lost_a_backward:
            self._drop_gradients()
        if gradient is None:
            return
        if is_unreadable(gradient):  # what came was added to it, that is, dropped; who asks for gradients next raises
            param.grad = None
            self.note_backward()
            return
        if gradient.requires_grad:
            raise ShardstackError(
                "a backward with create_graph=True reached parameters of a DistributedDataParallel, whose buffers "
                "keep no graph of a gradient; take such gradients with torch.autograd.grad(..., create_graph=True)"
            )
        if self.gradient_state.phase is not Phase.ACCUMULATING:
            self.note_backward()
            if self.gradient_state.phase is Phase.LATE:  # dropped; the next use of gradients raises
                param.grad = None
                return
        if param.grad_added_to_main_grad:  # type: ignore[attr-defined]
            group.add_gradient(param, None)  # type: ignore[arg-type]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        else:
            group.add_gradient(param, gradient)  # type: ignore[arg-type]
        param.grad = None
        del gradient  # its memory may serve for what the reduction allocates
        self._schedule.note_gradient(group, param, self._syncs_gradients)  # type: ignore[arg-type]

    def _inspect(self, bucket: Bucket) -> None:
        self._gradient_checks.check(((slot.name, slot.view) for slot in bucket.slots), self._step)  # type: ignore[misc]

    def start_grad_sync(self, *unused: Any) -> None:
        """Sends every bucket that has not left yet."""
        self._schedule.send_all()

    def _finish_grad_sync(self, force_all_reduce: bool) -> None:
        if force_all_reduce and any(group.bucket.releases_grads for group in self._bucket_groups):
            raise ParallelConfigError(
                "force_all_reduce asks for whole gradients, which the strategy 'optim_grads' has released; drop it"
            )
        self.finish_param_sync()
        self._placement.check(unwrap_model(self))
        if not self.gradient_state.is_reduced:
            self._shown.take_written()
        self.start_grad_sync()
        for group in self._bucket_groups:
            group.finish_grad_sync(force_all_reduce)
        self._shown.show()

    def _open_reduced_gradients(self) -> bool:
        if self._is_sharded:
            return False
        kept = [param for param in self._group_of if shows_main_grad(param)]
        if kept and not self._adds_exactly:
            return False
        self._schedule.restart()
        for group in self._bucket_groups:
            group.open_again([param for param in group.bucket.params if not shows_main_grad(param)])
        return True

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if not self._is_sharded or parameter not in self._group_of:
            return super().local_gradient(parameter)
        group = self._group_of[parameter]
        if not (group.has_reduced and group.bucket.has_gradient(parameter)):
            return None
        start, end = group.bucket.shard_range_of(parameter)
        return group.bucket.local_grad_shard[start:end]

    def check_may_step(self, optimizer: str) -> None:
        super().check_may_step(optimizer)
        if (written := self._shown.find_written()) is not None:
            raise OptimizerError(
                f"parameter {self._name_of(written)} has a .grad of its own, but the sharding strategy "
                f"{self.plan.strategy!r} keeps the gradient of a shard on each rank, which the optimizer reads "
                "instead; set .grad before finalize_model_grads, or use the sharding strategy 'no_shard'"
            )

    def check_may_step_directly(self, optimizer: str) -> None:
        if self._is_sharded:
            raise ShardstackError(
                f"{optimizer} was to step parameters whose gradients DistributedDataParallel shards over ranks: it "
                "would see this rank's part alone; use core.optimizer.get_megatron_optimizer, or the sharding "
                "strategy 'no_shard'"
            )
        super().check_may_step_directly(optimizer)
        for param, group in self._group_of.items():
            grad_dtype = group.bucket.main_grad_dtype(param)
            if group.bucket.has_gradient(param) and grad_dtype != param.dtype:
                is_local = any(buffer.accumulated_in_fp32 for buffer in self.plan.buffers)
                name = "param_name_patterns_for_fp32_local_accumulation"
                setting = name if is_local else "grad_reduce_in_fp32"
                raise ShardstackError(
                    f"{optimizer} was to step parameter {self._name_of(param)} in {param.dtype}, whose gradient is "
                    f"kept in {grad_dtype} and not in .grad; use core.optimizer.get_megatron_optimizer, or drop "
                    f"{setting}"
                )

    def _name_of(self, param: nn.Parameter) -> str:
        return next(slot.name for slot in self._group_of[param].bucket.slots if slot.param is param)

    def _scale_gradients(self, scaling_factor: float | Tensor) -> None:
        for group in self._bucket_groups:
            group.bucket.scale_gradients(scaling_factor)

    def _drop_gradients(self) -> None:
        self._schedule.restart()
        for group in self._bucket_groups:
            group.clear_grads()

    def _zero_gradients(self) -> None:
        self._drop_gradients()
        for parameter in self.module.parameters():
            parameter.grad = None
            if parameter in self._group_of:
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
                share_gradient(parameter, False)

    # ---- parameters

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gathers the parameters that ranks have updated, those that forward reads first first.

        With ``overlap_param_gather`` it returns at once, and a module's forward waits for the parameters it holds.

        Args:
            force_sync: return when all are there.
            force_dispatch: as in Megatron-LM's signature; here it is always dispatched.
        """
        self._placement.check(unwrap_model(self))
        for group in reversed(self._bucket_groups):
            group.start_param_sync(force_sync=force_sync or not self._pre_hooks)

    def finish_param_sync(self) -> None:
        """Waits for parameters that are still being gathered."""
        for group in self._bucket_groups:
            group.finish_param_sync()

    def free_overlap_buffers(self) -> None:
        """Waits for gathers, by Megatron-LM's name; see `BucketGroup.free_overlap_buffers`."""
        for group in self._bucket_groups:
            group.free_overlap_buffers()

    def enable_forward_pre_hook(self) -> None:
        """Lets parameters be gathered while forward runs: each module's forward waits for those that it reads."""
        if self._pre_hooks:
            raise ShardstackError("the forward pre-hooks are enabled already; disable_forward_pre_hook() comes first")
        self._pre_hooks += wait_before_forwards(self.module, self._group_of)

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Takes the hooks away, as for an evaluation that reads parameters outside of forward.

        Args:
            param_sync: wait for what is still being gathered; without it the caller must, by `finish_param_sync`.
        """
        if not self._pre_hooks:
            raise ShardstackError("there are no forward pre-hooks to disable; overlap_param_gather sets them")
        for handle in self._pre_hooks:
            handle.remove()
        self._pre_hooks.clear()
        if param_sync:
            self.finish_param_sync()

    def broadcast_params(self) -> None:
        self.finish_param_sync()
        broadcast_tensors([*self.module.parameters(), *self.module.buffers()], self.process_group)

    def held_tensors(self) -> dict[str, list[Tensor]]:
        buckets = [group.bucket for group in self._bucket_groups]
        held = [t for bucket in buckets for t in (bucket.grad_data, bucket.separate_shard) if t is not None]
        held += [gradient for bucket in buckets for gradient in bucket.extra_main_grads]
        grads = [p.grad for p in self.module.parameters() if p.grad is not None and not is_unreadable(p.grad)]
        parameters = [*self.module.parameters(), *self.module.buffers()]
        whole = [b.grad_data for b in buckets if b.releases_grads and b.grad_data is not None]
        return {
            "parameters": parameters,
            "gathered parameters": [],
            "gradients": [*held, *grads],
            "gradients not reduced yet": whole,
        }


class _BufferList(list[ParamAndGradBuffer]):
    def __init__(self, items: list[ParamAndGradBuffer], torch_buffers: Callable[..., Iterator[Tensor]]) -> None:
        super().__init__(items)
        self._torch_buffers = torch_buffers

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        return self._torch_buffers(*args, **kwargs)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The bound method without its object, which it does not keep alive.

    torch holds hooks after accumulation where the collector does not look: one that leads back to its parameter would
    keep the wrapper, the model and their process groups for as long as the process runs (torch 2.13).

    Raises:
        WrapError: when called, if the object has gone.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        bound = reference()
        if bound is None:
            raise WrapError(
                "a backward reached parameters whose DistributedDataParallel no longer exists, so that no rank would "
                "reduce their gradients; keep the wrapper for as long as its module trains"
            )
        bound(*args)

    return call
