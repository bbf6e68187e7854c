"""The settings that PyTorch FSDP2 has beyond those of every wrapper that shards parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..foreign_arguments import ForeignFields, takes_foreign_fields
from .fully_sharded_data_parallel_config import FullyShardedDataParallelConfig


@takes_foreign_fields(ForeignFields())
@dataclass(kw_only=True)
class TorchFullyShardedDataParallelConfig(FullyShardedDataParallelConfig):
    """Settings of :class:`TorchFullyShardedDataParallel`; giving one to `wrap_model` chooses that wrapper.

    Dtypes are torch's, or their names, as ``"bf16"`` or ``"float32"``.

    Raises:
        ParallelConfigError: settings that contradict each other, or a value that a setting does not take.
    """

    collectives: Literal["auto", "torch"] = "auto"
    """``auto``: as the backend does them best; under gloo ranks exchange pieces directly. ``torch``: FSDP2's own."""
