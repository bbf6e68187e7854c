"""The settings of FSDP2, by the path that Megatron-LM's scripts import them from."""

from .fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig

__all__ = ["TorchFullyShardedDataParallelConfig"]
