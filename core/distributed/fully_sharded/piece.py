"""A unit's parameters of one dtype and device: contiguous memory, sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...comm import collectives


@dataclass(eq=False)
class Piece:
    """A unit's parameters of one dtype and device: contiguous in the slot, sharded evenly over ranks."""

    params: Sequence[nn.Parameter]
    names: Sequence[str]
    ranges: Sequence[tuple[int, int]]
    """``[start, end)`` of each parameter in `whole`."""
    shard: Tensor
    """`[numel / num_shards]`, this rank's shard, which an optimizer writes. A view of `ShardedBuffer.shards`."""
    whole: Tensor
    """`[numel]`, the slot's memory that the parameters are views of, in the dtype of computation. It is `shard` itself
    if a single rank has all parameters in that dtype."""

    def place_params(self, memory: Tensor, skip: Callable[[Tensor], bool] | None = None) -> None:
        """Makes the parameters views of `memory` `[numel]`, except those for which `skip` is true."""
        for param, (start, end) in zip(self.params, self.ranges, strict=True):
            if skip is None or not skip(param):
                param.data = memory[start:end].view(param.shape)

    def gather(self, into: Tensor, group: ProcessGroup, what: str) -> None:
        """All-gathers the shards into `into` `[numel]`, cast to the dtype of `into`."""
        own, is_alone = self.shard, collectives.is_alone(group)
        if (own.dtype, own.device) != (into.dtype, into.device) or is_alone:
            own = into.chunk(group.size())[group.rank()].copy_(own, non_blocking=True)  # a cast takes no memory there
        if not is_alone:
            collectives.all_gather(into, own, group, what=what)

    def local_ranges(self, rank: int) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
        """Yields for each parameter: the parameter, this rank's elements of it (flat), and the first one's index."""
        length = self.shard.numel()
        begin = length * rank
        for param, (start, end) in zip(self.params, self.ranges, strict=True):
            first, last = max(start, begin), min(end, begin + length)
            if first < last:
                yield param, self.shard[first - begin : last - begin], first - start
            else:
                yield param, self.shard[:0], 0
