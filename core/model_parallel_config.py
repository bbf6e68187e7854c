"""The settings of every parallel layer: degrees, dtypes, and communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from .base.errors import ConfigError, ParallelConfigError, check_choices, check_range
from .base.megatron_names import ignore, takes_megatron_fields

CrossEntropyFusion = Literal["native", "te", "linear"]

PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"]
"""Schedules of `torch.distributed.pipelining`, by their names there."""


@takes_megatron_fields
@dataclass(kw_only=True)
class ModelParallelConfig:
    """Degrees and precision of a model-parallel run. Field names are Megatron-LM's.

    Megatron-LM's other fields must have their defaults if they would change what is computed; others are ignored with
    a warning.

    Raises:
        ParallelConfigError: a degree is below one, or models here do not have that kind of parallelism.
        ConfigError: precisions contradict each other.
    """

    tensor_model_parallel_size: int = 1
    """Ranks that share the matrices of every layer. 1: the ranks of the tensor-parallel group."""

    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers, one after the other (Huang et al., 2019)."""

    virtual_pipeline_model_parallel_size: int | None = None
    """Stages of each pipeline rank, each with consecutive layers. None: one stage."""

    pipeline_parallel_schedule: PipelineSchedule | None = None
    """Order of the micro-batches' forwards and backwards over pipeline stages. "ZBVZeroBubble" needs two virtual
    stages. None: "1F1B", or "Interleaved1F1B" with virtual stages."""

    context_parallel_size: int = 1
    """Ranks that share each sequence."""

    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer. They are among the data-parallel, context-parallel and tensor-parallel
    ranks."""

    expert_tensor_parallel_size: int | None = None
    """Ranks that share the matrices of each expert. None: `tensor_model_parallel_size`."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence (Korthikanti et al., 2022)."""

    fp16: bool = False
    """Compute in fp16. Gradients need a loss scale."""

    bf16: bool = False
    """Compute in bf16."""

    params_dtype: torch.dtype = torch.float32
    """Dtype of parameters at construction. `Float16Module` casts them later, and FSDP2 keeps them as the master
    copy."""

    perform_initialization: bool = True
    """Fill parameters with their initial values. If False, leave them uninitialised, for a checkpoint to fill."""

    calculate_per_token_loss: bool = False
    """Gradients are sums over tokens, scaled once by 1 / global token count, instead of means of means."""

    gradient_accumulation_fusion: bool = True
    """Compute a weight's gradient in the buffer of `DistributedDataParallel` while that is empty, and add only the
    rows of an embedding's gradient that are not zero: faster, with less memory, and bitwise equal. No effect without
    gradient buffers (FSDP2)."""

    fusion_lends_memory: ClassVar[bool] = True
    """Tells wrappers what `gradient_accumulation_fusion` means in this config (`shardstack.base.module_protocol`)."""

    cross_entropy_loss_fusion: bool = False
    """Fuse the loss as `cross_entropy_fusion_impl` says."""

    cross_entropy_fusion_impl: CrossEntropyFusion = "native"
    """With `cross_entropy_loss_fusion`: "linear" computes the projection to the vocabulary and its loss together, a
    part of the vocabulary at a time, so that logits never exist whole, and backward computes them again. A GPU keeps
    whole logits where they take at most 1/32 of its memory. "native" changes nothing: the loss is one operation in any
    case. "te" is Transformer Engine's kernel, which is not used."""

    cross_entropy_fusion_vocab_chunk_size: int | None = None
    """Columns of the logits that exist at a time with "linear", on each tensor-parallel rank. None: as many as make
    2^20 elements on a CPU, where they stay in the cache, and on a GPU all, or as many as take 1/128 of its memory."""

    def __post_init__(self) -> None:
        self._check_cross_entropy()
        self._check_pipeline()
        degrees = ("tensor_model", "pipeline_model", "context", "expert_model")
        names = [*(f"{name}_parallel_size" for name in degrees), "expert_tensor_parallel_size"]
        check_range(self, *names, least=1, error=ParallelConfigError)
        if self.fp16 and self.bf16:
            raise ConfigError("fp16 and bf16 are both set; choose one")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ParallelConfigError(
                "sequence_parallel is set with tensor_model_parallel_size 1; raise the latter to 2 or more, or drop it"
            )

    def _check_cross_entropy(self) -> None:
        check_range(self, "cross_entropy_fusion_vocab_chunk_size", least=1)
        check_choices(self, cross_entropy_fusion_impl=get_args(CrossEntropyFusion))
        impl = self.cross_entropy_fusion_impl
        if impl == "linear" and not self.cross_entropy_loss_fusion:
            raise ConfigError(
                'cross_entropy_fusion_impl is "linear" without cross_entropy_loss_fusion, which turns it on; set both'
            )
        if self.cross_entropy_fusion_vocab_chunk_size is not None and not self.fuses_linear_cross_entropy:
            raise ConfigError(
                "cross_entropy_fusion_vocab_chunk_size is given, but only a fused projection has parts; set "
                'cross_entropy_loss_fusion and cross_entropy_fusion_impl "linear", or leave it out'
            )
        if impl == "te":
            ignore(type(self).__name__, "the loss has torch's kernels", cross_entropy_fusion_impl=(impl, "native"))

    def _check_pipeline(self) -> None:
        check_choices(self, True, pipeline_parallel_schedule=get_args(PipelineSchedule))
        virtual, schedule = self.virtual_pipeline_model_parallel_size, self.pipeline_parallel_schedule
        name = "virtual_pipeline_model_parallel_size"
        if virtual is not None and (virtual < 2 or self.pipeline_model_parallel_size == 1):
            raise ParallelConfigError(
                f"{name} is {virtual} with pipeline_model_parallel_size {self.pipeline_model_parallel_size}; take 2 "
                "or more of each, or None for one stage a rank"
            )
        if schedule is not None and self.pipeline_model_parallel_size == 1:
            raise ParallelConfigError(
                f"pipeline_parallel_schedule is {schedule!r} with pipeline_model_parallel_size 1; raise the latter to "
                "2 or more, or drop it"
            )
        takes = {"Interleaved1F1B": "2 or more", "ZBVZeroBubble": "2"}.get(self.pipeline_schedule, "None")
        if (virtual is None) != (takes == "None") or (takes == "2" and virtual != 2):
            raise ParallelConfigError(
                f"pipeline_parallel_schedule {self.pipeline_schedule!r} takes {takes} for {name}, which is {virtual}; "
                "change one of them"
            )

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """The schedule, by torch's name."""
        virtual = self.virtual_pipeline_model_parallel_size
        return self.pipeline_parallel_schedule or ("1F1B" if virtual is None else "Interleaved1F1B")

    @property
    def fuses_linear_cross_entropy(self) -> bool:
        """Whether logits never exist whole."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products: fp16, bf16, or the parameters' dtype."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else self.params_dtype
