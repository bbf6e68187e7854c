"""Oumi's `FSDPParams`, and `prepare_model`, which wraps a model by these settings in this library's wrappers."""

from .model import load_model_state_dict, model_state_dict, prepare_model
from .params import AutoWrapPolicy, BackwardPrefetch, FSDPParams, ShardingStrategy, StateDictType

__all__ = [
    "AutoWrapPolicy",
    "BackwardPrefetch",
    "FSDPParams",
    "ShardingStrategy",
    "StateDictType",
    "load_model_state_dict",
    "model_state_dict",
    "prepare_model",
]
