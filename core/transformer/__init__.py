"""Pre-norm transformer layers with tensor and sequence parallelism, named as in Megatron-LM's local layer spec."""

from ..absent_names import absent_names
from .context_parallel import own_chunks, own_positions
from .module import Float16Module, MegatronModule, materialize
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

_ATTENTION = "layers here have multi-head or grouped-query attention; TransformerConfig"

__getattr__ = absent_names(
    __name__,
    {
        "MLATransformerConfig": _ATTENTION,
        "multi_latent_attention": _ATTENTION,
        "experimental_attention_variant": _ATTENTION,
        "multi_token_prediction": "models here predict the next token alone",
        "cuda_graphs": "no step is captured in a graph",
        "custom_layers": "Transformer Engine is not used; core.transformer's layers",
        "heterogeneous": "all layers have one config; give TransformerBlockSubmodules layer_specs that differ",
    },
)
