"""The decoder-only language model."""

from .gpt_layer_specs import get_gpt_layer_local_spec
from .gpt_model import GPTModel

__all__ = ["GPTModel", "get_gpt_layer_local_spec"]
