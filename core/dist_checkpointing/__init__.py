"""Checkpoints and global views of tensors that ranks hold in pieces; knows tensors and meshes, never models."""

from .global_view import global_shape, global_view, local_slices, local_tensor

__all__ = ["global_shape", "global_view", "local_slices", "local_tensor"]
