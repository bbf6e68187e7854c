"""Applies FSDP2 to a model, and keeps the handles that act on all of its units."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...diagnostics.misplaced_parameters import reject_plain_state_dicts
from ...tensor_parallel import VocabParallelEmbedding
from ..gathered_values import WriteCounts, lost_write
from ..gradient_tree import GradientTree
from ..model.initial_values import InitialValues, cast_buffers
from ..plan import Plan
from ..plan.units import find_forward_methods
from .collectives import set_collectives
from .gathered_weights import FreedWeights, prefetch_units
from .gradient_sums import GradientSums
from .shard_model import fsdp_modules, shard_model
from .torch_private import TorchState, as_fsdp


class ShardedModel:
    """A model that is the same on all ranks, sharded in place. Frees, reduces and recovers all of its units.

    Args:
        module: the model, on any device; its parameters may be DTensors of tensor parallelism already.
        plan: what is to be done to it, from `plan_model`.
        tree: the order of additions over micro-batches, where there is one.
        initializes: if False, ranks keep their tensors, and those on the meta device stay there, sharded: the caller
            allocates and fills them before the first forward, for example with ``to_empty`` and its own
            initialization.

    Attributes:
        module: the sharded model; fixed.
        plan: as given.
        fsdp_modules: every module that FSDP2 acts on, the root first; fixed.
        state: what torch holds for them.
        sums: sums of a step's gradients, or None without `tree`.

    Raises:
        WrapError: a model that is sharded already, or that cannot be.
    """

    def __init__(
        self, module: nn.Module, plan: Plan, tree: GradientTree | None = None, *, initializes: bool = True
    ) -> None:
        start = InitialValues(module, plan.groups, from_first_rank=plan.sync_module_states) if initializes else None
        if start is not None:
            start.equalize()
        # Both fixed.
        self.module = module
        self.plan = plan
        shard_model(plan)
        # Fixed: torch's modules do not change once they are sharded.
        self.fsdp_modules = fsdp_modules(module)
        self.state = TorchState(module)
        # What units keep of their parameters after forward, where a part of the ranks keeps them whole; the list is
        # fixed. The units' all-gathers fill the parts; `reshard` drops them.
        self._parts = set_collectives(plan)
        # Fixed. Backwards fill it on autograd's thread, the last one of a step empties it; `drop_gradients` clears it.
        self.sums = None if tree is None else GradientSums(plan, tree, self.fsdp_modules, self.state)
        # Learns the order of units from forwards, and sets what FSDP2 gathers ahead; `reshard` ends an order.
        self._order = prefetch_units(plan)
        for submodule in module.modules():
            if isinstance(submodule, VocabParallelEmbedding):
                submodule.adds_gradient_rows = plan.lends_gradients
        members = [member for unit in plan.units for member in unit.modules]
        for member, names in find_forward_methods(module, members, plan.forward_methods).items():
            for name in names:
                register_fsdp_forward_method(member, name)
                setattr(member, name, self._freeing(getattr(member, name)))
        if start is not None:
            start.allocate("cpu" if plan.cpu_offload else None)
            start.fill()
        # Whether the tensors that units are gathered into exist. The first `prepare_forward` sets it; never cleared.
        self._has_allocated = False
        # Whether a backward raised. `_end_failed_backward` sets it; `recover` returns and clears it.
        self._has_failed = False
        # Writes to shards, asked for when a forward begins, and to gathered parameters, on `reshard`.
        self._writes_to_shards = WriteCounts(self.state.shard_versions)
        self._writes_to_gathered = WriteCounts(self.state.gathered_versions)
        for submodule in [*members, module]:
            submodule.register_forward_pre_hook(self._before_forward, prepend=True)
            submodule.register_forward_pre_hook(self._keep_changes)  # after torch has gathered
            submodule.register_forward_hook(self._keep_changes, prepend=True)  # before torch frees
        # Their counts of running forwards change; `reshard` ends those that an exception has left.
        self._freed_weights = [FreedWeights(unit) for unit in plan.units[:-1] if unit.is_freed]
        if plan.buffer_dtype is not None:
            cast_buffers(module, plan.buffer_dtype)
        reject_plain_state_dicts(module)

    @property
    def parts(self) -> list[torch.Tensor]:
        """What units keep of their parameters between forward and backward."""
        return [part.tensor for part in self._parts if part.tensor is not None]

    def reshard(self) -> None:
        """Frees all gathered parameters, as after an evaluation. Not to be called inside a forward or backward.

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
        for part in self._parts:
            part.drop()
        self._order.end()
        self.state.mark_gathered()
        for index in self._writes_to_gathered.find():
            when = "after optimizer.step() and before the next forward, when the module shows its shards"
            raise lost_write(self.state.name_of(index), when)

    def recover(self) -> bool:
        """Resets FSDP2 after a backward that raised. Returns whether there was one since the last call."""
        self._end_failed_backward()
        has_failed, self._has_failed = self._has_failed, False
        return has_failed

    def drop_gradients(self) -> None:
        """Drops the gradients that torch does not keep in ``param.grad``, and frees all gathered parameters."""
        self.recover()
        if self.sums is not None:
            self.sums.clear()
        self.state.drop_unsharded_gradients()
        self.reshard()

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
            if torch.is_inference_mode_enabled() or self.plan.root.precision.reduce_dtype is not None:
                self.state.allocate_gathered_parameters()
        if self._writes_to_shards.find():
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
        if self.sums is not None:
            self.sums.expect_sync(enabled)
        if not (self.plan.is_reproducible or self.plan.reduces_every_micro_batch):
            if enabled:
                self.state.complete_accumulated_gradients()
            for module in self.fsdp_modules:
                module.set_requires_gradient_sync(enabled, recurse=False)
        # Between micro-batches a rank holds every gradient whole, until the last one reduces them. Compared with that,
        # the units that a micro-batch begins and ends with take little memory, and no computation would overlap with
        # gathering them again. Those not needed in backward stay gathered through it; the rest are gathered again
        # there, and kept.
        for unit in self.plan.units:
            for module in map(as_fsdp, unit.modules if unit.is_kept else ()):
                module.set_reshard_after_backward(enabled, recurse=False)
                if unit.is_freed and not unit.is_needed_in_backward:
                    module.set_reshard_after_forward(enabled, recurse=False)

    def _freeing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a method that gathers parameters free them if no backward follows. Every rank calls it, as `forward`.

        The next forward would read stale weights otherwise.
        """

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.prepare_forward()
            output = method(*args, **kwargs)
            if not torch.is_grad_enabled() and not self.state.is_in_forward():
                self.reshard()
            return output

        return called
