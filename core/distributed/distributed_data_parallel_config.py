"""What a data-parallel wrapper is told, apart from the model's own config."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ParallelConfigError

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Replicated, ZeRO-1, ZeRO-2 and ZeRO-3 (Rajbhandari et al., 2020), with Megatron's names."""


@dataclass(kw_only=True)
class DistributedDataParallelConfig:
    """Settings of a data-parallel wrapper; field names are Megatron-LM's.

    A wrapper that cannot honour a field raises, or warns once where ignoring it changes no number.

    Raises:
        ParallelConfigError: settings that contradict each other; the message names both.
    """

    grad_reduce_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32, whatever the dtype of the parameters."""

    overlap_grad_reduce: bool = False
    """Reduce a bucket of gradients while the backward of earlier layers still runs."""

    overlap_param_gather: bool = False
    """Gather parameters while the forward of earlier layers still runs."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer state; alone it means the strategy ``optim``."""

    num_distributed_optimizer_instances: int = 1
    """Shard within ``dp / instances`` ranks and replicate across instances (hybrid sharding) when above one."""

    check_for_nan_in_grad: bool = False
    """Raise, naming rank and parameter, when a gradient is not finite."""

    bucket_size: int | None = None
    """Most elements, not bytes, that one gradient collective carries; None leaves the choice to the wrapper."""

    average_in_collective: bool = False
    """Let the collective divide (``ReduceOp.AVG``) instead of scaling gradients before a sum."""

    data_parallel_sharding_strategy: str = "no_shard"
    """What is sharded: ``no_shard``, ``optim``, ``optim_grads`` or ``optim_grads_params``."""

    def __post_init__(self) -> None:
        if self.data_parallel_sharding_strategy not in SHARDING_STRATEGIES:
            raise ParallelConfigError(
                f"data_parallel_sharding_strategy is {self.data_parallel_sharding_strategy!r}; "
                f"it takes one of {', '.join(SHARDING_STRATEGIES)}"
            )
        if self.num_distributed_optimizer_instances < 1:
            raise ParallelConfigError(
                f"num_distributed_optimizer_instances is {self.num_distributed_optimizer_instances}; "
                "it takes a positive number that divides the data-parallel size"
            )
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ParallelConfigError(f"bucket_size is {self.bucket_size}; it takes a positive number of elements")

    @property
    def sharding_strategy(self) -> str:
        """The strategy after ``use_distributed_optimizer``, which alone means ``optim``, has had its say."""
        if self.use_distributed_optimizer and self.data_parallel_sharding_strategy == "no_shard":
            return "optim"
        return self.data_parallel_sharding_strategy
