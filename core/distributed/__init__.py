"""Data parallelism: one interface, several wrappers, and the numbers do not change between them."""

from ..base.megatron_names import absent_names
from .data_parallel_base import _BaseDataParallel
from .distributed_data_parallel import DistributedDataParallel
from .distributed_data_parallel_config import DistributedDataParallelConfig
from .finalize_model_grads import finalize_model_grads
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .fully_sharded_data_parallel_config import FullyShardedDataParallelConfig
from .torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from .torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig
from .wrap import wrap_model

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FullyShardedDataParallel",
    "FullyShardedDataParallelConfig",
    "TorchFullyShardedDataParallel",
    "TorchFullyShardedDataParallelConfig",
    "_BaseDataParallel",
    "finalize_model_grads",
    "wrap_model",
]

__getattr__ = absent_names(__name__)
