"""Applies FSDP2 to a model, and keeps the handles that act on all of its units."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from ..._torch_compat import NO_BACKWARD, current_backward
from ...comm.collectives import can_register
from ...device import current_device
from ...diagnostics.misplaced_parameters import reject_plain_state_dicts
from ...tensor_parallel import VocabParallelEmbedding
from ..model.initial_values import InitialValues, cast_buffers
from ..model.same_model import reject_different_models
from ..model.unit_transforms import find_forward_methods, transform_units
from ..plan import Plan
from .collectives import kept_parts, record_collectives
from .gathered_weights import GatheredValues, keep_freed_weights_readable
from .prefetch import Prefetcher
from .shard_model import fsdp_modules, shard_model
from .torch_private import TorchState, as_fsdp


class ShardedModel:
    """A model that is the same on all ranks, sharded in place; frees, reduces and recovers all of its units.

    Args:
        module: the model, on any device; its parameters may be DTensors of tensor parallelism already.
        plan: what is to be done to it, from `plan_model`.
        initializes: if False, ranks keep their tensors, and those on the meta device stay there, sharded: the caller
            allocates and fills them before the first forward, for example with ``to_empty`` and its own
            initialization.

    Attributes:
        module: the sharded model; fixed.
        plan: as given.
        fsdp_modules: every module that FSDP2 acts on, the root first; fixed.
        state: what torch holds for them.

    Raises:
        WrapError: a model that is sharded already, that cannot be, or that differs between ranks.
    """

    def __init__(self, module: nn.Module, plan: Plan, *, initializes: bool = True) -> None:
        reject_different_models(module, plan, [unit.names for unit in plan.units[:-1]])
        start = InitialValues(module, plan.groups, from_first_rank=plan.equalizes) if initializes else None
        if start is not None:
            start.equalize()
        transform_units(plan.transforms)
        self.module = module
        self.plan = plan
        shard_model(plan)
        self.fsdp_modules = fsdp_modules(module)
        self.state = TorchState(module)
        # Learns the order of units from forwards, and sets what FSDP2 gathers ahead; `reshard` ends an order.
        self._prefetcher = Prefetcher(
            module,
            [unit.modules[0] for unit in plan.units[:-1]],
            [unit.modules[0] for unit in plan.units[:-1] if unit.is_needed_in_backward],
            plan.forward_prefetch,
            plan.backward_prefetch,
        )
        # Sets before each micro-batch what stays gathered after it; `set_gradient_sync` calls it.
        self._kept = _KeptBetweenMicroBatches(plan)
        for submodule in module.modules():
            if isinstance(submodule, VocabParallelEmbedding):
                submodule.adds_gradient_rows = plan.adds_gradient_rows
        members = [member for unit in plan.units for member in unit.modules]
        _register_forward_methods(
            module,
            members,
            plan.forward_methods,
            prepare=self.prepare_forward,
            free=self.reshard,
            is_running=self.state.is_in_forward,
        )
        if start is not None:
            start.allocate("cpu" if plan.offloads else None)
            start.fill()
        # Whether the tensors that units are gathered into exist. The first `prepare_forward` sets it; never cleared.
        self._has_allocated = False
        # What units keep of their parameters after forward, where a part of the ranks keeps them whole, by unit. The
        # units' all-gathers fill the parts; `reshard` drops them.
        self._parts = kept_parts(plan)
        # Whether a backward raised. `_end_failed_backward` sets it; `recover` returns and clears it.
        self._has_failed = False
        # Versions of shards and gathered parameters, compared when a forward begins and on `reshard`.
        self._values = GatheredValues(self.state)
        for submodule in [*members, module]:
            submodule.register_forward_pre_hook(self._before_forward, prepend=True)
            submodule.register_forward_pre_hook(self._keep_changes)  # after torch has gathered
            submodule.register_forward_hook(self._keep_changes, prepend=True)  # before torch frees
        self._freed_weights = keep_freed_weights_readable(plan.units[:-1])
        if plan.buffer_dtype is not None:
            cast_buffers(module, plan.buffer_dtype)
        reject_plain_state_dicts(module)
        if plan.registers_memory and can_register(plan.groups.shard, current_device()):
            for fsdp_module in self.fsdp_modules:
                fsdp_module.set_allocate_memory_from_process_group_for_comm(True)
        record_collectives(plan, self._parts)

    @property
    def parts(self) -> list[torch.Tensor]:
        """What units keep of their parameters between forward and backward."""
        return [part.tensor for part in self._parts.values() if part.tensor is not None]

    def reshard(self) -> None:
        """Frees all gathered parameters, as after an evaluation; not to be called inside a forward or backward.

        With no backward to follow nothing else would free them: the next forward would read stale weights, and the
        module would show gathered parameters in place of the sharded ones, which hold the gradients.

        Raises:
            UnitError: a parameter was written while it was gathered.
        """
        if self._has_allocated and self.state.is_in_forward():  # which has raised
            self.state.reset_iteration()
            for unit in self._freed_weights:
                unit.end_all()
        self.state.keep_changes()
        self.state.end_evaluation()
        for module in self.fsdp_modules:
            module.reshard()
        for part in self._parts.values():
            part.drop()
        self._prefetcher.end_order()
        self._values.check_unwritten()

    def recover(self) -> bool:
        """Resets FSDP2 after a backward that raised; returns whether there was one since the last call."""
        self._end_failed_backward()
        has_failed, self._has_failed = self._has_failed, False
        return has_failed

    def _end_failed_backward(self) -> None:
        if self._has_allocated and current_backward() == NO_BACKWARD and self.state.has_failed_in_backward():
            self.state.reset_iteration()
            self._has_failed = True

    def prepare_forward(self) -> None:
        """Lets the next forward, of the model or of one of its units, compute with the current values of the shards.

        Every rank calls it. Does nothing inside a running forward or a recomputation.
        """
        if current_backward() != NO_BACKWARD or (self._has_allocated and self.state.is_in_forward()):
            return
        self.state.reject_assigned(takes_shards=not self._has_allocated)
        self.state.keep_changes()
        self.state.set_root()  # otherwise the first module to run becomes FSDP2's root, and stays it
        self._end_failed_backward()
        if not self._has_allocated:
            self._has_allocated = True
            record_collectives(self.plan, self._parts)  # what the user has set since the model was sharded too
            if torch.is_inference_mode_enabled() or self.plan.root.precision.reduce_dtype is not None:
                self.state.allocate_gathered_parameters()
        if self._values.are_stale():
            self.reshard()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        is_of_model = module is self.module and current_backward() == NO_BACKWARD
        if is_of_model and self._has_allocated and self.state.is_in_forward():
            self.state.reset_iteration()  # the last forward raised
        self.prepare_forward()

    def _keep_changes(self, module: nn.Module, *unused: Any) -> None:
        self.state.keep_changes(as_fsdp(module))

    def set_gradient_sync(self, enabled: bool) -> None:
        """Sets whether the backwards that follow reduce gradients, or let them add up on each rank."""
        if not (self.plan.is_reproducible or self.plan.reduces_every_micro_batch):
            if enabled:
                self.state.complete_accumulated_gradients()
            for module in self.fsdp_modules:
                module.set_requires_gradient_sync(enabled, recurse=False)
        self._kept.expect(another_micro_batch=not enabled)


class _KeptBetweenMicroBatches:
    """Sets, before each micro-batch, which units stay gathered after it; keeps no state but FSDP2's own settings.

    Between micro-batches a rank holds every gradient whole, until the last one reduces them. Compared with that, the
    units that a micro-batch begins and ends with take little memory. Gathering them again takes long, because no
    computation overlaps with those gathers.

    Args:
        plan: says of each unit, and of the root, whether it is kept (`UnitPlan.is_kept`).
    """

    def __init__(self, plan: Plan) -> None:
        kept = [unit for unit in plan.units if unit.is_kept]
        # Both lists are fixed; the settings of their modules change with each micro-batch, by `expect` alone.
        # Units not needed in backward stay gathered through it; the rest are gathered again in backward and kept.
        self._gathered_once = [
            as_fsdp(module)
            for unit in kept
            if unit.is_freed and not unit.is_needed_in_backward
            for module in unit.modules
        ]
        self._kept = [as_fsdp(module) for unit in kept for module in unit.modules]

    def expect(self, *, another_micro_batch: bool) -> None:
        """Prepares for a micro-batch; called before each.

        Args:
            another_micro_batch: the step has one after it, so that kept units are not freed.
        """
        for module in self._kept:
            module.set_reshard_after_backward(not another_micro_batch, recurse=False)
        for module in self._gathered_once:
            module.set_reshard_after_forward(not another_micro_batch, recurse=False)


def _register_forward_methods(
    root: nn.Module,
    members: Iterable[nn.Module],
    names: Sequence[str],
    *,
    prepare: Callable[[], None],
    free: Callable[[], None],
    is_running: Callable[[], bool],
) -> None:
    """Gathers parameters around the named methods of the sharded root and of its units, and frees them after.

    They are called on the wrapped model: ``model.module.generate(...)``. Every rank must call them, as `forward`.

    Args:
        members: the modules of the units.
        prepare: called before each, as before a forward.
        free: frees what stays gathered, after a call that no backward follows.
        is_running: returns whether a forward is running, which the call is a part of.

    Raises:
        WrapError: a name that neither the root nor a unit has as a method.
    """
    for module, found in find_forward_methods(root, members, names).items():
        for name in found:
            register_fsdp_forward_method(module, name)
            setattr(module, name, _freeing(getattr(module, name), prepare, free, is_running))


def _freeing(
    method: Callable[..., Any], prepare: Callable[[], None], free: Callable[[], None], is_running: Callable[[], bool]
) -> Callable[..., Any]:
    """Frees gathered parameters if no backward follows; otherwise the next forward would read stale weights."""

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        prepare()
        output = method(*args, **kwargs)
        if not torch.is_grad_enabled() and not is_running():
            free()
        return output

    return called
