"""Decides the dtypes of parameters and gradients, and which of a unit travel together, and where in flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ...base import device
from ...base.dtypes import LOW_PRECISION, as_dtype, dtype_name
from ...base.errors import ParallelConfigError, WrapError
from ...base.module_protocol import names_of_borrowers
from ...base.parameters import can_be_pending, is_packed, local_part
from ...comm.message_formats import BLOCK, OWN_DTYPE, has_whole_blocks
from ...dist_checkpointing.global_view import global_shape
from ..distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from ..fully_sharded_data_parallel_config import FullyShardedDataParallelConfig
from ..groups import DataParallelGroups, ParameterKind, kind_of
from .layout import PARAM_ALIGNMENT, BucketLayout, FullParamLayout, lay_out
from .parts import NO_CASTS, ParamPlan, PieceKind, PiecePlan, bounds_by_rows

LayOut = Callable[[Sequence[nn.Parameter]], Iterable[BucketLayout]]
"""Places parameters of one kind in buckets, one after the other."""


def mixed_precision_policy(
    parameters: Iterable[torch.Tensor], config: Any, ddp_config: FullyShardedDataParallelConfig
) -> MixedPrecisionPolicy:
    """Returns the dtypes in which a model computes, reduces and answers.

    Parameters that all arrived in fp32 are cast for the all-gather, and inputs and outputs too, as `Float16Module`
    does for others: the fp32 shard is the master copy. Where some arrived in lower precision, every parameter keeps
    the dtype in which it came, fp32 norms and routers among them.

    Args:
        config: the model's, any object, whose ``bf16`` and ``fp16`` say how it computes; ``param_dtype`` overrides
            them, for every parameter.

    Raises:
        ParallelConfigError: fp16 in a model whose config does not know of it.
    """
    is_fp16 = not getattr(config, "bf16", False) and getattr(config, "fp16", False)
    dtype_of_model = torch.float16 if is_fp16 else torch.bfloat16 if getattr(config, "bf16", False) else torch.float32
    arrived = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    override = as_dtype(ddp_config.param_dtype)
    param_dtype = override or dtype_of_model
    is_cast = override is not None or (arrived == {torch.float32} and param_dtype != torch.float32)
    reduce_dtype = as_dtype(ddp_config.reduce_dtype) or (torch.float32 if ddp_config.grad_reduce_in_fp32 else None)
    if torch.float16 in (override, reduce_dtype) and not is_fp16:
        raise ParallelConfigError(
            f"param_dtype is {ddp_config.param_dtype} and reduce_dtype {ddp_config.reduce_dtype}, but the model's "
            "config has fp16=False, so that no loss scale would keep small gradients from vanishing; set "
            "fp16=True there"
        )
    if not is_cast:
        return MixedPrecisionPolicy(None, reduce_dtype, cast_forward_inputs=False)
    output_dtype = torch.float32 if param_dtype in LOW_PRECISION else None
    return MixedPrecisionPolicy(param_dtype, reduce_dtype or param_dtype, output_dtype)


class ParameterNames:
    """The names of a model's parameters. A tied parameter has several.

    A GPT's embedding weight that its output projection borrows is also listed under the projection's name.
    """

    def __init__(self, model: nn.Module) -> None:
        names, borrowers = list[str](), names_of_borrowers(model)
        # The names of each parameter, its first one first.
        self.of: dict[nn.Parameter, tuple[str, ...]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.append(name)
            self.of[parameter] = (*self.of.get(parameter, ()), name)
        for parameter in self.of:
            if getattr(parameter, "shared_embedding", False):
                self.of[parameter] += tuple(borrowers)
        # The place of each name, borrowed ones last.
        self.places = {name: place for place, name in enumerate([*names, *borrowers])}


class Pieces:
    """Makes the pieces of a model's units, one unit after the other. It lives while one model is planned.

    Args:
        precision: the dtypes of computation and reduction; without casts each parameter keeps its own.
        groups: the ranks that share parameters or their updates, and those of experts.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: EngineKind,
        ddp_config: DistributedDataParallelConfig,
        precision: MixedPrecisionPolicy = NO_CASTS,
        *,
        groups: DataParallelGroups,
    ) -> None:
        self.names, self._groups = ParameterNames(module), groups
        self._engine, self._config, self._precision = engine, ddp_config, precision
        # The buckets of each flat buffer, by its kind, in the order in which `in_buffers` has made them.
        self._buffers: dict[PieceKind, list[PiecePlan]] = {}

    def num_parts(self, kind: ParameterKind = "dense") -> int:
        """Returns the number of ranks that share the update of a parameter of this kind."""
        return self._groups.of_kind(kind).shard.size() if self._config.shards_updates else 1

    def _by_kind(self, params: Iterable[nn.Parameter]) -> dict[PieceKind, list[nn.Parameter]]:
        num_parts = self.num_parts()

        def kind_of(param: nn.Parameter) -> PieceKind:
            num_shards = self._groups.of(param).shard.size() if self._config.shards_parameters else 1
            return kind_of_parameter(
                param, self._engine, self._config, self._precision, num_parts, num_param_shards=num_shards
            )

        return _group_by(kind_of, params)

    def in_buffers(self, params: Sequence[nn.Parameter], lay_out_kind: LayOut) -> tuple[PiecePlan, ...]:
        """Puts a unit's parameters into one buffer for each kind, behind those of earlier units.

        Args:
            params: the unit's parameters in order of construction; buffers have them in reverse order.

        Raises:
            WrapError: a parameter that cannot be moved into a flat buffer, or whose readers cannot be made to wait.
        """
        pieces = []
        for param in reversed(params):
            self._reject_unfit(param)
        for kind, of_kind in self._by_kind(reversed(params)).items():
            buckets = self._buffers.setdefault(kind, [])
            index, first = list(self._buffers).index(kind), buckets[-1].layout.end if buckets else 0
            num_parts = self.num_parts(kind.kind)
            for layout in lay_out_kind(of_kind):
                members = [
                    self._plan_of(of_kind[i], kind, layout.bounds(place, num_parts))
                    for i, place in zip(layout.members, layout.ranges, strict=True)
                ]
                in_buffer = replace(layout, start=first + layout.start, end=first + layout.end)
                bucket = (index, len(buckets))
                buckets.append(PiecePlan(**vars(kind), params=tuple(members), layout=in_buffer, bucket=bucket))
                pieces.append(buckets[-1])
        return tuple(pieces)

    def by_rows(self, params: Iterable[nn.Parameter], *, is_cut: bool = True) -> tuple[PiecePlan, ...]:
        """Returns the pieces of parameters that no flat buffer holds, each cut by its first dimension, or whole."""
        pieces = []
        for kind, of_kind in self._by_kind(params).items():
            num_parts = self.num_parts(kind.kind) if is_cut else 1
            members = [self._plan_of(p, kind, bounds_by_rows(_local_shape(p), num_parts)) for p in of_kind]
            pieces.append(PiecePlan(**vars(kind), params=tuple(members)))
        return tuple(pieces)

    def _plan_of(self, param: nn.Parameter, kind: PieceKind, bounds: tuple[int, ...]) -> ParamPlan:
        names = self.names.of[param]
        if is_packed(param) and kind.is_trained:
            raise WrapError(f"parameter {names[0]} holds packed codes, which no gradient can change; freeze it")
        if is_packed(param) and kind.gathered_dtype != kind.param_dtype:
            raise ParallelConfigError(
                f"parameter {names[0]} holds packed codes in {dtype_name(kind.param_dtype)}, which a cast to "
                f"{dtype_name(kind.gathered_dtype)} would destroy; store it in torch.uint8 or in the dtype of "
                "computation (quant_storage), or leave param_dtype and the config's bf16 and fp16 out"
            )
        if self._config.shards_parameters and hasattr(param, "CB"):
            raise WrapError(
                f"parameter {names[0]} is a {type(param).__name__}, whose layer reads whole 8-bit codes from its "
                "attribute CB, not those that are gathered; use DistributedDataParallel, or codes in 4 bits"
            )
        is_low = kind.is_trained and torch.promote_types(kind.grad_dtype, torch.float32) != kind.grad_dtype
        patterns = self._config.param_name_patterns_for_fp32_local_accumulation if is_low else ()
        return ParamPlan(
            names=names,
            places=tuple(self.names.places[name] for name in names),
            shape=_local_shape(param),
            accumulates_in_fp32=any(pattern == "all" or fnmatch(names[0], pattern) for pattern in patterns),
            bounds=bounds,
        )

    def _reject_unfit(self, param: nn.Parameter) -> None:
        name = self.names.of[param][0]
        if isinstance(param, DTensor):
            raise WrapError(f"parameter {name} is a DTensor; flat buffers take plain tensors, FSDP2 takes these")
        if self._config.shards_parameters and not can_be_pending(param) and not is_packed(param):
            raise WrapError(
                f"parameter {name} is a {type(param).__name__}, and FullyShardedDataParallel makes readers of a "
                "parameter wait by its class, nn.Parameter; make it an nn.Parameter, or use "
                "TorchFullyShardedDataParallel"
            )


def kind_of_parameter(
    param: nn.Parameter,
    engine: EngineKind,
    ddp_config: DistributedDataParallelConfig,
    precision: MixedPrecisionPolicy = NO_CASTS,
    num_parts: int = 1,
    num_param_shards: int = 1,
) -> PieceKind:
    """Returns the dtypes, the memory and the ranks of a parameter and its gradient.

    Args:
        precision: the model's; without casts each parameter keeps its dtype.
        num_parts: number of ranks that share an update; of an expert there may be fewer.
        num_param_shards: number of ranks that share a parameter.
    """
    is_cast, is_fsdp2 = param.is_floating_point(), engine is EngineKind.FSDP2
    gathered_dtype = (precision.param_dtype if is_cast else None) or param.dtype
    grad_dtype = (precision.reduce_dtype if is_cast else None) or gathered_dtype
    if ddp_config.grad_reduce_in_fp32 and not is_fsdp2:  # to add more exactly, so double precision stays
        grad_dtype = torch.promote_types(gathered_dtype, torch.float32)
    if is_fsdp2:
        shard_grad_dtype, releases_grads = param.dtype, True
        if kind_of(param) == "replicated":  # reduced when torch has ended with it
            grad_dtype = param.dtype
    elif ddp_config.shards_parameters:
        shard_grad_dtype = torch.promote_types(grad_dtype, param.dtype)
        releases_grads = num_parts > 1 or shard_grad_dtype != grad_dtype or getattr(ddp_config, "cpu_offload", False)
    else:
        shard_grad_dtype, releases_grads = grad_dtype, ddp_config.sharding_strategy == "optim_grads" and num_parts > 1
    return PieceKind(
        is_trained=param.requires_grad,
        kind=kind_of(param),
        param_dtype=param.dtype,
        gathered_dtype=gathered_dtype,
        grad_dtype=grad_dtype,
        shard_grad_dtype=shard_grad_dtype,
        device=device.current_device() if param.is_meta else param.device,  # where it will be materialized
        num_param_shards=num_param_shards,
        holds_params=ddp_config.shards_updates,
        releases_grads=param.requires_grad and releases_grads,
        param_format=getattr(ddp_config, "param_comm_dtype", None) if has_blocks(param, ddp_config) else None,
        grad_format=_grad_format(param, ddp_config),
    )


def has_blocks(param: nn.Parameter, ddp_config: DistributedDataParallelConfig) -> bool:
    """Returns whether a parameter or its gradient travels in blocks, by the shape of the whole model's tensor.

    Raises:
        ParallelConfigError: tensor parallelism has cut its rows inside of blocks.
    """
    if not (ddp_config.sends_blocks and param.is_floating_point() and kind_of(param) in ("dense", "expert")):
        return False
    if is_packed(param) or not has_whole_blocks(whole := global_shape(param)):
        return False
    if not has_whole_blocks(_local_shape(param)):
        raise ParallelConfigError(
            f"tensor parallelism cuts a parameter of shape {tuple(whole)} to {_local_shape(param)}, inside of the "
            f"blocks of {BLOCK} elements that param_comm_dtype and grad_comm_dtype send; drop them, or use fewer ranks"
        )
    return True


def grain_of(params: Sequence[nn.Parameter], ddp_config: DistributedDataParallelConfig) -> int:
    """Returns the elements of which shards of these parameters, of one kind, are multiples, in a flat buffer."""
    return BLOCK if has_blocks(params[0], ddp_config) else PARAM_ALIGNMENT


def _grad_format(param: nn.Parameter, ddp_config: DistributedDataParallelConfig) -> str | None:
    if kind_of(param) in ("replicated", "ignored") or not param.requires_grad:
        return None
    return (
        OWN_DTYPE
        if ddp_config.grad_comm_dtype == "int8" and not has_blocks(param, ddp_config)
        else ddp_config.grad_comm_dtype
    )


def lay_out_params(
    params: Sequence[nn.Parameter], dp_size: int | None, bucket_size: int | None, grain: int = PARAM_ALIGNMENT
) -> list[BucketLayout]:
    """Lays out parameters, which come in reverse order of construction, in buckets of at least `bucket_size`.

    Where buckets are cut, a weight that carries ``shared_embedding`` has one of its own, as in Megatron-LM: it is read
    outside its module too. Weights of tensor-parallel layers, which have its attributes, are aligned: their gradients
    are computed in place.
    """
    shared_weights = [index for index, param in enumerate(params) if getattr(param, "shared_embedding", False)]
    return lay_out(
        [param.numel() for param in params],
        dp_size=dp_size,
        alone=shared_weights if dp_size else (),
        aligned={index for index, param in enumerate(params) if hasattr(param, "partition_dim")},
        bucket_size=bucket_size,
        grain=grain,
    )


def full_param_layout(
    params: Sequence[nn.Parameter], bucket_size: int | None, dp_size: int, ddp_config: DistributedDataParallelConfig
) -> FullParamLayout:
    """Returns the places that a plan gives these parameters where a strategy shards, and parameters are whole.

    Args:
        params: the parameters that require gradients, in order of construction.
        bucket_size: elements; None means one bucket for each kind of parameter.
        dp_size: ranks that share a bucket.
    """
    kinds = _group_by(lambda param: kind_of_parameter(param, EngineKind.FLAT_BUFFERS, ddp_config), reversed(params))
    return tuple(tuple(lay_out_params(of, dp_size, bucket_size, grain_of(of, ddp_config))) for of in kinds.values())


def _group_by(
    kind_of: Callable[[nn.Parameter], PieceKind], params: Iterable[nn.Parameter]
) -> dict[PieceKind, list[nn.Parameter]]:
    kinds: dict[PieceKind, list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault(kind_of(param), []).append(param)
    return kinds


def _local_shape(param: nn.Parameter) -> tuple[int, ...]:
    """Returns the shape of this rank's part of a DTensor, which tensor parallelism has cut."""
    return tuple(local_part(param.detach()).shape)
