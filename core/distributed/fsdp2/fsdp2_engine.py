"""The FSDP2 engine: parameters, gradients and optimizer state in torch's DTensors, by `fully_shard`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.device import current_device
from ...base.memory_categories import Held
from ...base.module_protocol import ModelContents, set_gradient_rows
from ...base.parameters import local_part
from ...comm.lane import comm_lane
from ..engine.engine import Engine, Gradients, Parameters
from ..engine.gathered_units import KeptPart, WriteCounts, lost_write
from ..engine.gradients import BucketReduction, local_gradient
from ..groups import managed_parameters
from ..model.forward_hooks import watch_outputs
from ..model.initial_values import InitialValues
from ..plan import Plan
from ..step import Phase, Step
from .prefetch import UnitPrefetch
from .shard_model import FreedWeights, reject_graph_of_gradients, shard_model
from .torch_private import TorchState, as_fsdp, groups_of
from .unit_collectives import GradientSums, set_collectives


class Fsdp2Engine(Engine):
    """Shards a model by torch's `fully_shard`, and keeps torch's gathers and reductions to the wrapper's contract.

    Torch gathers and frees units around their forwards and backwards, and reduces their gradients. What is added here:
    the order of prefetches, sums over micro-batches, backwards that raised, writes that would be lost.

    Args:
        module, model, state: as of `Gradients`.
        initializes: give parameters their initial values, the same on all ranks; False leaves that to the caller.

    Attributes:
        units: the plan's units, the root last.
        fsdp_modules: every module that FSDP2 acts on, the root first.
    """

    parameters: TorchParameters
    gradients: TorchGradients

    def __init__(
        self, plan: Plan, module: nn.Module, model: nn.Module, state: Step, *, initializes: bool = True
    ) -> None:
        start = None
        if initializes:
            start = InitialValues(module, plan.groups, from_first_rank=plan.settings.sync_module_states)
            start.equalize()
        shard_model(plan)
        torch_state = TorchState(module)
        self.units, self.fsdp_modules = plan.units, torch_state.modules
        # Gathers and reductions of large units allocate memory that they share, which lives as long as the wrapper,
        # but for `free_gathered`.
        parts, self._lent_memory = set_collectives(plan)
        gradients = TorchGradients(plan, module, model, state, torch_state)
        set_gradient_rows(module, plan.settings.lend_gradients)
        if start is not None:
            start.allocate("cpu" if plan.settings.cpu_offload else None)
            start.fill()
        parameters = TorchParameters(plan, module, torch_state, parts, gradients)
        gradients.parameters = parameters
        super().__init__(plan, parameters, gradients)

    def forward_failed(self) -> None:
        """Frees gathered parameters after a forward that raised."""
        if current_backward() == NO_BACKWARD:  # in one, a checkpoint ends its recomputation by an exception
            self.parameters.settle()
            self.parameters.order.leave_model()

    def note_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Frees gathered parameters if no backward follows. Else records the backward when it begins."""
        if not torch.is_grad_enabled() or self.gradients.are_on_shards:
            self.parameters.settle()
        watch_outputs(output, self.gradients.enter_backward)

    def names_of_parameters(self) -> Mapping[nn.Parameter, str]:
        return self.gradients.torch_state.tensors.names()

    def prepare_direct_step(self, optimizer: str) -> None:
        gradients = self.gradients
        if gradients.state.phase is Phase.ACCUMULATING and gradients.has_reduced_alone():
            gradients.inspect_reduced()
            self.share_buffers()
            gradients.state.enter(Phase.REDUCED)  # by the backward itself: finalize_model_grads would add nothing

    def free_gathered(self) -> None:
        self.parameters.settle()
        self.gradients.torch_state.drop_last_gather()
        self._lent_memory.free()

    def shards(self) -> list[Tensor]:
        return [parameter._sharded_param_data for parameter in self.gradients.torch_state.tensors.parameters]

    def held(self) -> dict[Held, list[Tensor]]:
        held = super().held()
        held["gathered parameters"] += self._lent_memory.tensors
        return held


class TorchParameters(Parameters):
    """This rank's shards of all parameters as DTensors, from which torch gathers units.

    Attributes:
        order: learns the order of units from forwards, for what FSDP2 gathers ahead; `settle` ends an order.
    """

    def __init__(
        self, plan: Plan, module: nn.Module, torch_state: TorchState, parts: list[KeptPart], gradients: Gradients
    ) -> None:
        self._plan, self._module, self._torch_state, self._gradients = plan, module, torch_state, gradients
        # What units keep of their parameters after forward, where a part of the ranks keeps them whole. The units'
        # all-gathers fill the parts; `settle` drops them.
        self._parts = parts
        self.order = UnitPrefetch(plan, self.prepare_forward, self._after_method).order
        # Whether the tensors that units are gathered into exist. The first `prepare_forward` sets it.
        self.has_allocated = False
        # Writes to shards, asked for when a forward begins, and to gathered parameters, in `settle`.
        self._writes_to_shards = WriteCounts(torch_state.tensors.shard_versions)
        self._writes_to_gathered = WriteCounts(torch_state.tensors.gathered_versions)
        for submodule in (member for unit in plan.units for member in unit.modules):
            submodule.register_forward_pre_hook(self._before_forward, prepend=True)
            keep_changes = partial(torch_state.keep_changes, groups_of(submodule))
            submodule.register_forward_pre_hook(keep_changes)  # after torch has gathered
            submodule.register_forward_hook(keep_changes, prepend=True)  # before torch frees
        # Their counts of running forwards change; `settle` ends those that an exception has left.
        self._freed_weights = [FreedWeights(unit) for unit in plan.units[:-1] if unit.is_freed]

    def prepare_forward(self) -> None:
        """Lets the next forward, of the model or of one of its units, compute with the current values of the shards.

        Every rank calls it. Does nothing inside a running forward or a recomputation.
        """
        if current_backward() != NO_BACKWARD or (self.has_allocated and self._torch_state.is_in_forward()):
            return
        self._torch_state.reject_assigned(takes_shards=not self.has_allocated)
        self._torch_state.keep_changes()
        self._torch_state.set_root()  # otherwise the first module to run becomes FSDP2's root, and stays it
        self._gradients.recover()
        if not self.has_allocated:
            self.has_allocated = True
            if torch.is_inference_mode_enabled() or self._plan.root.precision.reduce_dtype is not None:
                self._torch_state.allocate_gathered_parameters()
        if self._writes_to_shards.find():
            self.settle()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if module is self._module and current_backward() == NO_BACKWARD:
            self._end_raised_forward()
        self.prepare_forward()

    def _end_raised_forward(self) -> None:
        if self.has_allocated and self._torch_state.is_in_forward():
            self._torch_state.reset_iteration()
            for unit in self._freed_weights:
                unit.end_all()

    def _after_method(self) -> None:
        """Frees gathered parameters if no backward follows. Otherwise the next forward would read stale weights."""
        if not torch.is_grad_enabled() and not self._torch_state.is_in_forward():
            self.settle()

    def settle(self) -> None:
        # With no backward to follow nothing else would free them: the next forward would read stale weights, and the
        # module would show gathered parameters in place of the sharded ones, which hold the gradients.
        state = self._torch_state
        self._end_raised_forward()
        state.keep_changes()
        state.end_evaluation()
        for part in self._parts:
            part.tensor = None
        self.order.end()
        state.tensors.mark_gathered()
        for index in self._writes_to_gathered.find():
            when = "after optimizer.step() and before the next forward, when the module shows its shards"
            raise lost_write(state.tensors.name_of(index), when)

    def invalidate(self) -> None:
        self.settle()
        self.order.end_step()

    def receivers(self) -> list[nn.Parameter]:
        return self._torch_state.tensors.gathered_parameters()

    def held(self) -> dict[Held, list[Tensor]]:
        tensors = self._torch_state.tensors
        parts = [part.tensor for part in self._parts if part.tensor is not None]
        return {
            "parameters": [*tensors.shard_tensors(), *self._module.buffers()],
            "gathered parameters": [*tensors.gathered_tensors(), *parts],
        }


class TorchGradients(Gradients):
    """Gradients in ``param.grad`` of the DTensors, which torch reduces in backward.

    Attributes:
        parameters: the engine's; set once, when they are built.
        adds_always: a backward may add to reduced gradients, sums too: a trainer divides what it divides in its loss.
            `ShardedInPlace` sets it.
        are_on_shards: whether gradients are on the shards that no step has used, so that the module has to show its
            shards after a forward too. `finish` sets it; a step and `zero` clear it.
    """

    parameters: TorchParameters

    def __init__(self, plan: Plan, module: nn.Module, model: nn.Module, state: Step, torch_state: TorchState) -> None:
        super().__init__(plan, module, model, state)
        self.adds_always, self.are_on_shards, self.torch_state = False, False, torch_state
        # Backwards fill it on autograd's thread; the last one of a step and `zero` empty it.
        self._sums = None if self.tree is None else GradientSums(plan, self.tree, torch_state)
        # What the module held when `_shown_parameters` last looked for the parameters that it shows, and these.
        self._contents, self._shown = ModelContents(), list[nn.Parameter]()

    def enter_backward(self, gradient: Tensor) -> None:
        """Records a backward. Autograd calls it with the gradient of each tensor that forward returned."""
        reject_graph_of_gradients("a model")
        self.torch_state.keep_changes()
        self.torch_state.round_to_computed()
        self.state.note_backward(self.reopen)
        if self.tree is not None:
            self.tree.enter()

    def adds_exactly(self, parameter: nn.Parameter) -> bool:
        return self.adds_always or super().adds_exactly(parameter)

    def has_reduced_alone(self) -> bool:
        """Returns whether torch has reduced all gradients, which need nothing more, in the backwards themselves."""
        waits = self.plan.groups.replicated is not None or any(
            True for _ in self.torch_state.tensors.whole_gradients()
        )
        return not waits and all(self.adds_exactly(parameter) for _, parameter in managed_parameters(self.module))

    def reopen(self) -> bool:
        # While a unit is gathered, the module does not show its shards, which have the gradients.
        shown = {parameter: name for name, parameter in managed_parameters(self.module)}
        params = self.torch_state.tensors.names() | shown
        return all(self.adds_exactly(parameter) for parameter in params if parameter.grad is not None)

    def set_sync(self, enabled: bool) -> None:
        super().set_sync(enabled)
        settings = self.plan.settings
        if not (settings.reproducible_across_ranks or settings.reduce_every_micro_batch):
            if enabled:
                self.torch_state.complete_accumulated_gradients()
            for module in self.torch_state.modules:
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

    def finish(self) -> None:
        self.torch_state.reduce_unsharded_gradients()
        self.parameters.settle()
        self.are_on_shards = True
        for parameter in self._shown_parameters():  # of a unit that no forward has reached
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.plan.groups.replicated is not None and not self.state.is_reduced:
            self._reduce_replicated()
        self.inspect_reduced()

    def inspect_reduced(self) -> None:
        """Lets the wrapper's guards check all gradients, which ranks have reduced."""
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

    def note_step(self) -> None:
        self.are_on_shards = False

    def zero(self) -> None:
        self.recover()
        if self._sums is not None:
            self._sums.clear()
        self.torch_state.drop_unsharded_gradients()
        self.note_step()
        self.parameters.invalidate()
        for parameter in self._shown_parameters():
            parameter.grad = None

    def _shown_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that the module shows now, without those that settings ignore."""
        if self._contents.have_changed():
            self._shown = [parameter for _, parameter in managed_parameters(self.module)]
            self._contents.note(self.module)
        return self._shown

    def recover(self) -> None:
        has_begun = self.parameters.has_allocated and current_backward() == NO_BACKWARD
        if has_begun and self.torch_state.has_failed_in_backward():
            self.torch_state.reset_iteration()
            self.state.enter(Phase.BROKEN)

    def held(self) -> dict[Held, list[Tensor]]:
        tensors, sums = self.torch_state.tensors, self._sums.tensors if self._sums is not None else ()
        whole = list(tensors.whole_gradients())
        return {"gradients": [*tensors.gradient_tensors(), *sums], "gradients not reduced yet": whole}
