"""Runs transformers' Trainer and accelerate's loops on this library's wrappers, by the one call `use_shardstack`."""

from ..bridge.translation import check_version

check_version("accelerate", __name__)

from .plugin import ShardstackPlugin  # noqa: E402
from .use import use_shardstack  # noqa: E402

__all__ = ["ShardstackPlugin", "use_shardstack"]
