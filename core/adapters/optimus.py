"""Optimus-dl's transforms, which make a model data parallel: their settings become replicas or FSDP2's settings.

A transform works over the ranks of a `MeshCollective`.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ..base import device
from ..base._torch_compat import fsdp_param_groups
from ..base.dtypes import as_dtype
from ..base.errors import ParallelConfigError, warn_once
from ..distributed.fully_sharded_data_parallel_config import FSDP2, Reshard, config_of
from ..distributed.plan.units import CONTAINERS, UnitChoice
from ..rendezvous import default_group
from ..rendezvous.environment import environment_int
from .bridge.translation import Replicas, check_settings, wrap_for_trainer

_AXES = ("dp_replicate", "dp_shard", "tp")


@dataclass
class DDPTransformConfig:
    """Settings of torch's DDP. They are accepted and ignored, because buffers always behave as each field says."""

    find_unused_parameters: bool = False
    """A parameter that no backward reaches has a zero gradient here in any case."""

    gradient_as_bucket_view: bool = True
    """Gradients are views of the buffers here in any case."""

    static_graph: bool = False
    """The graph may change from step to step here in any case."""


@dataclass
class MixedPrecisionConfig:
    """Dtypes by name, as ``bfloat16``, ``bf16``, ``fp16``, ``float32`` or ``double``. None changes nothing.

    Raises:
        ParallelConfigError: an unknown name.
    """

    param_dtype: str | None = None
    """Dtype of computation and of all-gathers."""

    reduce_dtype: str | None = None
    """Dtype of gradient reduction."""

    output_dtype: str | None = None
    """Dtype of the model's outputs."""

    cast_forward_inputs: bool = True
    """Cast inputs of the model and of each unit to `param_dtype`."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            as_dtype(getattr(self, name), name)


@dataclass
class OffloadConfig:
    """Settings of the memory that holds shards."""

    cpu_offload: bool = False
    """Keep shards in the host's memory."""

    pin_memory: bool = True
    """Read alone to warn if it is False: memory is pinned where there is an accelerator. No number changes."""


@dataclass
class FullyShardTransformConfig:
    """Settings of sharding, and of when units are gathered."""

    reshard_after_forward: bool | int = False
    """Free gathered parameters between forward and backward. A number keeps them whole among so many ranks."""

    mixed_precision: MixedPrecisionConfig | None = None
    """None casts nothing."""

    offload: OffloadConfig | None = None
    """None keeps shards on the device."""

    use_hybrid_sharding: bool = True
    """Shard over the mesh's ``dp_shard`` and replicate over ``dp_replicate``, or else shard over all."""

    sync_grad_accum: bool = False
    """Reduce the gradient of every micro-batch, not of the last alone."""


class Collective:
    """One rank among several, or alone.

    Raises:
        ParallelConfigError: a rank that is not among them.
    """

    process_group: dist.ProcessGroup | None = None
    """The ranks. None for one alone."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size:
            raise ParallelConfigError(f"rank is {rank} of a world of {world_size}; it takes 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


class MeshCollective(Collective):
    """All ranks, as a mesh ``(dp_replicate, dp_shard, tp)``. Missing arguments are read from the launcher's variables.

    Args:
        rank: this process's rank.
        world_size: number of ranks.
        local_world_size: number of ranks on a machine.
        local_rank: this process's rank on its machine.
        device_type: device type of the mesh.
        tp_size: number of ranks that share each layer.
        sharding_world_size: number of ranks that share a parameter; by default the data-parallel ranks of a machine.

    Attributes:
        dp_mesh, tp_mesh: the meshes ``(dp_replicate, dp_shard)`` and ``(tp,)``.
        dp_world_size, dp_rank: the data-parallel ranks, and this rank's place among them; likewise with ``tp_``.
        local_rank: this process's rank on its machine.
        default_device: the device on which this process computes.

    Raises:
        ParallelConfigError: sizes that do not divide the ranks, or differ from what the process group has.
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
        local_rank: int | None = None,
        device_type: str | None = None,
        *,
        tp_size: int = 1,
        sharding_world_size: int | None = None,
    ) -> None:
        default_group.init_process_group()
        super().__init__(dist.get_rank(), dist.get_world_size())
        for name, value, actual in (("rank", rank, self.rank), ("world_size", world_size, self.world_size)):
            if value not in (None, actual):
                raise ParallelConfigError(f"{name} is {value}, but the process group has {actual}; leave it out")
        self.process_group = dist.group.WORLD
        self.default_device = device.current_device()
        local_size = local_world_size or environment_int("LOCAL_WORLD_SIZE", self.world_size, least=1)
        default_local_rank = environment_int("LOCAL_RANK", self.rank % local_size)
        self.local_rank = default_local_rank if local_rank is None else local_rank
        shard_size = sharding_world_size or max(1, local_size // tp_size)
        if self.world_size % (shard_size * tp_size):
            raise ParallelConfigError(
                f"sharding_world_size {shard_size} times tp_size {tp_size} does not divide the {self.world_size} ranks"
            )
        shape = (self.world_size // (shard_size * tp_size), shard_size, tp_size)
        mesh = init_device_mesh(device_type or device.device_type(), shape, mesh_dim_names=_AXES)
        self.dp_mesh, self.tp_mesh = mesh["dp_replicate", "dp_shard"], mesh["tp"]
        self.tp_world_size = tp_size
        self.dp_world_size = self.world_size // tp_size
        self.dp_rank, self.tp_rank = divmod(self.rank, tp_size)


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
        """Moves the model and makes it data parallel. On one rank it stays as it is, with an ``accumulation_context``.

        Raises:
            ParallelConfigError: several ranks without a mesh.
        """
        if not any(parameter.is_meta for parameter in model.parameters()):  # what is on meta moves when it is drawn
            model = model.to(self.device)
        if self.collective.world_size <= 1:
            vars(model)["accumulation_context"] = lambda is_last_microbatch: nullcontext()
            return model
        mesh = getattr(self.collective, "dp_mesh", None)
        if not isinstance(mesh, DeviceMesh):
            raise ParallelConfigError(
                f"{type(self).__name__} was given a {type(self.collective).__name__} of {self.collective.world_size} "
                "ranks; it takes a MeshCollective, whose dp_mesh it shards over"
            )
        return self._parallelize(model, mesh)

    def _parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} has no way to make a model data parallel")


class DDPWrappedModel(Replicas):
    """A model replicated over a group. Gradients are in ``param.grad`` after backward."""

    def accumulation_context(self, is_last_microbatch: bool) -> AbstractContextManager[None]:
        """Encloses forward and backward of a micro-batch. Only the last one of a step communicates."""
        return nullcontext() if is_last_microbatch else self.no_sync()

    def make_parameter_groups(self) -> Any:
        """Returns the model's own parameter groups, or all of its parameters by name."""
        own = getattr(self.module, "make_parameter_groups", None)
        return own() if callable(own) else {"params": self.module.named_parameters()}


class DDPTransform(BaseDistributedTransform):
    """Replicates the model over the data-parallel ranks, in a `DDPWrappedModel`."""

    cfg: DDPTransformConfig

    def _parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        check_settings(self.cfg, "optimus replicated")
        tensor_mesh = getattr(self.collective, "tp_mesh", None)
        if tensor_mesh is not None and tensor_mesh.size() > 1:
            raise ParallelConfigError(
                f"DDPTransform was given a collective with {tensor_mesh.size()} tensor-parallel ranks, and flat "
                "buffers take no DTensors; use FullyShardTransform"
            )
        return DDPWrappedModel(model, mesh)


class FullyShardTransform(BaseDistributedTransform):
    """Shards the model in place over the data-parallel ranks.

    If the model has a method ``fully_shard(**kwargs)``, units and their resharding are those that the method chooses;
    else units are the items of the model's lists. The method runs on a copy of the model without values, to find the
    units, which this library then shards.
    """

    cfg: FullyShardTransformConfig

    def _parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if mesh.ndim == 2 and (mesh.size(0) == 1 or not self.cfg.use_hybrid_sharding):
            mesh = mesh._flatten()
        precision = self.cfg.mixed_precision or MixedPrecisionConfig()
        param, reduce, out = map(as_dtype, (precision.param_dtype, precision.reduce_dtype, precision.output_dtype))
        mp_policy = MixedPrecisionPolicy(param, reduce, out, cast_forward_inputs=precision.cast_forward_inputs)
        units: list[UnitChoice] = list(CONTAINERS)
        reshards: dict[str, Reshard] = {}
        if callable(getattr(model, "fully_shard", None)):
            options = {"mesh": mesh, "reshard_after_forward": self.cfg.reshard_after_forward, "mp_policy": mp_policy}
            reshards = _units_by_own_hook(model, options)
            units = [model.get_submodule(name) for name in reshards]
        overrides = tuple(f"{name}={value}" for name, value in reshards.items())
        offload = self.cfg.offload or OffloadConfig()
        if not offload.pin_memory:
            warn_once("pin_memory=False changes nothing: shards are pinned where there is an accelerator")
        config = config_of(
            FSDP2,
            reshard_after_forward=self.cfg.reshard_after_forward,
            reshard_overrides=overrides,
            reduce_every_micro_batch=self.cfg.sync_grad_accum,
            cpu_offload=offload.cpu_offload,
        )
        wrapper = wrap_for_trainer(model, config, mesh, units, in_place=True, mp_policy=mp_policy)
        # Optimus's loop reads it there, for every micro-batch.
        vars(model)["accumulation_context"] = lambda is_last_microbatch: (
            nullcontext() if is_last_microbatch else wrapper.no_sync()
        )
        return model


def _units_by_own_hook(model: nn.Module, fsdp_kwargs: dict[str, Any]) -> dict[str, Reshard]:
    """Returns the units that ``model.fully_shard(**kwargs)`` makes below the root, with their resharding, by name."""
    tensors = [*model.parameters(), *model.buffers()]
    on_meta = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    on_meta |= {id(p): nn.Parameter(on_meta[id(p)], p.requires_grad) for p in model.parameters()}
    shadow: Any = copy.deepcopy(model, on_meta)
    shadow.fully_shard(**fsdp_kwargs)
    units = {name: module for name, module in shadow.named_modules() if name and isinstance(module, FSDPModule)}
    return {name: _reshards(module, fsdp_kwargs["mesh"]) for name, module in units.items()}


def _reshards(module: FSDPModule, mesh: DeviceMesh) -> Reshard:
    for group in fsdp_param_groups(module._get_fsdp_state()):
        if group.post_forward_mesh_info is None:
            return False
        size: int = group.post_forward_mesh_info.shard_mesh_size
        return True if size == mesh.get_group(-1).size() else size
    return True
