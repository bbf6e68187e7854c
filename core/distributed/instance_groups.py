"""The process groups of hybrid sharding: within an optimizer instance, and across instances."""

from __future__ import annotations

import torch.distributed as dist

from .. import parallel_state
from ..errors import ParallelConfigError
from .distributed_data_parallel_config import DistributedDataParallelConfig


def resolve_instance_groups(
    ddp_config: DistributedDataParallelConfig, process_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup | None]:
    """All replicas, those of this optimizer instance, and where there are several the same shard's owners in each.

    Raises:
        ParallelConfigError: a number of instances that does not divide the replicas, or for which no groups exist.
    """
    asked = ddp_config.num_distributed_optimizer_instances
    if process_group is not None:
        if asked > 1:
            raise ParallelConfigError(
                f"num_distributed_optimizer_instances is {asked} with a process_group given, which has one axis; "
                "drop one of the two"
            )
        return process_group, process_group, None
    whole = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if asked == 1:
        return whole, whole, None
    if whole.size() % asked:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances {asked} does not divide the data-parallel size {whole.size()}; "
            "choose a divisor of it"
        )
    part = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    if whole.size() // part.size() != asked:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances is {asked}, but core.parallel_state was initialised with "
            f"{whole.size() // part.size()}; give both the same number"
        )
    return whole, part, parallel_state.get_inter_distributed_optimizer_instance_group()
