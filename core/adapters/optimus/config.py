"""Settings of the transforms; fields and defaults are optimus-dl's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...dtypes import DTYPE_NAMES, as_dtype
from ...errors import ConfigError, ParallelConfigError
from ...text import choices

_OTHER_NAMES = {"half": "float16", "float": "float32", "double": "float64"}


def dtype_of(name: str | None, field: str = "dtype") -> torch.dtype | None:
    """Returns the dtype of this name, torch's older names included.

    Raises:
        ConfigError: no such name.
    """
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    try:
        return as_dtype(_OTHER_NAMES.get(plain, plain) if isinstance(plain, str) else plain, field)
    except (ParallelConfigError, AttributeError) as error:
        raise ConfigError(f"{field} is {name!r}; {choices(str(name), (*DTYPE_NAMES, *_OTHER_NAMES))}") from error


@dataclass
class DDPTransformConfig:
    """Settings of torch's DDP; accepted and ignored, because buffers here always behave as each field says."""

    find_unused_parameters: bool = False
    """A parameter that no backward reaches has a zero gradient here in any case."""

    gradient_as_bucket_view: bool = True
    """Gradients are views of the buffers here in any case."""

    static_graph: bool = False
    """The graph may change from step to step here in any case."""


@dataclass
class MixedPrecisionConfig:
    """Dtypes by name, as ``bfloat16``, ``bf16``, ``fp16``, ``float32`` or ``double``; None changes nothing.

    Raises:
        ConfigError: an unknown name.
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
            dtype_of(getattr(self, name), name)


@dataclass
class OffloadConfig:
    """Settings of the memory that holds shards."""

    cpu_offload: bool = False
    """Keep shards in the host's memory."""

    pin_memory: bool = True
    """Pin that memory; without an accelerator a warning says that there is nothing to pin for."""


@dataclass
class FullyShardTransformConfig:
    """Settings of sharding, and of when units are gathered."""

    reshard_after_forward: bool | int = False
    """Free gathered parameters between forward and backward; a number keeps them whole among so many ranks."""

    mixed_precision: MixedPrecisionConfig | None = None
    """None casts nothing."""

    offload: OffloadConfig | None = None
    """None keeps shards on the device."""

    use_hybrid_sharding: bool = True
    """Shard over the mesh's ``dp_shard`` and replicate over ``dp_replicate``; else shard over all."""

    sync_grad_accum: bool = False
    """Reduce the gradient of every micro-batch, not of the last alone."""
