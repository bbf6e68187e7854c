"""What a rank has of sequences: its chunks under context parallelism, and the documents packed into them.

Context parallelism splits a sequence into 2 x cp chunks. Rank r has chunks r and 2 x cp - 1 - r, concatenated: under a
causal mask every rank then has the same work (as in Megatron-LM). Attention sees the keys of all ranks. Documents
packed into a sequence split it further, because they must not see each other. Each piece of a rank's queries is
computed by one call of a causal kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import parallel_state
from ..base.device import current_device
from ..base.errors import DataError
from ..base.text import nearest_multiples
from ..comm import streams
from ..comm.call import Wait
from ..tensor_parallel.groups import Group, gather_first_dim, group_size, reduce_scatter_first_dim


def chunks_of_rank(rank: int, size: int) -> tuple[int, ...]:
    """Returns the chunks of the sequence that a context-parallel rank has, in order: (0,) if it is the only rank."""
    return (0,) if size == 1 else (rank, 2 * size - 1 - rank)


def chunk_places(size: int) -> list[int]:
    """Returns, for each chunk in the order of the sequence, its index among the concatenated chunks of all ranks."""
    chunks = [chunk for rank in range(size) for chunk in chunks_of_rank(rank, size)]
    return sorted(range(len(chunks)), key=chunks.__getitem__)


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
        raise DataError(
            f"a sequence of {length} tokens does not divide into the {2 * size} chunks of {size} context-parallel "
            f"ranks; take {nearest_multiples(length, 2 * size)}"
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


def start_gathering_keys(
    key: torch.Tensor, value: torch.Tensor, group: Group
) -> Wait[tuple[torch.Tensor, torch.Tensor]]:
    """Starts to gather keys and values of all ranks in one collective.

    Returns:
        the wait for keys and values, `[s, b, groups, d]`, in the order of the sequence.
    """
    if group is None or group_size(group) == 1:
        return lambda: (key, value)
    both = torch.stack((key, value), 1)
    gathered, work = gather_first_dim(both, group, what="keys and values", async_op=True)
    memory = [gathered]  # `[ranks x s, 2, ...]`, which the wait drops

    def wait() -> tuple[torch.Tensor, torch.Tensor]:
        if work is not None:
            work.wait()
        whole_key, whole_value = _in_sequence(memory.pop(), group).unbind(1)
        return whole_key, whole_value

    return wait


def start_scattering_gradients(grad: torch.Tensor, group: Group) -> Wait[tuple[torch.Tensor, ...]]:
    """Starts to reduce-scatter gradients of all keys and values, `[s, 2, b, groups, d]`, to the ranks that have these.

    Returns:
        the wait for the gradients of this rank's keys and values, `[s / cp, b, groups, d]` each.
    """
    if group is None or group_size(group) == 1:
        return lambda: grad.unbind(1)
    what = "the gradient of keys and values"
    own, work = reduce_scatter_first_dim(_by_rank(grad, group), group, what=what, async_op=True)

    def wait() -> tuple[torch.Tensor, ...]:
        if work is not None:
            work.wait()
        return own.unbind(1)

    return wait


@dataclass(frozen=True)
class QueryPiece:
    """Consecutive queries that see all keys of one earlier range, and each other causally."""

    rows: slice
    """Range of rows of the batch."""
    queries: slice
    """Range in this rank's part of the sequence."""
    before: slice
    """Range of the earlier keys in the whole sequence. May be empty."""


def causal_pieces(length: int, rank: int = 0, size: int = 1) -> list[QueryPiece]:
    """Returns the pieces of a rank's `length` queries if every query sees all keys before it.

    Raises:
        DataError: under context parallelism, the length is not two equal chunks.
    """
    return [QueryPiece(slice(None), queries, slice(0, start)) for queries, start in _chunks(length, rank, size)]


class PackedDocuments:
    """The starts of documents packed into a batch, as data for a layer.

    Neither a number nor the shape of a tensor depends on the layout, so that a layer is compiled once for all of them.
    Not a tensor or a list, so that what moves a model's inputs to its device (FSDP2) passes it on as it is.

    Args:
        document_starts, rank, size: arguments of `document_pieces`.

    Raises:
        DataError: see `document_pieces`.
    """

    starts: torch.Tensor
    """`[b, s / cp]`, on the host: for each token the position in the whole sequence at which its document begins."""
    bounds: torch.Tensor | None
    """`[b * s + 1]` in int32, on this process's device: start of each document in the concatenated rows of the batch,
    then the total length, which also pads it. None under context parallelism."""
    counts: torch.Tensor
    """`[2]`, on the host: number of documents in `bounds`, and tokens of the longest."""

    def __init__(self, document_starts: torch.Tensor, rank: int = 0, size: int = 1) -> None:
        self.starts = document_starts.cpu()
        document_pieces(self.starts, rank, size)  # validates
        begins = torch.ones_like(self.starts, dtype=torch.bool)
        begins[:, 1:] = self.starts[:, 1:] != self.starts[:, :-1]
        ends = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([begins.numel()], device="cpu")])
        self.counts = torch.stack([torch.tensor(len(ends) - 1, device="cpu"), ends.diff().max()])
        self.bounds = None
        if size == 1:
            bounds = torch.full((begins.numel() + 1,), begins.numel(), dtype=torch.int32, device="cpu")
            bounds[: len(ends)] = ends
            self.bounds = _on_device(bounds)


def document_pieces(document_starts: torch.Tensor, rank: int = 0, size: int = 1) -> tuple[QueryPiece, ...]:
    """Returns the pieces of a rank's queries if no query sees another document.

    Remembers its last results: each layer asks for the same batch, in forward and in backward.

    Args:
        document_starts: `[b, s / cp]`, for each token of this rank the position in the whole sequence at which its
            document begins. On the host.

    Raises:
        DataError: a length as in `causal_pieces`, or a document that begins after one of its tokens.
    """
    starts = document_starts.numpy().astype(np.int32)
    return _pieces_of(starts.tobytes(), *starts.shape, rank, size)


# All layers of a micro-batch ask for one entry, in forward and in backward. Training and an evaluation in between, or
# several layouts in use at once, have an entry each; more would only keep old layouts.
@lru_cache(maxsize=4)
def _pieces_of(document_starts: bytes, rows: int, length: int, rank: int, size: int) -> tuple[QueryPiece, ...]:
    starts = np.frombuffer(document_starts, dtype=np.int32).reshape(rows, length)
    if not starts.any():
        return tuple(causal_pieces(length, rank, size))
    pieces = []
    for queries, start in _chunks(length, rank, size):
        of_chunk = starts[:, queries]
        late = of_chunk > np.arange(start, start + of_chunk.shape[1])
        if late.any():
            row, column = np.argwhere(late)[0]
            raise DataError(
                f"document_starts says that the token at position {start + column} of row {row} belongs to a document "
                f"that begins behind it, at {of_chunk[row, column]}; give positions in the whole sequence"
            )
        for row in range(rows):
            changes = np.flatnonzero(np.diff(of_chunk[row])) + 1
            for first, last in pairwise([0, *changes.tolist(), of_chunk.shape[1]]):
                begin = int(of_chunk[row, first])
                own = slice(queries.start + first, queries.start + last)
                pieces.append(QueryPiece(slice(row, row + 1), own, slice(begin, max(begin, start))))
    return tuple(pieces)


def visible_keys(document_starts: torch.Tensor | None, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Returns a mask `[b or 1, 1, s / cp, s]`, True where a query sees a key, for devices without a fused kernel.

    Args:
        document_starts: `[b, s / cp]`, as in `document_pieces`; None without documents.
        positions: `[s / cp]`, positions of the queries in the whole sequence of `length` tokens.
    """
    keys = torch.arange(length, device=positions.device)
    visible = keys <= positions[:, None]
    if document_starts is None:
        return visible[None, None]
    starts = document_starts.to(positions.device, non_blocking=True)
    return (visible & (keys >= starts[..., None])).unsqueeze(1)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    device = current_device()
    if streams.is_asynchronous(device):
        return streams.pinned(tensor.shape, tensor.dtype).copy_(tensor).to(device, non_blocking=True)
    return tensor


def _chunks(length: int, rank: int, size: int) -> Sequence[tuple[slice, int]]:
    """Returns each chunk's range in the rank's part, and its start in the whole sequence."""
    numbers = chunks_of_rank(rank, size)
    if length % len(numbers):
        raise DataError(
            f"a context-parallel rank holds two equal chunks of a sequence, and {length} tokens are not; take a whole "
            f"sequence of a multiple of {2 * size} tokens and split it with shardstack.transformer.own_chunks"
        )
    chunk = length // len(numbers)
    return [(slice(i * chunk, (i + 1) * chunk), number * chunk) for i, number in enumerate(numbers)]


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


def _in_sequence(by_rank: torch.Tensor, group: Group) -> torch.Tensor:
    """Reorders `[s, ...]` from the order of ranks and their chunks to the sequence's order."""
    size = group_size(group)
    chunks = by_rank.chunk(2 * size)
    return torch.cat([chunks[place] for place in chunk_places(size)])


def _by_rank(in_sequence: torch.Tensor, group: Group) -> torch.Tensor:
    """Reorders `[s, ...]` from the sequence's order to the order of ranks and their chunks."""
    size = group_size(group)
    chunks = in_sequence.chunk(2 * size)
    return torch.cat([chunks[chunk] for rank in range(size) for chunk in chunks_of_rank(rank, size)])
