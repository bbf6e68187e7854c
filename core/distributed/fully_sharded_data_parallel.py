"""Fully sharded data parallelism (ZeRO-3) on contiguous buffers, as a drop-in for `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import current_device
from ..base.errors import WrapError
from ..base.memory_categories import Held
from ..base.parameters import keep_range, set_pending_view
from ..comm.collectives import all_gather, allocator
from ..comm.lane import comm_lane
from ..diagnostics.step_marks import replaced_parameters_marked
from ..dist_checkpointing.global_view import whole_view
from ..process_groups_config import ProcessGroupCollection
from .data_parallel_base import unwrap_model
from .distributed_data_parallel_config import DistributedDataParallelConfig, Engine
from .engine.gathering import ParameterGathering, install_call_hooks
from .engine.unit import Unit, UnitPhase
from .flat_data_parallel import _FlatDataParallel
from .groups import Ranks, twin_group
from .model.initial_values import InitialValues, apply_to_buffers, cast_buffers
from .plan import Plan
from .plan.unit_choice import UnitChoice


class FullyShardedDataParallel(_FlatDataParallel):
    """Shards parameters, gradients and optimizer state over the group (ZeRO-3), in flat buffers.

    The parameters of a unit are views of a slot of memory. Units of equal size take turns with few slots. A
    step does, for each unit:

    1. forward: all-gathers the shards into the slot while the unit before computes, and runs the unit. Frees nothing:
       the slot keeps the unit until another unit is gathered into it, so the last units of a forward are not gathered
       again;
    2. backward, in reverse order: gathers the unit again if another unit has used the slot. Accumulates gradients in
       the unit's contiguous gradient memory; layers of this package compute them there. After the last gradient
       reduce-scatters this memory while backward goes on, and gives it back;
    3. optimizer: updates this rank's shards, a run of elements of each parameter;
    4. the next forward gathers again.

    Outside of forward and backward, code may read a parameter's shape, dtype and gradient, and `state_dict` returns
    this rank's range of each parameter; other uses raise. Inside `whole_parameters` parameters are whole.

    Inside `no_sync` whole gradients accumulate, as under FSDP2; `reduce_every_micro_batch` saves that memory.

    Args:
        config: the model's config; ``calculate_per_token_loss`` and ``gradient_accumulation_fusion`` are read if
            present.
        ddp_config: the wrapper's settings: a `FullyShardedDataParallelConfig`, or any other whose sharding strategy
            is ``optim_grads_params``.
        module: the model. With ``sync_module_states`` all ranks start from the values of the group's first rank; a
            model on the meta device is materialized. If the config computes in ``bf16`` or ``fp16``, fp32 parameters
            stay in fp32: they are cast when they are gathered, and serve as the optimizer's masters.
        sub_modules_to_wrap: classes of units, as of `TorchFullyShardedDataParallel`.
        disable_bucketing: as in Megatron-LM's signature. Here a unit is the bucket, so that it changes nothing.
        process_group: the ranks to shard over, or a mesh of them, (replicate, shard) for hybrid sharding.
        pg_collection: process groups; its `dp_cp` (or `dp`) serves as `process_group`.

    Raises:
        ParallelConfigError: a field that this wrapper cannot honour.
        WrapError: a parameter that is a DTensor already.
    """

    engine = Engine.FULLY_SHARDED
    plan: Plan

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        sub_modules_to_wrap: Iterable[UnitChoice] | None = None,
        disable_bucketing: bool = False,
        process_group: Ranks | None = None,
        *,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        model = unwrap_model(module)
        plan = self._make_plan(module, model, config, ddp_config, sub_modules_to_wrap, process_group, pg_collection)
        super().__init__(config, module, ddp_config, plan)
        with replaced_parameters_marked(module):
            start = InitialValues(module, plan.groups, from_first_rank=plan.sync_module_states)
            start.equalize()
            start.allocate(parameters_have_memory=False)
        named_params = dict(model.named_parameters())
        device = next((param.device for param in named_params.values()), current_device())
        # Gradients are reduced in another group and lane than parameters are gathered in: neither waits for the other.
        has_twins = plan.num_shards > 1
        reductions = twin_group(plan.groups.shard) if has_twins else plan.groups.shard
        allocate_grads = allocator(reductions, device, registers=plan.nccl_ub)
        allocate_slots = allocator(plan.groups.shard, device, registers=plan.nccl_ub)
        self._build(named_params, has_own_lane=has_twins, allocate_grads=allocate_grads, allocate_slots=allocate_slots)
        # This rank's shards of the parameters, which the buffers own; fixed.
        self._shards = [buffer.shards for buffer in self._flat_buffers if buffer.shards is not None]
        for unit in self.units:
            unit.adopt(with_values=True)
        self._note_ranges()
        start.fill()  # what was on the meta device, one tensor at a time, into the shards
        for unit in self.units:
            unit.adopt(with_values=False)
        # Tracks which units are gathered and the order in which they run. Module hooks call it in forward and backward
        # (`install_call_hooks`). `note_step`, and writes to the shards, invalidate gathered units.
        self._gathering = ParameterGathering(
            plan,
            self.units,
            self._shards,
            comm_lane(device),
            note_moved=lambda params: self._placement.note_moved(params),
            note_skipped=self._note_skipped,
        )
        install_call_hooks(plan, self.units, self._gathering)
        if plan.buffer_dtype is not None:
            cast_buffers(model, plan.buffer_dtype)
        for param in named_params.values():
            set_pending_view(param, partial(whole_view, param))
        self._take_gradients()
        self._gathering.forget()

    def _note_skipped(self, unit: Unit) -> None:
        """Sends the gradients of a unit that a backward does not reach on this rank."""
        for bucket in unit.buckets:
            if params := [p for p in bucket.params if p.requires_grad]:
                self._schedule.note_gradients(bucket, params, self._syncs_gradients)

    def settle_parameters(self) -> None:
        self._gathering.settle()

    def note_step(self) -> None:
        super().note_step()
        self._gathering.forget()

    def _zero_gradients(self) -> None:
        self._gathering.end_running()
        self._gathering.settle()
        super()._zero_gradients()

    def publish_update(self) -> None:
        """All-gathers the updated shards over optimizer instances, each of which updates a part of them."""
        group = self.inter_instance_group
        if group is None or not self.plan.shards_update_over_replicas:
            return
        for unit in self.units:
            for bucket in unit.buckets:
                is_shared = bucket.buffer.kind.kind != "replicated"
                if is_shared and any(param.requires_grad for param in bucket.params):
                    own_shard = bucket.local_param_shard
                    shard = own_shard.to(bucket.buffer.device)  # from the host, where it is offloaded
                    own = shard.chunk(group.size())[group.rank()]
                    all_gather(shard, own, group, what=f"updated parameters of unit {unit.name}")
                    if shard is not own_shard:
                        own_shard.copy_(shard)

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        if self.units[-1].phase is UnitPhase.APART:  # inside of another one
            yield
            return
        self._gathering.forget()
        for unit in self.units:
            unit.gather_apart()
            for param in unit.name_of:
                keep_range(param, None)
        try:
            yield
            self._gathering.find_writes()
        finally:
            for unit in self.units:
                unit.return_to_slot()
            self._note_ranges()
            self._gathering.forget()

    def check_may_write_shards(self) -> None:
        self._gathering.find_writes(expected=True)

    def _note_ranges(self) -> None:
        for unit in self.units:
            for param, shard, start in unit.local_ranges():
                keep_range(param, (shard, start))

    def broadcast_params(self) -> None:
        super().broadcast_params()
        self._gathering.forget()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Applies ``to``, ``cuda``, ``half``... to buffers alone.

        Raises:
            WrapError: it would move or convert the parameters, which are views of the wrapper's memory.
        """
        for buffer in self._flat_buffers:
            probe = torch.empty(0, dtype=buffer.kind.param_dtype, device=buffer.device)
            result = fn(probe)
            if (result.dtype, result.device) != (probe.dtype, probe.device):
                raise WrapError(
                    f"a {type(self).__name__} cannot be moved or converted once wrapped, from {probe.dtype} on "
                    f"{probe.device} to {result.dtype} on {result.device}; move and convert the model before "
                    "it is wrapped"
                )
        apply_to_buffers(self.module, fn)
        return self

    def held_tensors(self) -> dict[Held, list[Tensor]]:
        tensors = super().held_tensors()
        slots = {unit.slot for unit in self.units if unit.slot is not None}
        gathered = [*(part for slot in slots for part in slot.parts), *(part for u in self.units for part in u.part)]
        return tensors | {"parameters": [*self._shards, *self.module.buffers()], "gathered parameters": gathered}
