"""What every parallel layer needs to know: degrees, dtypes, and how communication is done."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import ConfigError, ParallelConfigError


@dataclass(kw_only=True)
class ModelParallelConfig:
    """Degrees and precision of a model-parallel run; field names are Megatron-LM's.

    Raises:
        ParallelConfigError: a degree below one, or a kind of parallelism that models here do not have.
        ConfigError: precisions that contradict each other.
    """

    tensor_model_parallel_size: int = 1
    """Ranks that share the matrices of every layer."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages. Process groups are built for any number; models here take one."""

    context_parallel_size: int = 1
    """Ranks that share each sequence."""

    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer. Process groups are built for any number; models here take one."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence (Korthikanti et al., 2022)."""

    fp16: bool = False
    """Compute in fp16; gradients need a loss scale."""

    bf16: bool = False
    """Compute in bf16."""

    params_dtype: torch.dtype = torch.float32
    """Dtype in which parameters are created. `Float16Module` casts later; FSDP2 keeps these as the master copy."""

    perform_initialization: bool = True
    """Fill parameters with their initial values; False leaves them as allocated, for a checkpoint to fill."""

    calculate_per_token_loss: bool = False
    """Gradients are sums over tokens, scaled once by 1 / global token count, instead of means of means."""

    gradient_accumulation_fusion: bool = True
    """Layers compute the gradient of a weight in the buffer where `DistributedDataParallel` keeps it, as long as that
    is empty, and add those rows of an embedding's that are not zero: quicker, in less memory, and no bit of any number
    changes. Without a buffer of gradients (FSDP2) there is nothing to fuse with."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert"):
            field = f"{name}_parallel_size" if name == "context" else f"{name}_model_parallel_size"
            if getattr(self, field) < 1:
                raise ParallelConfigError(f"{field} is {getattr(self, field)}; it takes a positive number")
        if self.fp16 and self.bf16:
            raise ConfigError("fp16 and bf16 are both set; choose one")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ParallelConfigError(
                "sequence_parallel is set with tensor_model_parallel_size 1; raise the latter to 2 or more, or drop it"
            )

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products: fp16, bf16, or that of the parameters."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else self.params_dtype
