"""`nvfsdp_strategy_parallelize`: any model in one of this library's wrappers, under nvFSDP's options."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...distributed.data_parallel_base import _BaseDataParallel
from ...distributed.distributed_data_parallel_config import (
    SHARDING_STRATEGIES,
    DistributedDataParallelConfig,
    shards_parameters,
)
from ...distributed.model.rewrapping import reject_wrapped
from ...distributed.torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig
from ...dtypes import LOW_PRECISION
from ...errors import ParallelConfigError, warn_once
from ...text import choices
from ..bridge.meshes import mesh_axes
from ..bridge.units import check_classes_are_in, import_classes_from_paths
from ..bridge.wrapping import wrap_for_trainer
from .tensor_parallel_plan import Plan, cut_as_planned


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # imported already, from no file
        return True


HAVE_NVFSDP = any(map(_is_installed, ("megatron_fsdp", "nvfsdp")))
"""Whether NVIDIA's own package can be imported; nothing here needs it."""

_RUN_AS_FULLY_SHARDED = ("grads_params", "params")


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
            under the other strategies `core.optimizer` keeps fp32 weights always.
        overlap_grad_reduce: reduce gradients while backward runs; FSDP2 always does.
        overlap_param_gather: gather parameters ahead of their use; False where nothing is gathered (``no_shard``).
        check_for_nan_in_grad: raise on a gradient that is not finite.
        average_in_collective: let the collective divide; FSDP2 decides that; warns once.
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
    strategy = _as_strategy(data_parallel_sharding_strategy)
    axes = mesh_axes(device_mesh)
    reject_wrapped(model, (_BaseDataParallel,))
    unit_classes = import_classes_from_paths(nvfsdp_unit_modules or ())
    check_classes_are_in(model, unit_classes, "nvfsdp_unit_modules")
    _say_what_has_no_effect(
        keep_fp8_transpose_cache_when_using_custom_fsdp=keep_fp8_transpose_cache_when_using_custom_fsdp,
        nccl_ub=nccl_ub and not shards_parameters(strategy),
        fsdp_double_buffer=fsdp_double_buffer,
    )
    _compare_with_meta(model, init_nvfsdp_with_meta_device)
    if axes.tensor is not None and not shards_parameters(strategy):
        raise ParallelConfigError(
            f"data_parallel_sharding_strategy is {strategy!r} on a mesh with {axes.tensor.size()} tensor-parallel "
            "ranks, and flat buffers take no DTensors; use 'optim_grads_params', or a mesh without them"
        )
    shared: dict[str, Any] = {
        "grad_reduce_in_fp32": grad_reduce_in_fp32,
        "check_for_nan_in_grad": check_for_nan_in_grad,
        "average_in_collective": average_in_collective,
    }
    param_dtype: torch.dtype | None = None
    if shards_parameters(strategy):
        param_dtype = _with_fp32_shards(model) if preserve_fp32_weights else None
        _warn_of_fsdp2(overlap_grad_reduce=overlap_grad_reduce, disable_bucketing=disable_bucketing)
        # FSDP2 takes DTensors of tensor parallelism, and fp32 shards that are cast when they are gathered.
        ddp_config: DistributedDataParallelConfig = TorchFullyShardedDataParallelConfig(
            **shared,
            nccl_ub=nccl_ub,
            param_dtype=param_dtype,
            reduce_dtype=param_dtype if not grad_reduce_in_fp32 else None,
            forward_prefetch=int(overlap_param_gather),
            backward_prefetch=int(overlap_param_gather),
        )
    else:
        _warn_of_buffers(strategy, nvfsdp_unit_modules=bool(unit_classes), preserve_fp32_weights=preserve_fp32_weights)
        ddp_config = DistributedDataParallelConfig(
            **shared,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather and strategy != "no_shard",
        )
    cut_as_planned(model, axes, tp_shard_plan, device_mesh)
    return wrap_for_trainer(
        model,
        ddp_config,
        axes.data,
        unit_classes,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        fp16=param_dtype == torch.float16,
    )


def _warn_of_fsdp2(*, overlap_grad_reduce: bool, disable_bucketing: bool) -> None:
    if not overlap_grad_reduce:
        warn_once("overlap_grad_reduce=False: FSDP2 reduces gradients while backward runs. No number changes")
    if disable_bucketing:
        warn_once("disable_bucketing: under optim_grads_params a unit is the bucket. No number changes")


def _warn_of_buffers(strategy: str, *, nvfsdp_unit_modules: bool, preserve_fp32_weights: bool) -> None:
    if nvfsdp_unit_modules:
        warn_once(
            f"nvfsdp_unit_modules: under {strategy} parameters are in buffers, which are cut into buckets and not "
            "units. No number changes"
        )
    if preserve_fp32_weights:
        warn_once(
            f"preserve_fp32_weights: under {strategy} the optimizer of core.optimizer always keeps fp32 masters of "
            "weights in low precision. No number changes"
        )


def _as_strategy(asked: str | int) -> str:
    if asked in _RUN_AS_FULLY_SHARDED:
        warn_once(
            f"data_parallel_sharding_strategy {asked!r} runs as 'optim_grads_params': where parameters are sharded, "
            "the optimizer's state is too. No number changes"
        )
        return "optim_grads_params"
    by_number = dict(enumerate(SHARDING_STRATEGIES))
    if isinstance(asked, int) and not isinstance(asked, bool) and asked in by_number:
        return by_number[asked]
    if asked in SHARDING_STRATEGIES:
        return str(asked)
    raise ParallelConfigError(
        f"data_parallel_sharding_strategy is {asked!r}; "
        f"{choices(str(asked), (*SHARDING_STRATEGIES, *_RUN_AS_FULLY_SHARDED))}, or a number from 0 to 3"
    )


def _say_what_has_no_effect(**options: bool) -> None:
    for name, value in options.items():
        if value:
            warn_once(f"{name} is about memory of NVIDIA's own buffers, and has no use here. No number changes")


def _compare_with_meta(model: nn.Module, is_said_to_be_on_meta: bool) -> None:
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    if is_said_to_be_on_meta and not is_on_meta:
        warn_once(
            "init_nvfsdp_with_meta_device is set, but no parameter is on the meta device; the model keeps its values"
        )
    if is_on_meta and not is_said_to_be_on_meta:
        warn_once(
            "parameters are on the meta device without init_nvfsdp_with_meta_device; they are drawn after sharding, "
            "as with it"
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
    found = ", ".join(sorted(str(dtype) for dtype in dtypes))
    warn_once(
        f"preserve_fp32_weights acts on models that are in bf16 or fp16 throughout, and this one is in {found}; the "
        "optimizer of core.optimizer keeps fp32 masters of weights in low precision. No number changes"
    )
    return None
