"""Decides the dtypes in which a model computes, reduces gradients and answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...base.dtypes import LOW_PRECISION, as_dtype
from ...base.errors import ParallelConfigError
from ..fully_sharded_data_parallel_config import FullyShardedDataParallelConfig


def mixed_precision_policy(
    parameters: Iterable[torch.Tensor], compute_dtype: torch.dtype, ddp_config: FullyShardedDataParallelConfig
) -> MixedPrecisionPolicy:
    """Returns the dtypes in which a model computes, reduces and answers.

    Parameters that all arrived in fp32 are cast for the all-gather, and inputs and outputs too, as `Float16Module`
    does for others: the fp32 shard is the master copy. Where some arrived in lower precision, every parameter keeps
    the dtype in which it came, fp32 norms and routers among them.

    Args:
        compute_dtype: what the model's config says; ``param_dtype`` overrides it, for every parameter.

    Raises:
        ParallelConfigError: fp16 in a model whose config does not know of it.
    """
    arrived = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    override = as_dtype(ddp_config.param_dtype)
    param_dtype = override or compute_dtype
    is_cast = override is not None or (arrived == {torch.float32} and param_dtype != torch.float32)
    reduce_dtype = as_dtype(ddp_config.reduce_dtype) or (torch.float32 if ddp_config.grad_reduce_in_fp32 else None)
    if torch.float16 in (override, reduce_dtype) and compute_dtype != torch.float16:
        raise ParallelConfigError(
            f"param_dtype is {ddp_config.param_dtype} and reduce_dtype {ddp_config.reduce_dtype}, but the model's "
            "config has fp16=False, so that no loss scale would keep small gradients from vanishing; set "
            "fp16=True there"
        )
    if not is_cast:
        return MixedPrecisionPolicy(None, reduce_dtype, cast_forward_inputs=False)
    output_dtype = torch.float32 if param_dtype in LOW_PRECISION else None
    return MixedPrecisionPolicy(param_dtype, reduce_dtype or param_dtype, output_dtype)


def compute_dtype(config: Any) -> torch.dtype:
    """Returns the dtype that a model's config, which may be any object, asks for."""
    if getattr(config, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(config, "fp16", False) else torch.float32
