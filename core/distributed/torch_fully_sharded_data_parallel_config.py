"""The settings that PyTorch FSDP2 has beyond those of every wrapper."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ParallelConfigError
from .distributed_data_parallel_config import DistributedDataParallelConfig


@dataclass(kw_only=True)
class TorchFullyShardedDataParallelConfig(DistributedDataParallelConfig):
    """Settings of :class:`TorchFullyShardedDataParallel`; giving one to `wrap_model` chooses that wrapper."""

    data_parallel_sharding_strategy: str = "optim_grads_params"
    """Parameters, gradients and optimizer state are sharded; there is no other value."""

    reshard_after_forward: bool = True
    """Free a unit's gathered parameters after its forward and gather them again for its backward.

    The last unit and the root stay gathered in between, because backward begins with them.
    """

    sync_module_states: bool = True
    """Broadcast parameters and buffers from data-parallel rank 0 before sharding.

    FSDP2 cuts each rank's own copy, so that replicas that differed would become a mixture; this makes that
    impossible, at the cost of one broadcast of the model at construction.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, other in (
            ("data_parallel_sharding_strategy", "optim_grads_params"),
            ("use_distributed_optimizer", False),
        ):
            if getattr(self, field) != other:
                raise ParallelConfigError(
                    f"{field} is {getattr(self, field)!r} in a TorchFullyShardedDataParallelConfig, which shards "
                    "parameters, gradients and optimizer state; drop it, or use a DistributedDataParallelConfig"
                )
