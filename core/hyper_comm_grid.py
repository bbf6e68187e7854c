"""Makes process groups along the axes of a grid of ranks, one at a time: Megatron-LM's HyperCommGrid."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .errors import ParallelConfigError, ParallelStateError
from .process_groups.rank_generator import rank_groups


class HyperCommGrid:
    """A world divided along named axes; the first has stride 1.

        grid = HyperCommGrid([2, 4], ["tp", "dp"])
        tp, dp = grid.create_pg("tp"), grid.create_pg("dp")

    Args:
        shape: size of each axis.
        dim_names: name of each axis.
        rank_offset: first rank of the grid.
        backend: backend of its groups; None means the default group's.

    Raises:
        ParallelStateError: `torch.distributed` is not initialised.
        ParallelConfigError: there are not as many names as sizes, or the grid exceeds the world.
    """

    def __init__(
        self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        if not dist.is_initialized():
            raise ParallelStateError(
                "torch.distributed is not initialised; call core.device.init_process_group() first"
            )
        if len(shape) != len(dim_names) or len(set(dim_names)) != len(dim_names):
            raise ParallelConfigError(f"a grid of shape {list(shape)} has the axes {list(dim_names)}; name each once")
        self.size = prod(shape)
        if rank_offset < 0 or rank_offset + self.size > dist.get_world_size():
            raise ParallelConfigError(
                f"a grid of {self.size} ranks from rank {rank_offset} on does not fit {dist.get_world_size()} ranks"
            )
        self.shape, self.dim_names = list(shape), list(dim_names)
        self.rank_offset, self.backend = rank_offset, backend
        self._groups: dict[tuple[str, ...], ProcessGroup | None] = {}  # this rank's, by axes; `create_pg` adds

    def create_pg(self, dims: str | Sequence[str], **kwargs: Any) -> ProcessGroup | None:
        """Makes the groups along one or several axes; all ranks of the world call it in the same order.

        Args:
            dims: one name, or several.
            kwargs: arguments of `torch.distributed.new_group`.

        Returns:
            This rank's group; None for a rank outside of the grid.

        Raises:
            ParallelConfigError: an axis is unknown, or the groups exist already.
        """
        key = self._key(dims)
        if key in self._groups:
            raise ParallelConfigError(f"groups along {'-'.join(key)} exist already; get_pg returns this rank's")
        self._groups[key] = None
        for ranks in self.get_rank_enum(dims):
            group = dist.new_group(ranks, backend=self.backend, **kwargs)
            if dist.get_rank() in ranks:
                self._groups[key] = group
        return self._groups[key]

    def get_pg(self, dims: str | Sequence[str]) -> ProcessGroup | None:
        """Returns the group that `create_pg` made for these axes.

        Raises:
            ParallelConfigError: it was not called.
        """
        key = self._key(dims)
        if key not in self._groups:
            raise ParallelConfigError(f"no groups along {'-'.join(key)} exist; all ranks call create_pg first")
        return self._groups[key]

    def get_rank_enum(self, dims: str | Sequence[str]) -> list[list[int]]:
        """Returns the ranks of every group along these axes."""
        sizes = dict(zip(self.dim_names, self.shape, strict=True))
        return [[self.rank_offset + rank for rank in ranks] for ranks in rank_groups(sizes, self._key(dims))]

    def _key(self, dims: str | Sequence[str]) -> tuple[str, ...]:
        asked = [dims] if isinstance(dims, str) else list(dims)
        if unknown := [name for name in asked if name not in self.dim_names]:
            raise ParallelConfigError(f"the grid has no axis {unknown[0]!r}; it has {self.dim_names}")
        return tuple(name for name in self.dim_names if name in asked)
