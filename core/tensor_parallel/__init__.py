"""Splits matrices over tensor-parallel ranks: layers, mappings between regions, loss, random streams, initial
values."""

from ..base.initialization import draw_init_seed, initialize_parameters
from ..base.megatron_names import absent_names
from .cross_entropy import vocab_parallel_cross_entropy
from .data import broadcast_data
from .groups import pad_vocab_size
from .initialization import ParameterOwner, deferred_initialization, initialize_unless_deferred
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

__getattr__ = absent_names(__name__)
