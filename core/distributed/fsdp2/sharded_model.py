"""A model on FSDP2: what `TorchFullyShardedDataParallel` does to its module, and doors to the model that they keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from ... import device
from ..._torch_compat import current_backward
from ...diagnostics.plain_state_dicts import reject_plain_state_dicts
from ...dtypes import as_dtype
from ...tensor_parallel import VocabParallelEmbedding
from ...warn import warn_once
from ..model.initial_values import InitialValues
from ..model.same_model import reject_different_models
from ..model.unit_transforms import prepare_units
from ..model.units import UnitChoice, plan_units
from ..resharding import parse_overrides
from ..torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig
from .forward_methods import register_forward_methods
from .gathered_values import GatheredValues
from .micro_batches import KeptBetweenMicroBatches
from .precision import cast_buffers, mixed_precision_policy
from .prefetch import Prefetcher
from .recorded_collectives import record_fsdp_collectives
from .shard_model import fsdp_modules, shard_model
from .torch_private import (
    allocate_gathered_parameters,
    complete_accumulated_gradients,
    drop_pending_gathers,
    forget_forward_order,
    free_partial_shards,
    has_failed_in_backward,
    is_in_forward,
    mark_gathered_parameters,
    reset_iteration,
    take_root,
)


class ShardedModel:
    """Compares the ranks' models, shards this one in place, fills it, and keeps what acts on all of it.

    Args:
        module: the model, on any device; its parameters may be DTensors of tensor parallelism already.
        mesh: ``(shard,)``, or ``(replicate, shard)`` for hybrid sharding.
        group: all ranks of the mesh.
        unit_classes: as `plan_units` takes them.
        settings: all of FSDP2's.
        caller: what the user called, for messages.
        config: the model's config, any object; absent fields take their defaults.
        mp_policy: torch's own, in place of the dtypes of `settings` and `config`.

    Attributes:
        units: as they became.
        fsdp_modules: every module that FSDP2 acts on, the root first.
        kept: what stays gathered from one micro-batch of a step to the next.

    Raises:
        ParallelConfigError: a setting that this model or mesh cannot have.
        WrapError: a model that is sharded already, that cannot be, or that other ranks do not have alike.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        unit_classes: Iterable[UnitChoice],
        settings: TorchFullyShardedDataParallelConfig,
        *,
        caller: str,
        config: Any = None,
        mp_policy: MixedPrecisionPolicy | None = None,
    ) -> None:
        planned = plan_units(module, unit_classes)
        reject_different_models(
            module,
            group,
            wrapper=caller,
            config=config,
            ddp_config=settings,
            units=[unit.names for unit in planned],
            settings={} if mp_policy is None else {f.name: getattr(mp_policy, f.name) for f in fields(mp_policy)},
        )
        start = InitialValues(module, group, from_first_rank=settings.sync_module_states)
        start.equalize()
        prepare_units(
            planned,
            activation_checkpointing=settings.activation_checkpointing,
            every_nth=settings.activation_checkpointing_interval,
            compile_units=settings.compile_units,
        )
        keeps_all = settings.keep_gathered_between_micro_batches == "all"
        self.module = module
        self.units = shard_model(
            module,
            mesh,
            planned,
            reshard_after_forward=False if keeps_all else settings.reshard_after_forward,
            reshard_overrides=parse_overrides(settings.reshard_overrides),
            gathers_ahead=settings.forward_prefetch + settings.backward_prefetch > 0,
            collectives=settings.collectives,
            mp_policy=mp_policy or mixed_precision_policy(module.parameters(), _compute_dtype(config), settings),
            offload_policy=_offload_policy(settings),
            averages_gradients=not getattr(config, "calculate_per_token_loss", False),
        )
        self.fsdp_modules = fsdp_modules(module)
        self._prefetcher = Prefetcher(
            module,
            [unit.modules[0] for unit in self.units],
            [unit.modules[0] for unit in self.units if unit.is_needed_in_backward],
            settings.forward_prefetch,
            settings.backward_prefetch,
        )
        self.kept = KeptBetweenMicroBatches(module, self.units, _kept_between_micro_batches(settings))
        self._reduces_every_micro_batch = settings.reduce_every_micro_batch
        for submodule in module.modules():
            if isinstance(submodule, VocabParallelEmbedding):
                submodule.adds_gradient_rows = getattr(config, "gradient_accumulation_fusion", True)
        register_forward_methods(
            module, self.units, settings.forward_methods, prepare=self.prepare_forward, free=self.reshard
        )
        start.fill("cpu" if settings.cpu_offload else None)
        self._has_allocated = False  # set by the first forward, which makes the tensors that units are gathered into
        self._has_failed = False  # a backward raised, set when that is seen, cleared when `recover` says so
        self._values = GatheredValues(module)
        for submodule in [*(member for unit in self.units for member in unit.modules), module]:
            submodule.register_forward_pre_hook(self._before_forward, prepend=True)
        if (buffer_dtype := as_dtype(settings.buffer_dtype)) is not None:
            cast_buffers(module, buffer_dtype)
        reject_plain_state_dicts(module)
        record_fsdp_collectives(module)

    def reshard(self) -> None:
        """Frees what stays gathered for a backward that has not come, as after an evaluation; not to be called inside
        a forward or backward.

        Else the next forward would compute with parameters from before the optimizer's step, and the module would
        show gathered parameters in place of the sharded ones, which hold the gradients.

        Raises:
            UnitError: a parameter was written while it was gathered.
        """
        if self._has_allocated and is_in_forward(self.module):  # which has raised
            reset_iteration(self.module)
        drop_pending_gathers(self.module)
        for module in self.fsdp_modules:
            module.reshard()
        free_partial_shards(self.module)
        forget_forward_order(self.module)
        self._prefetcher.end_order()
        mark_gathered_parameters(self.module)
        self._values.check_unwritten()

    def recover(self) -> bool:
        """Ends what a backward that raised has left begun; says whether there was one since the last call."""
        self._end_failed_backward()
        has_failed, self._has_failed = self._has_failed, False
        return has_failed

    def _end_failed_backward(self) -> None:
        if self._has_allocated and current_backward() == -1 and has_failed_in_backward(self.module):
            reset_iteration(self.module)
            self._has_failed = True

    def prepare_forward(self) -> None:
        """Makes sure that a forward, of the model or of one of its units by itself, computes with the shards' values.

        Every rank calls it. Inside a forward that is running, and in what a backward recomputes, it does nothing.
        """
        if current_backward() != -1 or (self._has_allocated and is_in_forward(self.module)):
            return
        take_root(self.module)  # else the first module to run would be what FSDP2 calls the root, for good
        self._end_failed_backward()
        if not self._has_allocated:
            self._has_allocated = True
            if torch.is_inference_mode_enabled():
                allocate_gathered_parameters(self.module)
        if self._values.are_stale():
            self.reshard()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if module is self.module and current_backward() == -1 and self._has_allocated and is_in_forward(module):
            reset_iteration(module)  # the last forward raised
        self.prepare_forward()

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the backwards that follow reduce gradients, or let them add up on each rank."""
        if enabled:
            complete_accumulated_gradients(self.module)
        if not self._reduces_every_micro_batch:
            for module in self.fsdp_modules:
                module.set_requires_gradient_sync(enabled, recurse=False)
        self.kept.expect(another_micro_batch=not enabled)

    def let_be_called_directly(self) -> None:
        """Lets the model be called, accumulate and generate text without a wrapper around it.

        Its own forward frees, where no backward follows, what stays gathered for one, as the wrapper's does. Its
        ``set_requires_gradient_sync``, of a `FSDPModule`, acts as `no_sync` does unless one module alone is meant. By
        the mark that it gets, Hugging Face's ``generate`` lets ranks whose text has ended go on until all have.
        """
        self.module.register_forward_hook(self._free_without_backward)
        self.module.set_requires_gradient_sync = self._set_requires_gradient_sync  # type: ignore[assignment]
        self.module._is_fsdp_managed_module = True  # type: ignore[assignment]

    def _free_without_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self.reshard()

    def _set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        if recurse:
            self.set_gradient_sync(requires_gradient_sync)
        else:
            FSDPModule.set_requires_gradient_sync(self.fsdp_modules[0], requires_gradient_sync, recurse=False)


def _compute_dtype(config: Any) -> torch.dtype:
    if getattr(config, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(config, "fp16", False) else torch.float32


def _kept_between_micro_batches(settings: TorchFullyShardedDataParallelConfig) -> str:
    asked = settings.keep_gathered_between_micro_batches
    return "none" if asked == "ends" and settings.reduce_every_micro_batch else asked


def _offload_policy(settings: TorchFullyShardedDataParallelConfig) -> OffloadPolicy | None:
    if not settings.cpu_offload:
        return None
    has_accelerator = device.device_type() != "cpu"
    if settings.pin_memory and not has_accelerator:
        warn_once(
            "pin_memory is set, but there is no accelerator that memory could be pinned for; shards lie in ordinary "
            "memory. No number changes"
        )
    return CPUOffloadPolicy(pin_memory=settings.pin_memory and has_accelerator)
