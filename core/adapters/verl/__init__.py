"""Trains verl's models in this library's wrappers. Importing it registers the engine ``shardstack`` with verl.

settings     the engine's config: verl's for FSDP, with a sharding strategy
engine       the engines for language models and value heads, over verl's own for FSDP
routing      the experts of a mixture, recorded and replayed
exports      weights out of an engine: whole tensors, shards, and shards' changes
checkpoints  what verl saves and loads, in a folder that any strategy and number of ranks continues from
"""

from __future__ import annotations

from ..bridge.translation import check_version

check_version("verl", __name__)

from .engine import ShardstackEngineWithLMHead, ShardstackEngineWithValueHead  # noqa: E402
from .settings import ShardstackEngineConfig  # noqa: E402

__all__ = ["ShardstackEngineConfig", "ShardstackEngineWithLMHead", "ShardstackEngineWithValueHead"]
