"""The FSDP2 engine: parameters, gradients and optimizer state in torch's DTensors, by `fully_shard`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.device import current_device
from ...base.memory_categories import Held
from ...base.module_protocol import set_gradient_rows
from ...base.parameters import local_part
from ...comm.lane import comm_lane
from ..engine.bucket_reduction import BucketReduction
from ..engine.engine import Engine
from ..engine.gathered_units import WriteCounts, lost_write
from ..engine.gradients import local_gradient
from ..groups import managed_parameters
from ..model.forward_hooks import enclose, watch_outputs
from ..model.initial_values import InitialValues
from ..plan import Plan
from ..step import Phase, Step
from .freed_weights import FreedWeights, reject_graph_of_gradients
from .prefetch import UnitPrefetch
from .shard_model import fsdp_modules, shard_model
from .torch_private import TorchState, as_fsdp
from .unit_collectives import GradientSums, set_collectives


class Fsdp2Engine(Engine):
    """Shards a model by torch's `fully_shard`, and keeps torch's gathers and reductions to the wrapper's contract.

    Torch gathers and frees units around their forwards and backwards, and reduces their gradients. What is added here:
    the order of prefetches, sums over micro-batches, backwards that raised, writes that would be lost.

    Args:
        initializes: give parameters their initial values, the same on all ranks; False leaves that to the caller.

    Attributes:
        units: the plan's units, the root last.
        fsdp_modules: every module that FSDP2 acts on, the root first.
        torch_state: what torch holds for them.
        adds_always: a backward may add to reduced gradients, sums too: a trainer divides what it divides in its loss.
            `ShardedInPlace` sets it.
    """

    def __init__(
        self, plan: Plan, module: nn.Module, model: nn.Module, state: Step, *, initializes: bool = True
    ) -> None:
        super().__init__(plan, module, model, state)
        self.adds_always = False
        start = (
            InitialValues(module, plan.groups, from_first_rank=plan.settings.sync_module_states)
            if initializes
            else None
        )
        if start is not None:
            start.equalize()
        shard_model(plan)
        # All fixed: torch's modules do not change once they are sharded.
        self.units, self.fsdp_modules, self.torch_state = plan.units, fsdp_modules(module), TorchState(module)
        # What units keep of their parameters after forward, where a part of the ranks keeps them whole; the list is
        # fixed. The units' all-gathers fill the parts; `settle` drops them. Gathers and reductions of large
        # units allocate the memory that they share, which lives as long as the wrapper.
        self._parts, self._lent_memory = set_collectives(plan)
        # Fixed. Backwards fill it on autograd's thread; the last one of a step and `zero_gradients` empty it.
        self._sums = None if self.tree is None else GradientSums(plan, self.tree, self.fsdp_modules, self.torch_state)
        # Learns the order of units from forwards, for what FSDP2 gathers ahead; `settle` ends an order.
        self._order = UnitPrefetch(plan).order
        set_gradient_rows(module, plan.settings.lend_gradients)
        for member, names in plan.find_forward_methods().items():
            for name in names:
                setattr(member, name, enclose(getattr(member, name), self.prepare_forward, self._after_method))
        if start is not None:
            start.allocate("cpu" if plan.settings.cpu_offload else None)
            start.fill()
        # Whether the tensors that units are gathered into exist. The first `prepare_forward` sets it; never cleared.
        self._has_allocated = False
        # Writes to shards, asked for when a forward begins, and to gathered parameters, in `settle`.
        self._writes_to_shards = WriteCounts(self.torch_state.shard_versions)
        self._writes_to_gathered = WriteCounts(self.torch_state.gathered_versions)
        for submodule in (member for unit in plan.units for member in unit.modules):
            submodule.register_forward_pre_hook(self._before_forward, prepend=True)
            submodule.register_forward_pre_hook(self._keep_changes)  # after torch has gathered
            submodule.register_forward_hook(self._keep_changes, prepend=True)  # before torch frees
        # Their counts of running forwards change; `settle` ends those that an exception has left.
        self._freed_weights = [FreedWeights(unit) for unit in plan.units[:-1] if unit.is_freed]
        # Whether the module has to show its shards after a forward too, because gradients are on them that no step has
        # used. `finish_reduction` sets it, `updated` and `zero_gradients` clear it.
        self._shows_gradients = False

    # ---- parameters

    def adds_exactly(self, parameter: nn.Parameter) -> bool:
        return self.adds_always or super().adds_exactly(parameter)

    def forward_failed(self) -> None:
        """Frees gathered parameters after a forward that raised."""
        if current_backward() == NO_BACKWARD:  # in one, a checkpoint ends its recomputation by an exception
            self.settle()
            self._order.leave_model()

    def prepare_forward(self, *unused: Any) -> None:
        """Lets the next forward, of the model or of one of its units, compute with the current values of the shards.

        Every rank calls it. Does nothing inside a running forward or a recomputation.
        """
        if current_backward() != NO_BACKWARD or (self._has_allocated and self.torch_state.is_in_forward()):
            return
        self.torch_state.reject_assigned(takes_shards=not self._has_allocated)
        self.torch_state.keep_changes()
        self.torch_state.set_root()  # otherwise the first module to run becomes FSDP2's root, and stays it
        self.recover()
        if not self._has_allocated:
            self._has_allocated = True
            if torch.is_inference_mode_enabled() or self.plan.root.precision.reduce_dtype is not None:
                self.torch_state.allocate_gathered_parameters()
        if self._writes_to_shards.find():
            self.settle()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        is_of_model = module is self.module and current_backward() == NO_BACKWARD
        if is_of_model and self._has_allocated and self.torch_state.is_in_forward():
            self.torch_state.reset_iteration()  # the last forward raised
        self.prepare_forward()

    def _keep_changes(self, module: nn.Module, *unused: Any) -> None:
        self.torch_state.keep_changes(as_fsdp(module))

    def _after_method(self, *unused: Any) -> None:
        """Frees gathered parameters if no backward follows. Otherwise the next forward would read stale weights."""
        if not torch.is_grad_enabled() and not self.torch_state.is_in_forward():
            self.settle()

    def note_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Frees gathered parameters if no backward follows. Else records the backward when it begins."""
        if not torch.is_grad_enabled() or self._shows_gradients:
            self.settle()
        watch_outputs(output, self._enter_backward)

    def updated(self) -> None:
        self._shows_gradients = False
        self.settle()
        self._order.end_step()

    def settle(self) -> None:
        """Frees all gathered parameters, as after an evaluation. Not to be called inside a forward or backward.

        With no backward to follow nothing else would free them: the next forward would read stale weights, and the
        module would show gathered parameters in place of the sharded ones, which hold the gradients.

        Raises:
            UnitError: a parameter was written while it was gathered.
        """
        if self._has_allocated and self.torch_state.is_in_forward():  # which has raised
            self.torch_state.reset_iteration()
            for unit in self._freed_weights:
                unit.end_all()
        self.torch_state.keep_changes()
        self.torch_state.end_evaluation()
        for module in self.fsdp_modules:
            module.reshard()
        for part in self._parts:
            part.drop()
        self._order.end()
        self.torch_state.mark_gathered()
        for index in self._writes_to_gathered.find():
            when = "after optimizer.step() and before the next forward, when the module shows its shards"
            raise lost_write(self.torch_state.name_of(index), when)

    # ---- gradients

    def _enter_backward(self, gradient: torch.Tensor) -> None:
        """Records a backward. Autograd calls it with the gradient of each tensor that forward returned."""
        reject_graph_of_gradients("a model")
        self.torch_state.keep_changes()
        self.gradient_state.note_backward(self.reopen)
        if self.tree is not None:
            self.tree.enter()

    def reopen(self) -> bool:
        # While a unit is gathered, the module does not show its shards, which have the gradients.
        shown = {parameter: name for name, parameter in managed_parameters(self.module)}
        params = self.torch_state.names_of_parameters() | shown
        return all(self.adds_exactly(parameter) for parameter in params if parameter.grad is not None)

    def set_sync(self, enabled: bool) -> None:
        super().set_sync(enabled)
        if self._sums is not None:
            self._sums.expect_sync(enabled)
        if not (self.plan.settings.reproducible_across_ranks or self.plan.settings.reduce_every_micro_batch):
            if enabled:
                self.torch_state.complete_accumulated_gradients()
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

    def finish_reduction(self) -> None:
        self.torch_state.reduce_unsharded_gradients()
        self.settle()
        self._shows_gradients = True
        for _, parameter in managed_parameters(self.module):  # of a unit that no forward has reached
            if parameter.requires_grad and local_gradient(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.plan.groups.replicated is not None and not self.gradient_state.is_reduced:
            self._reduce_replicated()
        named_gradients = ((name, local_gradient(p)) for name, p in managed_parameters(self.model))
        gradients = ((name, gradient) for name, gradient in named_gradients if gradient is not None)
        self.inspect(gradients, are_reduced=True)

    @torch.no_grad()
    def _reduce_replicated(self) -> None:
        """Reduces the gradients of replicated parameters, which torch leaves to each rank, one unit after the other.

        Here and not in backward: ranks that skip modules would reduce them in other orders.
        """
        plan = self.plan.over_ranks_of("replicated")
        reduction = BucketReduction(plan, comm_lane(current_device()), lambda gradients: None, None)
        parameters = dict(self.module.named_parameters())
        for unit in self.plan.units:
            for piece in unit.pieces:
                if piece.kind == "replicated" and piece.is_trained:
                    of_params = (parameters[param.name].grad for param in piece.params)  # None where frozen now
                    gradients = [local_part(gradient) for gradient in of_params if gradient is not None]
                    if not gradients:
                        continue
                    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(current_device())
                    reduction.reduce(flat, flat, False, f"the gradients of unit {' + '.join(unit.names) or 'root'}")
                    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                        gradient.copy_(total.view_as(gradient))

    def zero_gradients(self) -> None:
        self.recover()
        if self._sums is not None:
            self._sums.clear()
        self.torch_state.drop_unsharded_gradients()
        self.updated()
        for _, parameter in managed_parameters(self.module):
            parameter.grad = None

    def recover(self) -> None:
        has_begun = self._has_allocated and current_backward() == NO_BACKWARD
        if has_begun and self.torch_state.has_failed_in_backward():
            self.torch_state.reset_iteration()
            self.gradient_state.enter(Phase.BROKEN)

    # ---- before a step

    def names_of_parameters(self) -> Mapping[nn.Parameter, str]:
        return self.torch_state.names_of_parameters()

    def prepare_direct_step(self, optimizer: str) -> None:
        self.recover()
        is_accumulating = self.gradient_state.phase is Phase.ACCUMULATING and self.plan.groups.replicated is None
        is_accumulating = is_accumulating and all(self.adds_exactly(p) for _, p in managed_parameters(self.module))
        if is_accumulating and not any(True for _ in self.torch_state.whole_gradients()):
            self.share_buffers()
            self.gradient_state.enter(Phase.REDUCED)  # by the backward itself: finalize_model_grads would add nothing

    # ---- memory

    def held(self) -> dict[Held, list[torch.Tensor]]:
        state, sums = self.torch_state, self._sums.tensors if self._sums is not None else ()
        parts = [part.tensor for part in self._parts if part.tensor is not None]
        return {
            "parameters": [*state.shard_tensors(), *self.module.buffers()],
            "gathered parameters": [*state.gathered_tensors(), *parts, *self._lent_memory.tensors],
            "gradients": [*state.gradient_tensors(), *sums],
            "gradients not reduced yet": list(state.whole_gradients()),
        }

    def gradient_receivers(self) -> list[nn.Parameter]:
        return self.torch_state.gathered_parameters()
