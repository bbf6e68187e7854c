"""`fsdp2_strategy_parallelize`: any model on PyTorch FSDP2, with tensor parallelism below it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ...distributed.distributed_data_parallel_config import ActivationCheckpointing
from ...distributed.fully_sharded_data_parallel_config import Reshard
from ...distributed.model.rewrapping import reject_wrapped
from ...distributed.torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig
from ..bridge.meshes import mesh_axes
from ..bridge.wrapping import ShardedInPlace
from .tensor_parallel_plan import Plan, cut_as_planned

ITEMS_OF_CONTAINERS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict)
"""As classes of units they make every item of such a container a unit; `find_units` looks into nested ones."""


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    tp_shard_plan: Plan | None = None,
    offload_policy: OffloadPolicy | None = None,
    *,
    activation_checkpointing: bool | ActivationCheckpointing = False,
    reshard_after_forward: Reshard = True,
    sync_module_states: bool = True,
) -> nn.Module:
    """Makes a model tensor parallel, then recomputing where asked, then sharded, in place (NeMo Automodel's function).

    Every item of every outermost `nn.ModuleList` or `nn.ModuleDict` is a unit, nested containers looked into, the
    last not freed between forward and backward; the rest, embeddings and head among it, is the root's. Parameters on
    the meta device are drawn after sharding.

    Args:
        model: any module; one of Hugging Face's needs nothing else.
        device_mesh: its axes are found by name: ``data_parallel``, ``context_parallel``, ``tensor_parallel``, or
            ``dp_replicate``, ``dp_shard``, ``dp_shard_cp``, ``dp_cp``, ``cp``, ``tp``. Two data-parallel ones are a
            hybrid: sharded within, replicated across.
        mp_policy: as torch's; by default parameters are gathered in bf16 and gradients reduced in fp32.
        tp_shard_plan: module name patterns and torch's styles; see `get_hf_tp_shard_plan`.
        offload_policy: as torch's.
        activation_checkpointing: compute each unit again in backward; ``"selective"`` keeps matrix products.
        reshard_after_forward: free a unit's parameters between forward and backward; see `shard_model`.
        sync_module_states: begin with the first rank's values, in place of what the others hold.

    Returns:
        The same model.

    Raises:
        ParallelConfigError: an axis that the mesh lacks, tensor-parallel ranks without a plan, or a plan that does not
            fit.
        WrapError: a model that is sharded already or cannot be.
    """
    axes = mesh_axes(device_mesh)
    reject_wrapped(model)
    cut_as_planned(model, axes, tp_shard_plan, device_mesh)
    if isinstance(activation_checkpointing, bool):
        activation_checkpointing = "full" if activation_checkpointing else "none"
    if activation_checkpointing != "none":
        _keep_no_cache_in_training(model)
    settings = TorchFullyShardedDataParallelConfig(
        activation_checkpointing=activation_checkpointing,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=isinstance(offload_policy, CPUOffloadPolicy),
        pin_memory=getattr(offload_policy, "pin_memory", False),
        sync_module_states=sync_module_states,
    )
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapper = ShardedInPlace(None, settings, model, ITEMS_OF_CONTAINERS, process_group=axes.data, mp_policy=policy)
    return wrapper.let_module_be_called()


def _keep_no_cache_in_training(model: nn.Module) -> None:
    """Switches Hugging Face's cache off in training: a layer that is computed twice would fill it twice."""
    for module in model.modules():  # wrappers such as peft may call forward directly, without hooks
        names = list(inspect.signature(module.forward).parameters)
        if "use_cache" in names:
            without_cache = functools.partial(_without_cache, names.index("use_cache"))
            module.register_forward_pre_hook(without_cache, with_kwargs=True)


def _without_cache(
    place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    is_chosen = len(args) > place or kwargs.get("use_cache") is not None
    return args, kwargs if is_chosen or not torch.is_grad_enabled() else {**kwargs, "use_cache": False}
