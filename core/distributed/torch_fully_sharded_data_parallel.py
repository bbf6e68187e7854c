"""Fully sharded data parallelism on PyTorch FSDP2, as a drop-in for `DistributedDataParallel`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.modules.module import _IncompatibleKeys

from ..base._torch_compat import NO_BACKWARD, current_backward
from ..base.device import current_device
from ..base.errors import ShardstackError
from ..base.memory_categories import Held
from ..base.parameters import local_part
from ..comm.lane import comm_lane
from ..diagnostics.misplaced_parameters import reject_plain_state_dicts
from ..process_groups_config import ProcessGroupCollection
from ..tensor_parallel import VocabParallelEmbedding
from .data_parallel_base import _BaseDataParallel, unwrap_model
from .distributed_data_parallel_config import DistributedDataParallelConfig, Engine
from .engine.buffer import BucketReduction
from .engine.gathered_units import WriteCounts, lost_write
from .fsdp2.shard_model import FreedWeights, fsdp_modules, prefetch_units, reject_graph_of_gradients, shard_model
from .fsdp2.torch_private import TorchState, as_fsdp
from .fsdp2.unit_collectives import GradientSums, set_collectives
from .gradient_state import Phase
from .groups import Ranks, managed_parameters
from .model.forward_hooks import enclose, watch_outputs
from .model.initial_values import InitialValues, cast_buffers, parameter_attributes_kept
from .model.unfit_models import reject_changed
from .plan.unit_choice import UnitChoice
from .verbs import local_gradient


class TorchFullyShardedDataParallel(_BaseDataParallel):
    """Parameters, gradients and optimizer state sharded over the group (ZeRO-3), by PyTorch's `fully_shard`.

    Parameters become DTensors on dim 0 and keep Megatron's attributes; ``param.grad`` is sharded so too. With fp32
    parameters and ``config.bf16`` or ``fp16`` the fp32 shard is the master copy: it is cast for the all-gather, and
    gradients are reduced in that dtype, or in fp32 with ``ddp_config.grad_reduce_in_fp32``. Parameters that arrive in
    low precision stay so, and FSDP2 rounds their gradients to it, also where they were reduced in fp32.

    A parameter that no backward reached has a zero gradient, as under `DistributedDataParallel`.

    Args:
        config: the model's config; ``bf16``, ``fp16`` and ``calculate_per_token_loss`` are read where present.
        ddp_config: the wrapper's settings, of either type; a plain one takes FSDP2's defaults.
        module: the model. With ``sync_module_states`` all ranks start from the values of the group's first rank. A
            model on the meta device is sharded first and then filled shard by shard: values are drawn by parameter
            name, or received from the first rank if only that has values. Every rank must run the same units in
            forward.
        sub_modules_to_wrap: classes whose outermost instances become units; `default_units` of the model by default.
            For an `nn.ModuleList` or `nn.ModuleDict` its items become units.
        disable_bucketing: as in Megatron-LM's signature. Here a unit is the bucket, so that it changes nothing.
        process_group: the ranks to shard over, or a mesh of them, (replicate, shard) for hybrid sharding. Given,
            `core.parallel_state` is not touched; by default it is the data-parallel group with context parallelism,
            two-dimensional with several optimizer instances.
        pg_collection: process groups; its `dp_cp` (or `dp`) serves as `process_group`.
        mp_policy: torch's own, in place of the dtypes of `ddp_config` and `config`.
        initializes: if False, ranks keep their tensors, and those on the meta device stay there, sharded: the caller
            allocates and fills them before the first forward, for example with ``to_empty`` and its own
            initialization.

    Attributes:
        units: the plan's units, without the model itself.
        fsdp_modules: every module that FSDP2 acts on, the root first.
        torch_state: what torch holds for them.

    Raises:
        ParallelConfigError: a field that FSDP2 cannot honour.
        WrapError: a model that is sharded already or cannot be.
    """

    engine = Engine.FSDP2

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
        mp_policy: MixedPrecisionPolicy | None = None,
        initializes: bool = True,
    ) -> None:
        plan = self._make_plan(
            module, module, config, ddp_config, sub_modules_to_wrap, process_group, pg_collection, mp_policy=mp_policy
        )
        super().__init__(config, module, ddp_config, plan)
        start = InitialValues(module, plan.groups, from_first_rank=plan.sync_module_states) if initializes else None
        if start is not None:
            start.equalize()
        shard_model(plan)
        # All fixed: torch's modules do not change once they are sharded.
        self.units, self.fsdp_modules, self.torch_state = plan.units[:-1], fsdp_modules(module), TorchState(module)
        # What units keep of their parameters after forward, where a part of the ranks keeps them whole; the list is
        # fixed. The units' all-gathers fill the parts; `settle_parameters` drops them. Gathers and reductions of large
        # units allocate the memory that they share, which lives as long as the wrapper.
        self._parts, self._lent_memory = set_collectives(plan)
        # Fixed. Backwards fill it on autograd's thread; the last one of a step and `_zero_gradients` empty it.
        self._sums = (
            None if self._tree is None else GradientSums(plan, self._tree, self.fsdp_modules, self.torch_state)
        )
        # Learns the order of units from forwards, for what FSDP2 gathers ahead; `settle_parameters` ends an order.
        self._order = prefetch_units(plan)
        for submodule in module.modules():
            if isinstance(submodule, VocabParallelEmbedding):
                submodule.adds_gradient_rows = plan.lends_gradients
        for member, names in plan.find_forward_methods().items():
            for name in names:
                setattr(member, name, enclose(getattr(member, name), self.prepare_forward, self._after_method))
        if start is not None:
            start.allocate("cpu" if plan.cpu_offload else None)
            start.fill()
        # Whether the tensors that units are gathered into exist. The first `prepare_forward` sets it; never cleared.
        self._has_allocated = False
        # Writes to shards, asked for when a forward begins, and to gathered parameters, in `settle_parameters`.
        self._writes_to_shards = WriteCounts(self.torch_state.shard_versions)
        self._writes_to_gathered = WriteCounts(self.torch_state.gathered_versions)
        for submodule in (member for unit in plan.units for member in unit.modules):
            submodule.register_forward_pre_hook(self._before_forward, prepend=True)
            submodule.register_forward_pre_hook(self._keep_changes)  # after torch has gathered
            submodule.register_forward_hook(self._keep_changes, prepend=True)  # before torch frees
        # Their counts of running forwards change; `settle_parameters` ends those that an exception has left.
        self._freed_weights = [FreedWeights(unit) for unit in plan.units[:-1] if unit.is_freed]
        if plan.buffer_dtype is not None:
            cast_buffers(module, plan.buffer_dtype)
        reject_plain_state_dicts(module)
        # Whether the module has to show its shards after a forward too, because gradients are on them that no step has
        # used. `_finish_grad_sync` sets it, `note_step` and `_zero_gradients` clear it.
        self._shows_gradients = False
        # Whether a hook of the module calls `_note_forward`. `let_module_be_called` sets it; never cleared.
        self._is_called_by_module = False
        self._finish_construction()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module's forward. Frees gathered parameters if no backward follows or forward raised.

        Between `finish_grad_sync` and the step it frees them too, and a backward gathers them again.
        """
        try:
            output = super().forward(*inputs, **kwargs)
        except BaseException:
            if current_backward() == NO_BACKWARD:  # in one, a checkpoint ends its recomputation by an exception
                self.settle_parameters()
                self._order.leave_model()
            raise
        if not self._is_called_by_module:
            self._note_forward(self.module, inputs, output)
        return output

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
            self.settle_parameters()

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
            self.settle_parameters()

    def _note_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Frees gathered parameters if no backward follows. Else records the backward when it begins."""
        if not torch.is_grad_enabled() or self._shows_gradients:
            self.settle_parameters()
        watch_outputs(output, self._enter_backward)

    def let_module_be_called(self) -> nn.Module:
        """Lets the module be called in place of the wrapper, which then lives as long as it. Returns the module.

        The module's ``set_requires_gradient_sync``, by which such trainers say which micro-batch is the last, becomes
        that of the wrapper. The module is marked for Hugging Face's ``generate``, so that ranks whose text has ended
        go on until all have.
        """
        self._is_called_by_module = True
        self.module.register_forward_hook(self._note_forward)
        # Both are set on the user's model and never removed. Hugging Face's `generate` reads the mark in each call.
        self.module.set_requires_gradient_sync = self.set_requires_gradient_sync  # type: ignore[assignment]
        self.module._is_fsdp_managed_module = True  # type: ignore[assignment]
        return self.module

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Acts as entering (False) or leaving (True) `no_sync`, by torch's name and arguments.

        Args:
            recurse: False sets it for the root unit alone, as torch does.
        """
        if recurse:
            self._set_gradient_sync(requires_gradient_sync)
        else:
            FSDPModule.set_requires_gradient_sync(self.fsdp_modules[0], requires_gradient_sync, recurse=False)

    def _enter_backward(self, gradient: torch.Tensor) -> None:
        """Records a backward. Autograd calls it with the gradient of each tensor that forward returned."""
        reject_graph_of_gradients("a model")
        self.torch_state.keep_changes()
        self.gradient_state.note_backward(self._open_reduced_gradients)
        if self._tree is not None:
            self._tree.enter()

    def _open_reduced_gradients(self) -> bool:
        # While a unit is gathered, the module does not show its shards, which have the gradients.
        shown = {parameter: name for name, parameter in managed_parameters(self.module)}
        params = self.torch_state.names_of_parameters() | shown
        return all(self._adds_exactly(parameter) for parameter in params if parameter.grad is not None)

    def check_may_step(self, optimizer: str) -> None:
        super().check_may_step(optimizer)
        reject_changed(self.module, self.torch_state.names_of_parameters())

    def check_may_step_directly(self, optimizer: str) -> None:
        self.recover()
        is_accumulating = self.gradient_state.phase is Phase.ACCUMULATING and self.plan.groups.replicated is None
        is_accumulating = is_accumulating and all(self._adds_exactly(p) for _, p in managed_parameters(self.module))
        if is_accumulating and not any(True for _ in self.torch_state.whole_gradients()):
            self._share_buffers()
            self.gradient_state.note_reduced()  # by the backward itself: finalize_model_grads would add nothing
        super().check_may_step_directly(optimizer)

    def recover(self) -> None:
        has_begun = self._has_allocated and current_backward() == NO_BACKWARD
        if has_begun and self.torch_state.has_failed_in_backward():
            self.torch_state.reset_iteration()
            self.gradient_state.note_broken()

    def _set_gradient_sync(self, enabled: bool) -> None:
        super()._set_gradient_sync(enabled)
        if self._sums is not None:
            self._sums.expect_sync(enabled)
        if not (self.plan.is_reproducible or self.plan.reduces_every_micro_batch):
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

    def _finish_grad_sync(self) -> None:
        self.torch_state.reduce_unsharded_gradients()
        self.settle_parameters()
        self._shows_gradients = True
        for _, parameter in managed_parameters(self.module):  # of a unit that no forward has reached
            if parameter.requires_grad and local_gradient(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.plan.groups.replicated is not None and not self.gradient_state.is_reduced:
            self._reduce_replicated()
        named_gradients = ((name, local_gradient(p)) for name, p in managed_parameters(unwrap_model(self)))
        gradients = ((name, gradient) for name, gradient in named_gradients if gradient is not None)
        self._gradient_checks.check(gradients, self._step, are_reduced=True)

    def _zero_gradients(self) -> None:
        self.recover()
        if self._sums is not None:
            self._sums.clear()
        self.torch_state.drop_unsharded_gradients()
        self.note_step()
        for _, parameter in managed_parameters(self.module):
            parameter.grad = None

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
        self._shows_gradients = False
        self.settle_parameters()
        self._order.end_step()

    def settle_parameters(self) -> None:
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

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Does nothing: tensors were loaded in place by the checkpoint loader, as with Megatron-LM's wrapper.

        Args:
            state_dict: the module's own tensors. Anything else is not loaded either, which a warning says:
                `core.dist_checkpointing.load_model_state_dict` loads whole and sharded tensors.
            strict, assign: not read.

        Returns:
            torch's named tuple ``(missing_keys, unexpected_keys)``, both empty.
        """
        own = {0} | {_storage_of(tensor) for tensor in self.module.state_dict().values()} - {None}
        values = state_dict.items() if isinstance(state_dict, Mapping) else ()
        tensors = ((name, value) for name, value in values if isinstance(value, torch.Tensor))
        if foreign := [name for name, tensor in tensors if _storage_of(tensor) not in own]:
            warnings.warn(
                "TorchFullyShardedDataParallel.load_state_dict loads nothing: it expects the module's own tensors, "
                f"filled in place by a checkpoint loader, and was given others, such as {foreign[0]}; load whole or "
                "sharded tensors with core.dist_checkpointing.load_model_state_dict(module, state_dict)",
                stacklevel=2,
            )
        return _IncompatibleKeys([], [])

    def share_memory(self) -> NoReturn:
        """Refuses what would end the process: torch's FSDP2 keeps the old memory of parameters.

        Raises:
            ShardstackError: always.
        """
        raise ShardstackError(
            "share_memory() of a model that FSDP2 has sharded; share the plain model, and then wrap it"
        )

    def held_tensors(self) -> dict[Held, list[torch.Tensor]]:
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

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with parameter_attributes_kept(self.module):
            return super()._apply(fn, recurse)


def _storage_of(value: Any) -> int | None:
    """Returns the address of a tensor's memory, or of its local shard's, 0 without elements. None without memory."""
    try:
        return local_part(value.detach()).untyped_storage().data_ptr()
    except (AttributeError, NotImplementedError, RuntimeError):  # no tensor, a sparse one, or one that has parts
        return None
