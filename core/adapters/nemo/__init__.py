"""NeMo Automodel's ways to shard any model: its arguments become settings of FSDP2, or of any wrapper.

`fsdp2_strategy_parallelize` shards the model in place, with tensor parallelism below; `nvfsdp_strategy_parallelize`
wraps it under nvFSDP's options. `bridge/foreign_settings.json` says what is ignored.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from ...base.dtypes import LOW_PRECISION
from ...base.errors import ParallelConfigError, warn_once
from ...base.text import choices
from ...distributed import _BaseDataParallel
from ...distributed.distributed_data_parallel_config import (
    SHARDING_STRATEGIES,
    ActivationCheckpointing,
    shards_parameters,
)
from ...distributed.fully_sharded_data_parallel_config import FSDP2, Reshard, config_of
from ...distributed.guards import reject_wrapped
from ...distributed.plan.units import CONTAINERS
from ..bridge.sharding import check_classes_are_in, import_classes_from_paths, mesh_axes
from ..bridge.translation import check_settings, wrap_for_trainer
from .tensor_parallel_plan import Plan, cut_as_planned, get_hf_tp_shard_plan, translate_to_torch_parallel_style

__all__ = [
    "HAVE_NVFSDP",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "import_classes_from_paths",
    "nvfsdp_strategy_parallelize",
    "to_cpu",
    "translate_to_torch_parallel_style",
]

_RUN_AS_FULLY_SHARDED = ("grads_params", "params")


HAVE_NVFSDP = any(importlib.util.find_spec(package) for package in ("megatron_fsdp", "nvfsdp"))
"""Whether NVIDIA's own package can be imported. Nothing here needs it."""


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
    cut_as_planned(model, axes.tensor, tp_shard_plan, device_mesh)
    if isinstance(activation_checkpointing, bool):
        activation_checkpointing = "full" if activation_checkpointing else "none"
    config = config_of(
        FSDP2,
        activation_checkpointing=activation_checkpointing,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=isinstance(offload_policy, CPUOffloadPolicy),
        sync_module_states=sync_module_states,
    )
    if config.activation_checkpointing != "none":
        _keep_no_cache_in_training(model)
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap_for_trainer(model, config, axes.data, CONTAINERS, in_place=True, mp_policy=policy)
    return model


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


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    nvfsdp_unit_modules: Sequence[str | type[nn.Module]] | None = None,
    tp_shard_plan: Plan | None = None,
    data_parallel_sharding_strategy: str | int = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
) -> _BaseDataParallel:
    """Wraps a model as `wrap_model` does, under the names and defaults of NeMo Automodel's function of this name.

    The model computes in the dtype of its parameters. The wrapper keeps the contract of every wrapper
    (`docs/contract.md`).

    Args:
        model: any module.
        device_mesh: its axes are found by name, as in `fsdp2_strategy_parallelize`.
        nvfsdp_unit_modules: dotted paths of classes whose outermost instances are units; None is one unit. Units are
            FSDP2's: the other strategies cut buffers.
        tp_shard_plan: needed where the mesh has tensor-parallel ranks; under ``optim_grads_params`` alone.
        data_parallel_sharding_strategy: ``no_shard`` (0), ``optim`` (1), ``optim_grads`` (2) or ``optim_grads_params``
            (3), as which ``grads_params`` and ``params`` run too.
        init_nvfsdp_with_meta_device: the model is on the meta device, and is drawn after sharding.
        grad_reduce_in_fp32: reduce gradients of parameters in less in fp32.
        preserve_fp32_weights: keep shards of parameters in bf16 or fp16 in fp32, and cast them for the computation;
            under the other strategies `shardstack.optimizer` keeps fp32 weights always.
        overlap_grad_reduce: reduce gradients while backward runs; FSDP2 always does.
        overlap_param_gather: gather parameters ahead of their use; False where nothing is gathered (``no_shard``).
        check_for_nan_in_grad: raise on a gradient that is not finite.
        average_in_collective: ignored with a warning; gradients are divided after they are added.
        disable_bucketing: reduce each buffer in one piece.
        calculate_per_token_loss: sum gradients, for `finalize_model_grads` to divide by the number of tokens.
        keep_fp8_transpose_cache_when_using_custom_fsdp: changes no number, and has no use here.
        nccl_ub: under ``optim_grads_params`` gather and reduce in memory that NCCL has registered; else likewise.
        fsdp_double_buffer: changes no number, and has no use here.

    Raises:
        ParallelConfigError: an unknown strategy, a mesh without a data-parallel axis, or tensor-parallel ranks without
            a plan.
        WrapError: a class path that does not import, or a class that no module of the model has.
    """
    options = dict(locals())
    strategy = _as_strategy(data_parallel_sharding_strategy)
    axes = mesh_axes(device_mesh)
    reject_wrapped(model, (_BaseDataParallel,))
    unit_classes = import_classes_from_paths(nvfsdp_unit_modules or ())
    check_classes_are_in(model, unit_classes, "nvfsdp_unit_modules")
    param_dtype: torch.dtype | None = None
    check_settings(options, "nemo nvFSDP")
    names = ("grad_reduce_in_fp32", "check_for_nan_in_grad", "average_in_collective")
    fields: dict[str, Any] = {name: options[name] for name in names}
    if shards_parameters(strategy):
        param_dtype = _with_fp32_shards(model) if preserve_fp32_weights else None
        # FSDP2 takes DTensors of tensor parallelism, and fp32 shards that are cast when they are gathered.
        check_settings(options, "nemo nvFSDP on FSDP2")
        fields |= {"param_dtype": param_dtype, "reduce_dtype": None if grad_reduce_in_fp32 else param_dtype}
        ahead = int(overlap_param_gather)
        config = config_of(FSDP2, nccl_ub=nccl_ub, forward_prefetch=ahead, backward_prefetch=ahead, **fields)
    elif axes.tensor is not None:
        raise ParallelConfigError(
            f"data_parallel_sharding_strategy is {strategy!r} on a mesh with {axes.tensor.size()} tensor-parallel "
            "ranks, and flat buffers take no DTensors; use 'optim_grads_params', or a mesh without them"
        )
    else:
        gathers = overlap_param_gather and strategy != "no_shard"
        check_settings(options, "nemo nvFSDP on buffers")
        fields |= {"overlap_grad_reduce": overlap_grad_reduce, "overlap_param_gather": gathers}
        config = config_of(strategy, **fields)
    cut_as_planned(model, axes.tensor, tp_shard_plan, device_mesh)
    others: dict[str, Any] = {
        "calculate_per_token_loss": calculate_per_token_loss,
        "fp16": param_dtype == torch.float16,
    }
    return wrap_for_trainer(model, config, axes.data, unit_classes, disable_bucketing=disable_bucketing, **others)


def _as_strategy(strategy: str | int) -> str:
    if strategy in _RUN_AS_FULLY_SHARDED:
        warn_once(
            f"data_parallel_sharding_strategy {strategy!r} runs as 'optim_grads_params': where parameters are "
            "sharded, the optimizer's state is too. No number changes"
        )
        return "optim_grads_params"
    if strategy in SHARDING_STRATEGIES:
        return str(strategy)
    if type(strategy) is int and 0 <= strategy < len(SHARDING_STRATEGIES):
        return SHARDING_STRATEGIES[strategy]
    raise ParallelConfigError(
        f"data_parallel_sharding_strategy is {strategy!r}; "
        f"{choices(str(strategy), (*SHARDING_STRATEGIES, *_RUN_AS_FULLY_SHARDED))}, or a number from 0 to 3"
    )


def _with_fp32_shards(model: nn.Module) -> torch.dtype | None:
    """Converts a low-precision model to fp32 and returns its old dtype, to which gathered parameters are cast.

    Returns None, after a warning, for a model of another dtype or of several. The fp32 values take new memory.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if len(dtypes) == 1 and (dtype := next(iter(dtypes))) in LOW_PRECISION:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
        return dtype
    names = ", ".join(sorted(str(dtype) for dtype in dtypes))
    warn_once(
        f"preserve_fp32_weights acts on models that are in bf16 or fp16 throughout, and this one is in {names}; the "
        "optimizer of shardstack.optimizer keeps fp32 masters of weights in low precision. No number changes"
    )
    return None


def to_cpu(v: Any) -> Any:
    """Returns a tensor in host memory (NeMo Automodel's function).

    A DTensor on a GPU is gathered whole, so that all of its ranks call it. One on the CPU gives its local tensor.
    Anything that is no tensor is returned as it is.

    Raises:
        ValueError: a tensor on another kind of device, such as the meta device, which has no values.
    """
    if not isinstance(v, torch.Tensor):
        return v
    if v.device.type not in ("cpu", "cuda"):
        raise ValueError(f"to_cpu was given a tensor on the device {v.device}; give one on a GPU or the CPU")
    if not isinstance(v, DTensor):
        return v.cpu()
    return v.to_local() if v.device.type == "cpu" else v.full_tensor().cpu()
