"""shardstack: data parallelism for large transformer stacks, from replicated to fully sharded by one class swap.

Nothing is imported here until it is used. Take what you need from the sub-packages (``core.distributed``,
``core.models.gpt``, ``core.optimizer``, ``core.parallel_state``), each of which needs torch and numpy alone.
"""

from .base.megatron_names import absent_names

__version__ = "0.1.0"

__getattr__ = absent_names(
    __name__,
    import_paths={"ModelParallelConfig": "core.model_parallel_config", "DistributedDataParallel": "core.distributed"},
)
