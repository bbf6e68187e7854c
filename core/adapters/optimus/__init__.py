"""Optimus-dl's distributed model transforms, on this library's engines."""

from .collective import Collective, MeshCollective
from .config import DDPTransformConfig, FullyShardTransformConfig, MixedPrecisionConfig, OffloadConfig
from .transforms import BaseDistributedTransform, DDPTransform, DDPWrappedModel, FullyShardTransform

__all__ = [
    "BaseDistributedTransform",
    "Collective",
    "DDPTransform",
    "DDPTransformConfig",
    "DDPWrappedModel",
    "FullyShardTransform",
    "FullyShardTransformConfig",
    "MeshCollective",
    "MixedPrecisionConfig",
    "OffloadConfig",
]
