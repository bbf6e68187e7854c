"""Checkpoints of trainings, and of tensors of any layout. Knows modules and optimizers by the names of their state."""

from ..base.megatron_names import absent_names
from .format.folders import Retention, checkpoint_directory, latest_checkpoint
from .global_view import FlatRange, flat_range_view, global_shape, global_view, local_slices, local_tensor
from .loading import load, load_metadata, verify
from .model_state import ShardedStateDict, load_model_state_dict, model_state_dict
from .run_state import RunState, load_training, load_weights, save_training
from .saving import AsyncSaver, save

__all__ = [
    "AsyncSaver",
    "FlatRange",
    "Retention",
    "RunState",
    "ShardedStateDict",
    "checkpoint_directory",
    "flat_range_view",
    "global_shape",
    "global_view",
    "latest_checkpoint",
    "load",
    "load_metadata",
    "load_model_state_dict",
    "load_training",
    "load_weights",
    "local_slices",
    "local_tensor",
    "model_state_dict",
    "save",
    "save_training",
    "verify",
]

__getattr__ = absent_names(__name__)
