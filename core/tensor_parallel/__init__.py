"""Splits matrices over tensor-parallel ranks: layers, mappings between regions, loss, random streams, initial
values."""

from ..absent_names import absent_names
from .cross_entropy import vocab_parallel_cross_entropy
from .data import broadcast_data
from .initialization import (
    ParameterOwner,
    deferred_initialization,
    draw_init_seed,
    initialize_parameters,
    initialize_unless_deferred,
)
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .random import (
    RNGStatesTracker,
    checkpoint,
    get_cuda_rng_tracker,
    get_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_manual_seed,
)
from .vocab import pad_vocab_size

__all__ = [
    "ColumnParallelLinear",
    "ParameterOwner",
    "RNGStatesTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "broadcast_data",
    "checkpoint",
    "copy_to_tensor_model_parallel_region",
    "deferred_initialization",
    "draw_init_seed",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_cuda_rng_tracker",
    "get_rng_tracker",
    "initialize_parameters",
    "initialize_unless_deferred",
    "model_parallel_cuda_manual_seed",
    "model_parallel_manual_seed",
    "pad_vocab_size",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "vocab_parallel_cross_entropy",
]

__getattr__ = absent_names(
    __name__,
    {
        **dict.fromkeys(
            [
                *("set_tensor_model_parallel_attributes", "copy_tensor_model_parallel_attributes"),
                "set_defaults_if_not_set_tensor_model_parallel_attributes",
            ],
            "set tensor_model_parallel, partition_dim and partition_stride on the parameter",
        ),
        "param_is_not_tensor_parallel_duplicate": "core.optimizer computes the norm, and counts each element once",
        "split_tensor_along_last_dim": "use torch.split",
        "split_tensor_into_1d_equal_chunks": "models here have one pipeline stage; use torch.chunk",
        "gather_split_1d_tensor": "models here have one pipeline stage; use torch.distributed.all_gather_single",
        "utils": "use torch.split, and core.tensor_parallel.vocab for the ids of a rank",
        "linear_with_grad_accumulation_and_async_allreduce": "use ColumnParallelLinear, whose backward overlaps both",
        "CheckpointWithoutOutput": "use checkpoint",
        "convert_cuda_rng_state": "use get_rng_tracker().get_states()",
        "get_expert_parallel_rng_tracker_name": "experts draw no random numbers",
        "get_data_parallel_rng_tracker_name": "replicas share the default stream; use torch's",
        "is_graph_safe_cuda_rng_tracker": "there is one kind of tracker; get_rng_tracker()",
        "all_to_all": "use torch.distributed.all_to_all_single",
        "all_gather_last_dim_from_tensor_parallel_region": "use gather_from_tensor_model_parallel_region",
        "reduce_scatter_last_dim_to_tensor_parallel_region": "use reduce_scatter_to_sequence_parallel_region",
    },
)
