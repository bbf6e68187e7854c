"""Models built from `shardstack.transformer`."""

from ..base.megatron_names import absent_names

__getattr__ = absent_names(__name__)
