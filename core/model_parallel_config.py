"""The settings of every parallel layer: degrees, dtypes, and communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from .errors import ConfigError, ParallelConfigError
from .foreign_arguments import ForeignFields, ignore, takes_foreign_fields
from .ranges import check_choices, check_range

CrossEntropyFusion = Literal["native", "te", "linear"]

_NO_STAGES = "models here have one pipeline stage"
_NO_REMATERIALISED_WEIGHTS = "shard weights by data parallelism (TorchFullyShardedDataParallel)"
_FOREIGN = ForeignFields(
    positional=("tensor_model_parallel_size",),
    refused={
        "virtual_pipeline_model_parallel_size": (None, _NO_STAGES),
        "hierarchical_context_parallel_sizes": (None, "use context_parallel_size"),
        "hybrid_context_parallel": (False, "use context_parallel_size"),
        "max_seqlen_per_dp_cp_rank": (None, "use context_parallel_size"),
        "tensor_parallel_num_weight_shards": (None, _NO_REMATERIALISED_WEIGHTS),
        "gtp_weight_remat_size": (1, _NO_REMATERIALISED_WEIGHTS),
        "expert_tensor_parallel_num_weight_shards": (None, _NO_REMATERIALISED_WEIGHTS),
        "expert_gtp_weight_remat_size": (1, _NO_REMATERIALISED_WEIGHTS),
        "enable_autocast": (False, "set bf16 or fp16, or enter torch.autocast around the step"),
        "autocast_dtype": (None, "set bf16 or fp16, or enter torch.autocast around the step"),
        "deterministic_mode": (False, "call core.device.compute_deterministically() before anything else"),
        "num_microbatches_with_partial_activation_checkpoints": (None, "use recompute_granularity"),
        "variable_seq_lengths": (False, _NO_STAGES),
    },
    ignored={
        "pipeline_model_parallel_comm_backend": None,
        "pipeline_dtype": None,
        "use_te_rng_tracker": False,
        "overlap_moe_expert_parallel_comm": False,
        "overlap_dispatch_backward_with_experts_wgrad": False,
        "ep_overlap_early_attn_memory_release": False,
        "delay_wgrad_compute": False,
        "overlap_p2p_comm": False,
        "overlap_p2p_comm_warmup_flush": False,
        "batch_p2p_comm": True,
        "batch_p2p_sync": True,
        "use_ring_exchange_p2p": False,
        "deallocate_pipeline_outputs": False,
        "defer_embedding_wgrad_compute": False,
        "wgrad_deferral_limit": 0,
        "microbatch_group_size_per_vp_stage": None,
        "mtp_standalone": False,
        "barrier_with_L1_time": True,
        "cpu_offloading": False,
    },
    accepted={
        "use_cpu_initialization": False,  # initial values are drawn on the CPU in any case
        # Set by a training loop, and read by core.pipeline_parallel:
        "timers": None,
        "finalize_model_grads_func": None,
        "grad_scale_func": None,
        "no_sync_func": None,
        "grad_sync_func": None,
        "param_sync_func": None,
        "moe_grad_scale_func": None,
        "mtp_grad_scale_func": None,
    },
    inert_prefixes=("tp_comm_", "cpu_offloading_"),
)


@takes_foreign_fields(_FOREIGN)
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
    """Ranks that share the matrices of every layer. 1: those of the tensor-parallel group."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages. Process groups support any number, models here only one."""

    context_parallel_size: int = 1
    """Ranks that share each sequence."""

    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer; they are among the data-parallel, context-parallel and tensor-parallel
    ranks."""

    expert_tensor_parallel_size: int | None = None
    """Ranks that share the matrices of each expert. None: `tensor_model_parallel_size`."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence (Korthikanti et al., 2022)."""

    fp16: bool = False
    """Compute in fp16; gradients need a loss scale."""

    bf16: bool = False
    """Compute in bf16."""

    params_dtype: torch.dtype = torch.float32
    """Dtype of parameters at construction. `Float16Module` casts them later; FSDP2 keeps them as the master copy."""

    perform_initialization: bool = True
    """Fill parameters with their initial values; if False, leave them uninitialised, for a checkpoint to fill."""

    calculate_per_token_loss: bool = False
    """Gradients are sums over tokens, scaled once by 1 / global token count, instead of means of means."""

    gradient_accumulation_fusion: bool = True
    """Compute a weight's gradient in the buffer of `DistributedDataParallel` while that is empty, and add only the
    rows of an embedding's gradient that are not zero: faster, with less memory, and bitwise equal. No effect without
    gradient buffers (FSDP2)."""

    cross_entropy_loss_fusion: bool = False
    """Fuse the loss as `cross_entropy_fusion_impl` says."""

    cross_entropy_fusion_impl: CrossEntropyFusion = "native"
    """With `cross_entropy_loss_fusion`: "linear" computes the projection to the vocabulary and its loss together, a
    part of the vocabulary at a time, so that logits never exist whole; backward computes them again. "native" changes
    nothing: the loss is one operation in any case. "te" is Transformer Engine's kernel, which is not used."""

    cross_entropy_fusion_vocab_chunk_size: int | None = None
    """Columns of the logits that exist at a time with "linear", on each tensor-parallel rank. None: as many as make
    2^20 elements on a CPU, where they stay in the cache, and 2^26 on a GPU."""

    def __post_init__(self) -> None:
        self._check_cross_entropy()
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

    @property
    def fuses_linear_cross_entropy(self) -> bool:
        """Whether logits never exist whole."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products: fp16, bf16, or that of the parameters."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else self.params_dtype
