"""Applies FSDP2 to a model, and keeps the handles that act on all of its units."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..._torch_compat import NO_BACKWARD, current_backward
from ...comm.collectives import can_register
from ...device import current_device
from ...diagnostics.misplaced_parameters import reject_plain_state_dicts
from ...tensor_parallel import VocabParallelEmbedding
from ..model.initial_values import InitialValues, cast_buffers
from ..model.same_model import reject_different_models
from ..model.unit_transforms import transform_units
from ..plan import Plan
from .collectives import record_collectives
from .forward_methods import register_forward_methods
from .freed_weights import keep_freed_weights_readable
from .gathered_values import GatheredValues
from .micro_batches import KeptBetweenMicroBatches
from .prefetch import Prefetcher
from .shard_model import fsdp_modules, shard_model
from .torch_private import (
    allocate_gathered_parameters,
    complete_accumulated_gradients,
    drop_pending_gathers,
    forget_forward_order,
    free_partial_shards,
    has_failed_in_backward,
    is_in_forward,
    reset_iteration,
    set_fsdp_root,
)


class ShardedModel:
    """A model that is the same on all ranks, sharded in place; frees, reduces and recovers all of its units.

    Args:
        module: the model, on any device; its parameters may be DTensors of tensor parallelism already.
        plan: what is to be done to it, from `plan_fsdp2`.
        initializes: if False, ranks keep their tensors, and those on the meta device stay there, sharded: the caller
            allocates and fills them before the first forward, for example with ``to_empty`` and its own
            initialization.

    Attributes:
        module: the sharded model; fixed.
        plan: as given.
        fsdp_modules: every module that FSDP2 acts on, the root first; fixed.

    Raises:
        WrapError: a model that is sharded already, that cannot be, or that differs between ranks.
    """

    def __init__(self, module: nn.Module, plan: Plan, *, initializes: bool = True) -> None:
        reject_different_models(module, plan, [unit.names for unit in plan.units[:-1]])
        start = InitialValues(module, plan.groups.whole, from_first_rank=plan.equalizes) if initializes else None
        if start is not None:
            start.equalize()
        transform_units(plan.transforms)
        self.module = module
        self.plan = plan
        shard_model(plan)
        self.fsdp_modules = fsdp_modules(module)
        # Learns the order of units from forwards, and sets what FSDP2 gathers ahead; `reshard` ends an order.
        self._prefetcher = Prefetcher(
            module,
            [unit.modules[0] for unit in plan.units[:-1]],
            [unit.modules[0] for unit in plan.units[:-1] if unit.is_needed_in_backward],
            plan.forward_prefetch,
            plan.backward_prefetch,
        )
        # Sets before each micro-batch what stays gathered after it; `set_gradient_sync` calls it.
        self._kept = KeptBetweenMicroBatches(plan)
        for submodule in module.modules():
            if isinstance(submodule, VocabParallelEmbedding):
                submodule.adds_gradient_rows = plan.adds_gradient_rows
        members = [member for unit in plan.units for member in unit.modules]
        register_forward_methods(
            module, members, plan.forward_methods, prepare=self.prepare_forward, free=self.reshard
        )
        if start is not None:
            start.allocate("cpu" if plan.offloads else None)
            start.fill()
        # Whether the tensors that units are gathered into exist. The first `prepare_forward` sets it; never cleared.
        self._has_allocated = False
        # Whether units keep parts of parameters after forward; fixed.
        self._keeps_parts = any(unit.kept_among is not None for unit in plan.units)
        # Whether a backward raised. `_end_failed_backward` sets it; `recover` returns and clears it.
        self._has_failed = False
        # Versions of shards and gathered parameters, compared when a forward begins and on `reshard`.
        self._values = GatheredValues(module)
        for submodule in [*members, module]:
            submodule.register_forward_pre_hook(self._before_forward, prepend=True)
        self._freed_weights = keep_freed_weights_readable(plan.units[:-1])
        if plan.buffer_dtype is not None:
            cast_buffers(module, plan.buffer_dtype)
        reject_plain_state_dicts(module)
        if plan.registers_memory and can_register(plan.groups.shard, current_device()):
            for fsdp_module in self.fsdp_modules:
                fsdp_module.set_allocate_memory_from_process_group_for_comm(True)
        record_collectives(plan)

    def reshard(self) -> None:
        """Frees all gathered parameters, as after an evaluation; not to be called inside a forward or backward.

        With no backward to follow nothing else would free them: the next forward would read stale weights, and the
        module would show gathered parameters in place of the sharded ones, which hold the gradients.

        Raises:
            UnitError: a parameter was written while it was gathered.
        """
        if self._has_allocated and is_in_forward(self.module):  # which has raised
            reset_iteration(self.module)
            for unit in self._freed_weights:
                unit.end_all()
        drop_pending_gathers(self.module)
        for module in self.fsdp_modules:
            module.reshard()
        if self._keeps_parts:
            free_partial_shards(self.module)
        forget_forward_order(self.module)
        self._prefetcher.end_order()
        self._values.check_unwritten()

    def recover(self) -> bool:
        """Resets FSDP2 after a backward that raised; returns whether there was one since the last call."""
        self._end_failed_backward()
        has_failed, self._has_failed = self._has_failed, False
        return has_failed

    def _end_failed_backward(self) -> None:
        if self._has_allocated and current_backward() == NO_BACKWARD and has_failed_in_backward(self.module):
            reset_iteration(self.module)
            self._has_failed = True

    def prepare_forward(self) -> None:
        """Lets the next forward, of the model or of one of its units, compute with the current values of the shards.

        Every rank calls it. Does nothing inside a running forward or a recomputation.
        """
        if current_backward() != NO_BACKWARD or (self._has_allocated and is_in_forward(self.module)):
            return
        set_fsdp_root(self.module)  # otherwise the first module to run becomes FSDP2's root, and stays it
        self._end_failed_backward()
        if not self._has_allocated:
            self._has_allocated = True
            record_collectives(self.plan)  # what the user has set since the model was sharded too
            if torch.is_inference_mode_enabled():
                allocate_gathered_parameters(self.module)
        if self._values.are_stale():
            self.reshard()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        is_of_model = module is self.module and current_backward() == NO_BACKWARD
        if is_of_model and self._has_allocated and is_in_forward(module):
            reset_iteration(module)  # the last forward raised
        self.prepare_forward()

    def set_gradient_sync(self, enabled: bool) -> None:
        """Sets whether the backwards that follow reduce gradients, or let them add up on each rank."""
        if enabled:
            complete_accumulated_gradients(self.module)
        if not self.plan.reduces_every_micro_batch:
            for module in self.fsdp_modules:
                module.set_requires_gradient_sync(enabled, recurse=False)
        self._kept.expect(another_micro_batch=not enabled)
