"""shardstack: data parallelism for large transformer stacks, from replicated to fully sharded by one class swap.

Nothing is imported here: take what you need from the sub-packages (``core.distributed``, ``core.models.gpt``,
``core.optimizer``, ``core.parallel_state``), each of which needs torch and numpy alone.
"""

__version__ = "0.1.0"
