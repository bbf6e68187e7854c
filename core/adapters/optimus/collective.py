"""The ranks that a transform works over."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import device
from ...errors import ParallelConfigError

_AXES = ("dp_replicate", "dp_shard", "tp")


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
    """All ranks, as a mesh ``(dp_replicate, dp_shard, tp)``. Missing arguments are read from the launcher's variables.

    Args:
        rank: this process's rank.
        world_size: number of ranks.
        local_world_size: number of ranks on a machine.
        local_rank: this process's rank on its machine.
        device_type: device type of the mesh.
        mesh: a mesh with these three axes; made here by default.
        process_group: a group of all ranks; the default group by default.
        tp_size: number of ranks that share each layer.
        sharding_world_size: number of ranks that share a parameter; by default the data-parallel ranks of a machine.

    Raises:
        ParallelConfigError: sizes that do not divide the ranks, or differ from what the process group has.
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
        local_rank: int | None = None,
        device_type: str | None = None,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sharding_world_size: int | None = None,
    ) -> None:
        device.init_process_group()
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        for name, given, found in (("rank", rank, self.rank), ("world_size", world_size, self.world_size)):
            if given not in (None, found):
                raise ParallelConfigError(f"{name} is {given}, but the process group has {found}; leave it out")
        self._local_world_size = local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        default_local_rank = os.environ.get("LOCAL_RANK", self.rank % self._local_world_size)
        self.local_rank = int(default_local_rank) if local_rank is None else local_rank
        self._group = dist.group.WORLD if process_group is None else process_group
        kind = device_type or device.device_type()
        self._mesh = self._make_mesh(kind, tp_size, sharding_world_size) if mesh is None else mesh
        if tuple(self._mesh.mesh_dim_names or ()) != _AXES:
            raise ParallelConfigError(f"the mesh has the axes {self._mesh.mesh_dim_names}; it takes {_AXES}")

    def _make_mesh(self, device_type: str, tp_size: int, sharding_world_size: int | None) -> DeviceMesh:
        shard_size = sharding_world_size or max(1, self._local_world_size // tp_size)
        if self.world_size % (shard_size * tp_size):
            raise ParallelConfigError(
                f"sharding_world_size {shard_size} times tp_size {tp_size} does not divide the {self.world_size} ranks"
            )
        shape = (self.world_size // (shard_size * tp_size), shard_size, tp_size)
        if self._group is dist.group.WORLD:
            return init_device_mesh(device_type, shape, mesh_dim_names=_AXES)
        ranks = torch.tensor(dist.get_process_group_ranks(self._group))
        return DeviceMesh(device_type, ranks.view(shape), mesh_dim_names=_AXES)

    @property
    def dp_mesh(self) -> DeviceMesh:
        """``(dp_replicate, dp_shard)``."""
        return self._mesh["dp_replicate", "dp_shard"]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """``(tp,)``."""
        return self._mesh["tp"]

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.tp_world_size

    @property
    def dp_rank(self) -> int:
        """This rank's place among them."""
        return self.rank // self.tp_world_size

    @property
    def tp_world_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.tp_mesh.size()

    @property
    def tp_rank(self) -> int:
        """This rank's place among them."""
        return self.rank % self.tp_world_size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return self._group

    @property
    def default_device(self) -> torch.device:
        """The device on which this process computes."""
        return device.current_device()
