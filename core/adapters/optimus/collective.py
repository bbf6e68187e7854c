"""What a transform needs to know of the ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import device
from ...errors import ParallelConfigError


class Collective:
    """One rank among several, or alone.

    Raises:
        ParallelConfigError: a rank that is not among them.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size:
            raise ParallelConfigError(f"rank is {rank} of a world of {world_size}; it takes 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks; None for one alone."""
        return None


class MeshCollective(Collective):
    """All ranks, as a mesh ``(dp_replicate, dp_shard, tp)``.

    Args:
        tp_size: ranks that share each layer.
        sharding_world_size: ranks that share a parameter; all data-parallel ones by default.
        process_group: all of these ranks; the default group, where none is given.

    Raises:
        ParallelConfigError: sizes that do not divide the ranks.
    """

    def __init__(
        self,
        *,
        tp_size: int = 1,
        sharding_world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        device.init_process_group()
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        self._group = dist.group.WORLD if process_group is None else process_group
        shard_size = sharding_world_size or max(1, self.world_size // tp_size)
        if self.world_size % (shard_size * tp_size):
            raise ParallelConfigError(
                f"sharding_world_size {shard_size} times tp_size {tp_size} does not divide the {self.world_size} ranks"
            )
        shape = (self.world_size // (shard_size * tp_size), shard_size, tp_size)
        names = ("dp_replicate", "dp_shard", "tp")
        if process_group is None:
            self._mesh = init_device_mesh(device.device_type(), shape, mesh_dim_names=names)
        else:
            ranks = dist.get_process_group_ranks(process_group)
            laid_out = [ranks[i : i + tp_size] for i in range(0, len(ranks), tp_size)]
            rows = [laid_out[i : i + shard_size] for i in range(0, len(laid_out), shard_size)]
            self._mesh = DeviceMesh(device.device_type(), rows, mesh_dim_names=names)

    @property
    def dp_mesh(self) -> DeviceMesh:
        """``(dp_replicate, dp_shard)``."""
        return self._mesh["dp_replicate", "dp_shard"]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """``(tp,)``."""
        return self._mesh["tp"]

    @property
    def mesh(self) -> DeviceMesh:
        """All three axes."""
        return self._mesh

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.tp_mesh.size()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return self._group
