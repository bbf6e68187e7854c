"""Fully sharded data parallelism on PyTorch FSDP2, as a drop-in for `DistributedDataParallel`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from .. import device, parallel_state
from ..errors import ParallelConfigError
from ..models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from ..models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from ..tensor_parallel import VocabParallelEmbedding
from ..tensor_parallel.layers import ColumnParallelLinear
from ..transformer.transformer_layer import TransformerLayer
from .between_micro_batches import KeptBetweenMicroBatches
from .broadcast import broadcast_tensors
from .composition import prepare_units
from .data_parallel_base import _BaseDataParallel, local_gradient
from .describe import ModelFacts, sharded_facts
from .distributed_data_parallel_config import DistributedDataParallelConfig
from .explain.plain_state_dicts import reject_plain_state_dicts
from .explain.recorded_fsdp_collectives import record_fsdp_collectives
from .forward_methods import register_forward_methods
from .fsdp_state import (
    complete_accumulated_gradients,
    drop_pending_gathers,
    drop_unsharded_gradients,
    free_partial_shards,
    gathered_parameters,
    gathered_tensors,
    gradient_tensors,
    reduce_unsharded_gradients,
    shard_tensors,
    whole_gradients,
)
from .initial_values import InitialValues
from .instance_groups import Ranks, check_instances_of_mesh
from .mesh_axes import whole_group
from .precision import as_dtype, cast_buffers, mixed_precision_policy
from .resharding import Reshard, parse_overrides
from .sharding import fsdp_modules, shard_model
from .torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig
from .units import UnitChoice, parameter_attributes_kept, plan_units

DEFAULT_UNIT_CLASSES: tuple[type[nn.Module], ...] = (
    TransformerLayer,
    LanguageModelEmbedding,
    RotaryEmbedding,
    ColumnParallelLinear,
)
"""What Megatron-LM's FSDP2 wrapper wraps; only outermost matches count, so that a layer's own linears stay in it."""


class TorchFullyShardedDataParallel(_BaseDataParallel):
    """Parameters, gradients and optimizer state sharded over the group (ZeRO-3), by PyTorch's `fully_shard`.

    Parameters become DTensors on dim 0 and keep Megatron's attributes; ``param.grad`` is sharded alike. With fp32
    parameters and ``config.bf16`` or ``fp16`` the fp32 shard is the master copy: it is cast for the all-gather, and
    gradients are reduced in that dtype, or in fp32 with ``ddp_config.grad_reduce_in_fp32``. Parameters that arrive in
    low precision stay so, and FSDP2 rounds their gradients to it, whatever they were reduced in.

    A parameter that no backward reached has a zero gradient, as under `DistributedDataParallel`.

    Args:
        config: the model's config; ``bf16``, ``fp16`` and ``calculate_per_token_loss`` are read where present.
        ddp_config: the wrapper's settings, of either type; a plain one takes FSDP2's defaults.
        module: the model; with ``sync_module_states`` the group's first rank decides what all start from. Built on
            the meta device it is sharded first and then filled shard by shard: drawn by name, or, where the first
            rank alone has values, received from it. Its forward must run the same units on every rank.
        sub_modules_to_wrap: classes whose outermost instances become units; `DEFAULT_UNIT_CLASSES` by default. In
            place of an `nn.ModuleList` or `nn.ModuleDict` its items do.
        disable_bucketing: as in Megatron-LM's signature. Here a unit is the bucket, so that it changes nothing.
        process_group: the ranks to shard over, or a mesh of them, (replicate, shard) for hybrid sharding. Given,
            `core.parallel_state` is not touched; by default it is the data-parallel group with context parallelism,
            two-dimensional with several optimizer instances.

    Raises:
        ParallelConfigError: a field that FSDP2 cannot honour.
        WrapError: a model that is sharded already or cannot be.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        sub_modules_to_wrap: Iterable[UnitChoice] | None = None,
        disable_bucketing: bool = False,
        process_group: Ranks | None = None,
    ) -> None:
        settings = _fsdp2_settings(ddp_config)
        mesh, process_group = _mesh_and_group(ddp_config.num_distributed_optimizer_instances, process_group)
        super().__init__(config, module, ddp_config, process_group)
        units = plan_units(module, DEFAULT_UNIT_CLASSES if sub_modules_to_wrap is None else sub_modules_to_wrap)
        self._reject_different_models(units)
        start = InitialValues(module, process_group, from_first_rank=settings.sync_module_states)
        start.equalize()
        prepare_units(
            units,
            activation_checkpointing=settings.activation_checkpointing,
            every_nth=settings.activation_checkpointing_interval,
            compile_units=settings.compile_units,
        )
        self._mesh, self._settings = mesh, settings
        self.units = shard_model(
            module,
            mesh,
            units,
            reshard_after_forward=_reshard_after_forward(settings),
            reshard_overrides=parse_overrides(settings.reshard_overrides),
            forward_prefetch=settings.forward_prefetch,
            backward_prefetch=settings.backward_prefetch,
            collectives=settings.collectives,
            mp_policy=mixed_precision_policy(module.parameters(), _compute_dtype(config), settings),
            offload_policy=_offload_policy(settings),
            averages_gradients=not self.sums_gradients,
        )
        self._fsdp_modules = fsdp_modules(module)
        self._kept = KeptBetweenMicroBatches(module, self.units, _kept_between_micro_batches(settings))
        for submodule in module.modules():
            if isinstance(submodule, VocabParallelEmbedding):
                submodule.adds_gradient_rows = getattr(config, "gradient_accumulation_fusion", True)
        register_forward_methods(module, self.units, settings.forward_methods, free=self._reshard)
        start.fill("cpu" if settings.cpu_offload else None)
        if (buffer_dtype := as_dtype(settings.buffer_dtype)) is not None:
            cast_buffers(module, buffer_dtype)
        reject_plain_state_dicts(module)
        record_fsdp_collectives(module)
        self._warned_about_load = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        output = super().forward(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            self._reshard()
        return output

    def _reshard(self) -> None:
        """Frees what stays gathered for a backward that has not come, as after an evaluation.

        Else the next forward would compute with parameters from before the optimizer's step, and the module would
        show gathered parameters in place of the sharded ones, which hold the gradients.
        """
        drop_pending_gathers(self.module)
        for module in self._fsdp_modules:
            module.reshard()
        free_partial_shards(self.module)

    def _set_gradient_sync(self, enabled: bool) -> None:
        super()._set_gradient_sync(enabled)
        if enabled:
            complete_accumulated_gradients(self.module)
        for module in self._fsdp_modules:
            if not self._settings.reduce_every_micro_batch:
                module.set_requires_gradient_sync(enabled, recurse=False)
        self._kept.expect(another_micro_batch=not enabled)

    def _finish_grad_sync(self, force_all_reduce: bool) -> None:
        if force_all_reduce:
            raise ParallelConfigError("force_all_reduce asks for whole gradients, which FSDP2 never holds; drop it")
        reduce_unsharded_gradients(self.module)
        self._reshard()
        for parameter in self.module.parameters():  # of a unit that no forward has reached
            if parameter.requires_grad and local_gradient(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
        self._gradient_checks.check(self._gradients(), self._step, are_reduced=True)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        self._reshard()
        gradients = [g for p in self.module.parameters() if (g := local_gradient(p)) is not None]
        if gradients and isinstance(scaling_factor, torch.Tensor):
            scaling_factor = scaling_factor.to(gradients[0].device)  # offloaded shards lie elsewhere
        if gradients:
            torch._foreach_mul_(gradients, scaling_factor)

    def zero_grad_buffer(self) -> None:
        drop_unsharded_gradients(self.module)
        self._reshard()
        for parameter in self.module.parameters():
            parameter.grad = None

    def broadcast_params(self) -> None:
        """Sends rank 0's buffers to all, and each shard to its replicas across optimizer instances.

        Within an instance a shard exists once and has nobody to agree with: replicas that started different were made
        equal before they were cut (``sync_module_states``).
        """
        self._reshard()
        broadcast_tensors(self.module.buffers(), self.process_group)
        if self._mesh.ndim == 2:
            broadcast_tensors(self.module.parameters(), self._mesh.get_group(0))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Does nothing: a checkpoint loader has already written into the sharded parameters in place.

        Warns once when the given tensors are not the module's own storage, because then nothing has been loaded.
        """
        own = {_storage_of(tensor) for tensor in self.module.state_dict().values()}
        given = {_storage_of(tensor) for tensor in state_dict.values() if isinstance(tensor, torch.Tensor)}
        if not self._warned_about_load and not (given and given <= own):
            self._warned_about_load = True
            warnings.warn(
                "TorchFullyShardedDataParallel.load_state_dict loads nothing: it expects the module's own tensors, "
                "already filled in place, and got others; load full or sharded state dicts with "
                "core.dist_checkpointing.load_model_state_dict(module, state_dict)",
                stacklevel=2,
            )
        return _IncompatibleKeys([], [])

    def _facts(self, num_microbatches: int) -> ModelFacts:
        return sharded_facts(self, num_microbatches, self._kept.modules)

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        return {
            "parameters": [*shard_tensors(self.module), *self.module.buffers()],
            "gathered parameters": list(gathered_tensors(self.module)),
            "gradients": list(gradient_tensors(self.module)),
            "gradients not reduced yet": list(whole_gradients(self.module)),
        }

    def gradient_receivers(self) -> list[nn.Parameter]:
        return list(gathered_parameters(self.module))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with parameter_attributes_kept(self.module):
            return super()._apply(fn, recurse)


def _mesh_and_group(num_instances: int, process_group: Ranks | None) -> tuple[DeviceMesh, dist.ProcessGroup]:
    if isinstance(process_group, DeviceMesh):
        check_instances_of_mesh(num_instances, process_group)
        return process_group, whole_group(process_group)
    if process_group is not None:
        if num_instances > 1:
            raise ParallelConfigError(
                f"num_distributed_optimizer_instances is {num_instances} with a process_group given, which has one "
                "axis; drop one of the two"
            )
        return DeviceMesh.from_group(process_group, device.device_type(), mesh_dim_names=("dp_cp",)), process_group
    mesh = parallel_state.get_data_parallel_mesh()
    found = mesh.size(0) if mesh.ndim == 2 else 1
    if num_instances != found:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances is {num_instances}, but core.parallel_state was initialised with "
            f"{found}; give both the same number"
        )
    return mesh, parallel_state.get_data_parallel_group(with_context_parallel=True)


def _storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (local.untyped_storage().data_ptr(), int(local.storage_offset()))


def _fsdp2_settings(ddp_config: DistributedDataParallelConfig) -> TorchFullyShardedDataParallelConfig:
    """FSDP2's own settings, or their defaults; raises or warns on what FSDP2 has no counterpart for."""
    if ddp_config.sharding_strategy in ("optim", "optim_grads"):
        raise ParallelConfigError(
            f"TorchFullyShardedDataParallel shards parameters too, but the sharding strategy is "
            f"{ddp_config.sharding_strategy!r}; leave it at its default or set 'optim_grads_params'"
        )
    if ddp_config.reduce_scatter_with_fp32_accumulation:
        raise ParallelConfigError(
            "reduce_scatter_with_fp32_accumulation adds fp16 and bf16 gradients in fp32 while it sends them as they "
            "are, which FSDP2 cannot; drop it, or set grad_reduce_in_fp32, which sends them in fp32"
        )
    without_effect = [field for field in _BUFFER_FIELDS if getattr(ddp_config, field)]
    if without_effect:
        _warn_once(
            f"{', '.join(without_effect)}: only wrappers with gradient buffers have these settings; FSDP2 reduces "
            "unit by unit and overlaps by itself. No number changes"
        )
    if isinstance(ddp_config, TorchFullyShardedDataParallelConfig):
        return ddp_config
    own = ("data_parallel_sharding_strategy", "use_distributed_optimizer")
    shared = {f.name: getattr(ddp_config, f.name) for f in fields(DistributedDataParallelConfig) if f.name not in own}
    return TorchFullyShardedDataParallelConfig(**shared)


_BUFFER_FIELDS = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "bucket_size",
    "num_buckets",
    "pad_buckets_for_high_nccl_busbw",
    "average_in_collective",
)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _compute_dtype(config: Any) -> torch.dtype:
    if getattr(config, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(config, "fp16", False) else torch.float32


def _reshard_after_forward(settings: TorchFullyShardedDataParallelConfig) -> Reshard:
    return False if settings.keep_gathered_between_micro_batches == "all" else settings.reshard_after_forward


def _kept_between_micro_batches(settings: TorchFullyShardedDataParallelConfig) -> str:
    asked = settings.keep_gathered_between_micro_batches
    return "none" if asked == "ends" and settings.reduce_every_micro_batch else asked


def _offload_policy(settings: TorchFullyShardedDataParallelConfig) -> OffloadPolicy | None:
    if not settings.cpu_offload:
        return None
    has_accelerator = device.device_type() != "cpu"
    if settings.pin_memory and not has_accelerator:
        _warn_once(
            "pin_memory is set, but there is no accelerator that memory could be pinned for; shards lie in ordinary "
            "memory. No number changes"
        )
    return CPUOffloadPolicy(pin_memory=settings.pin_memory and has_accelerator)
