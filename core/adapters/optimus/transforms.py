"""Transforms that make a model data parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from ..._torch_compat import fsdp_param_groups
from ...distributed import TorchFullyShardedDataParallelConfig
from ...distributed.fully_sharded_data_parallel_config import Reshard
from ...distributed.groups import whole_group
from ...distributed.plan.units import UnitChoice
from ...errors import ParallelConfigError, warn_once
from ..bridge.wrapping import Replicas, ShardedInPlace
from ..nemo.fsdp2 import ITEMS_OF_CONTAINERS
from .collective import Collective
from .config import DDPTransformConfig, FullyShardTransformConfig, dtype_of

_ALWAYS = {
    "find_unused_parameters": "parameters that no backward reaches have zero gradients",
    "gradient_as_bucket_view": "gradients are views of the buffers",
    "static_graph": "the graph may change from step to step, at no cost",
}


class BaseDistributedTransform:
    """Base of the transforms.

    Args:
        cfg: the transform's settings.
        collective: the ranks.
        device: the device to move the model to.
    """

    def __init__(self, cfg: Any, collective: Collective, device: torch.device, **kwargs: Any) -> None:
        self.cfg = cfg
        self.collective = collective
        self.device = torch.device(device)

    def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Returns the transformed model."""
        raise NotImplementedError(f"{type(self).__name__} has no apply(model)")

    def _moved(self, model: nn.Module) -> nn.Module:
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        return model if on_meta else model.to(self.device)  # what is on meta goes there when it is drawn

    def _data_mesh(self) -> DeviceMesh:
        mesh = getattr(self.collective, "dp_mesh", None)
        if not isinstance(mesh, DeviceMesh):
            raise ParallelConfigError(
                f"{type(self).__name__} was given a {type(self.collective).__name__} of {self.collective.world_size} "
                "ranks; it takes a MeshCollective, whose dp_mesh it shards over"
            )
        return mesh


class DDPWrappedModel(Replicas):
    """A model replicated over a group; gradients are in ``param.grad`` after backward."""

    def accumulation_context(self, is_last_microbatch: bool) -> AbstractContextManager[None]:
        """Encloses forward and backward of a micro-batch; only the last one of a step communicates."""
        return nullcontext() if is_last_microbatch else self.no_sync()

    def make_parameter_groups(self) -> Any:
        """Returns the model's own, or all of its parameters by name."""
        own = getattr(self.module, "make_parameter_groups", None)
        return own() if callable(own) else {"params": self.module.named_parameters()}

    def fully_shard(self, **fsdp_kwargs: Any) -> Any:
        """Returns the model's own way to shard itself.

        Raises:
            ParallelConfigError: it has none.
        """
        own = getattr(self.module, "fully_shard", None)
        if not callable(own):
            raise ParallelConfigError(
                f"{type(self.module).__name__} has no fully_shard(**kwargs) of its own; use FullyShardTransform"
            )
        return own(**fsdp_kwargs)


class DDPTransform(BaseDistributedTransform):
    """Replicates the model over the data-parallel ranks; leaves the model unchanged on a single rank."""

    cfg: DDPTransformConfig

    def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Returns the model in a `DDPWrappedModel`, or on one rank itself, with an ``accumulation_context``."""
        default = DDPTransformConfig()
        for name, fact in _ALWAYS.items():
            if getattr(self.cfg, name) != getattr(default, name):
                warn_once(f"{name}={getattr(self.cfg, name)} changes nothing: {fact} in any case. No number changes")
        model = self._moved(model)
        if self.collective.world_size <= 1:
            return _with_accumulation_context(model, lambda is_last_microbatch: nullcontext())
        mesh, tensor_mesh = self._data_mesh(), getattr(self.collective, "tp_mesh", None)
        if tensor_mesh is not None and tensor_mesh.size() > 1:
            raise ParallelConfigError(
                f"DDPTransform was given a collective with {tensor_mesh.size()} tensor-parallel ranks, and flat "
                "buffers take no DTensors; use FullyShardTransform"
            )
        return DDPWrappedModel(model, whole_group(mesh))


class FullyShardTransform(BaseDistributedTransform):
    """Shards the model in place over the data-parallel ranks; leaves the model unchanged on a single rank.

    If the model has a method ``fully_shard(**kwargs)``, units and their resharding are those that the method chooses;
    else units are the items of the model's lists. The method runs on a copy of the model without values, to find the
    units, which this library then shards.
    """

    cfg: FullyShardTransformConfig

    def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Returns the same model, sharded, with an ``accumulation_context``."""
        model = self._moved(model)
        if self.collective.world_size <= 1:
            return _with_accumulation_context(model, lambda is_last_microbatch: nullcontext())
        mesh = self._data_mesh()
        if mesh.ndim == 2 and (mesh.size(0) == 1 or not self.cfg.use_hybrid_sharding):
            mesh = mesh._flatten()
        mp_policy, offload_policy = self._mp_policy(), self._offload_policy()
        units: list[UnitChoice] = list(ITEMS_OF_CONTAINERS)
        chosen: dict[str, Reshard] = {}
        if callable(getattr(model, "fully_shard", None)):
            fsdp_kwargs: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self.cfg.reshard_after_forward}
            if self.cfg.mixed_precision is not None:
                fsdp_kwargs["mp_policy"] = mp_policy
            if offload_policy is not None:
                fsdp_kwargs["offload_policy"] = offload_policy
            chosen = _units_by_own_hook(model, fsdp_kwargs)
            units = [model.get_submodule(name) for name in chosen]
        settings = TorchFullyShardedDataParallelConfig(
            reshard_after_forward=self.cfg.reshard_after_forward,
            reshard_overrides=tuple(f"{name}={value}" for name, value in chosen.items()),
            reduce_every_micro_batch=self.cfg.sync_grad_accum,
            cpu_offload=offload_policy is not None,
            pin_memory=offload_policy is not None and offload_policy.pin_memory,
        )
        wrapper = ShardedInPlace(None, settings, model, units, process_group=mesh, mp_policy=mp_policy)
        wrapper.let_module_be_called()

        def accumulation_context(is_last_microbatch: bool) -> AbstractContextManager[None]:
            return nullcontext() if is_last_microbatch else wrapper.no_sync()

        return _with_accumulation_context(model, accumulation_context)

    def _mp_policy(self) -> MixedPrecisionPolicy:
        config = self.cfg.mixed_precision
        if config is None:
            return MixedPrecisionPolicy()
        param, reduce, output = (dtype_of(d) for d in (config.param_dtype, config.reduce_dtype, config.output_dtype))
        return MixedPrecisionPolicy(param, reduce, output, cast_forward_inputs=config.cast_forward_inputs)

    def _offload_policy(self) -> CPUOffloadPolicy | None:
        config = self.cfg.offload
        if config is None or not config.cpu_offload:
            return None
        return CPUOffloadPolicy(pin_memory=config.pin_memory)


def _with_accumulation_context(model: nn.Module, context: Callable[[bool], AbstractContextManager[None]]) -> nn.Module:
    # Set once on the user's model, never removed: Optimus's loop reads it there, for every micro-batch.
    model.accumulation_context = context  # type: ignore[assignment]
    return model


def _units_by_own_hook(model: nn.Module, fsdp_kwargs: dict[str, Any]) -> dict[str, Reshard]:
    """Returns the units that ``model.fully_shard(**kwargs)`` makes below the root, with their resharding, by name."""
    tensors = [*model.parameters(), *model.buffers()]
    without_values: dict[int, Any] = {id(tensor): _on_meta(tensor) for tensor in tensors}
    shadow: Any = copy.deepcopy(model, without_values)
    shadow.fully_shard(**fsdp_kwargs)
    found: dict[str, Reshard] = {}
    for name, module in shadow.named_modules():
        if name and isinstance(module, FSDPModule):
            found[name] = _reshards(module, fsdp_kwargs["mesh"])
    return found


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().to("meta")
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _reshards(module: FSDPModule, mesh: DeviceMesh) -> Reshard:
    for group in fsdp_param_groups(module._get_fsdp_state()):
        if group.post_forward_mesh_info is None:
            return False
        size: int = group.post_forward_mesh_info.shard_mesh_size
        return True if size == mesh.get_group(-1).size() else size
    return True
