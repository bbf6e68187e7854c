"""Pre-norm transformer layers with tensor and sequence parallelism, named as in Megatron-LM's local layer spec."""

from ..base.megatron_names import absent_names
from .module import Float16Module, MegatronModule, materialize
from .sequences import own_chunks, own_positions
from .spec_utils import ModuleSpec, build_module
from .transformer_block import TransformerBlock, TransformerBlockSubmodules
from .transformer_config import TransformerConfig
from .transformer_layer import TransformerLayer, TransformerLayerSubmodules

__all__ = [
    "Float16Module",
    "MegatronModule",
    "ModuleSpec",
    "TransformerBlock",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "build_module",
    "materialize",
    "own_chunks",
    "own_positions",
]


__getattr__ = absent_names(__name__)
