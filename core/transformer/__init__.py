"""Transformer layers, pre-norm, tensor and sequence parallel, under the names of Megatron-LM's local layer spec."""

from .context_parallel import own_chunks, own_positions
from .module import Float16Module, MegatronModule, materialize
from .transformer_block import TransformerBlock
from .transformer_config import TransformerConfig
from .transformer_layer import TransformerLayer

__all__ = [
    "Float16Module",
    "MegatronModule",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLayer",
    "materialize",
    "own_chunks",
    "own_positions",
]
