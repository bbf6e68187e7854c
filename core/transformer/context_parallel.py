"""Splits sequences over context-parallel ranks: each has its chunks, and attention sees all ranks' keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import parallel_state
from ..base.errors import DataError
from ..tensor_parallel.groups import Group, group_size
from ..tensor_parallel.partition import gather_first_dim, reduce_scatter_first_dim
from .document_masks import chunk_places, chunks_of_rank


def own_chunks(tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Returns this rank's chunks of a tensor that every context-parallel rank has for the whole sequence.

    Args:
        tensor: has the sequence along `dim`: `[b, s]` becomes `[b, s / cp]`.

    Raises:
        DataError: the sequence does not divide into two chunks per rank.
    """
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tensor
    length = tensor.shape[dim]
    if length % (2 * size):
        below = length // (2 * size) * 2 * size
        raise DataError(
            f"a sequence of {length} tokens does not divide into the {2 * size} chunks of {size} context-parallel "
            f"ranks; take {f'{below} or ' if below else ''}{below + 2 * size}"
        )
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat([chunks[i] for i in chunks_of_rank(parallel_state.get_context_parallel_rank(), size)], dim)


def own_positions(length: int, device: torch.device) -> torch.Tensor:
    """Returns the positions in the whole sequence, `[s / cp]`, of this rank's `length` tokens."""
    size = parallel_state.get_context_parallel_world_size()
    return own_chunks(torch.arange(length * size, device=device), 0)


def gather_sequence(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Gathers the chunks `[s / cp, ...]` of all ranks in the order of the sequence, `[s, ...]`. Backward
    reduce-scatters."""
    return tensor if group_size(group) == 1 else _GatherSequence.apply(tensor, group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _in_sequence(gather_first_dim(tensor, group, what="the sequence")[0], group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        by_rank = _by_rank(grad, ctx.group)
        return reduce_scatter_first_dim(by_rank, ctx.group, what="the gradient of the sequence")[0], None


class GatheringKeys:
    """Gathers keys and values of all ranks in one collective."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, group: Group) -> None:
        # The collective under way; None for a rank alone, whose result is `own`. Fixed after the constructor.
        self.group, self.own, self.work = group, (key, value), None
        if group is not None and group_size(group) > 1:
            # Owns the gathered memory `[ranks x s, 2, ...]` until `wait`, which drops it; there only with `work`.
            self.both, self.work = gather_first_dim(
                torch.stack((key, value), 1), group, what="keys and values", async_op=True
            )

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits, and returns keys and values, `[s, b, groups, d]`, in the order of the sequence."""
        if self.work is None or self.group is None:
            return self.own
        self.work.wait()
        key, value = _in_sequence(self.both, self.group).unbind(1)
        del self.both
        return key, value


class ScatteringGradients:
    """Reduce-scatters gradients of all keys and values, `[s, 2, b, groups, d]`, to the ranks that have these."""

    def __init__(self, grad: torch.Tensor, group: Group) -> None:
        # The result, `[s / cp, 2, b, groups, d]`, valid after `wait`; and its collective, None for a rank alone.
        self.both, self.work = grad, None
        if group is not None and group_size(group) > 1:
            self.both, self.work = reduce_scatter_first_dim(
                _by_rank(grad, group), group, what="the gradient of keys and values", async_op=True
            )

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Waits, and returns the gradients of this rank's keys and values, `[s / cp, b, groups, d]` each."""
        if self.work is not None:
            self.work.wait()
        return self.both.unbind(1)


def _in_sequence(by_rank: torch.Tensor, group: Group) -> torch.Tensor:
    """Reorders `[s, ...]` from the order of ranks and their chunks to that of the sequence."""
    size = group_size(group)
    chunks = by_rank.chunk(2 * size)
    return torch.cat([chunks[place] for place in chunk_places(size)])


def _by_rank(in_sequence: torch.Tensor, group: Group) -> torch.Tensor:
    """Reorders `[s, ...]` from the order of the sequence to that of ranks and their chunks."""
    size = group_size(group)
    chunks = in_sequence.chunk(2 * size)
    return torch.cat([chunks[chunk] for rank in range(size) for chunk in chunks_of_rank(rank, size)])
