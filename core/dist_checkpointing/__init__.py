"""Checkpoints and global views of sharded tensors. Knows tensors and meshes, never models."""

from ..base.megatron_names import absent_names
from .format.folders import Retention, checkpoint_directory, latest_checkpoint
from .global_view import FlatRange, flat_range_view, global_shape, global_view, local_slices, local_tensor
from .loading import load, load_metadata, verify
from .model_state import ShardedStateDict, load_model_state_dict, model_state_dict
from .saving import AsyncSaver, save

__all__ = [
    "AsyncSaver",
    "FlatRange",
    "Retention",
    "ShardedStateDict",
    "checkpoint_directory",
    "flat_range_view",
    "global_shape",
    "global_view",
    "latest_checkpoint",
    "load",
    "load_metadata",
    "load_model_state_dict",
    "local_slices",
    "local_tensor",
    "model_state_dict",
    "save",
    "verify",
]

__getattr__ = absent_names(__name__)
