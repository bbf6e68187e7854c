"""Splits sequences over context-parallel ranks: each computes with its chunks, and attention sees all ranks' keys.

Keys and values are all-gathered in forward and again in backward, so that a rank saves only its own; their gradients
are reduce-scattered. The attention of a chunk's queries to its own keys is computed during the gather. No mask and no
scores are ever in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import parallel_state
from ..errors import DataError
from ..tensor_parallel.first_dim import gather_first_dim, reduce_scatter_first_dim
from ..tensor_parallel.groups import Group, group_size
from .attention_kernels import Attended, attend, attend_backward, combine
from .document_masks import Piece, chunk_places, chunks_of_rank


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


def attend_in_pieces(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[Piece],
    dropout: float = 0.0,
    group: Group = None,
) -> torch.Tensor:
    """Computes attention of this rank's queries to the keys of all ranks, restricted by `pieces`.

    Args:
        query: `[s / cp, b, heads, d]`.
        key, value: `[s / cp, b, groups, d]`.
        dropout: probability; drawn from torch's default stream.
        group: the context-parallel ranks; None is one rank, with the whole sequence.

    Returns:
        `[s / cp, b, heads, d]`.
    """
    output: torch.Tensor = _PiecewiseAttention.apply(query, key, value, pieces, dropout, group)
    return output


def gather_sequence(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Gathers the chunks `[s / cp, ...]` of all ranks in the order of the sequence, `[s, ...]`; backward
    reduce-scatters."""
    return tensor if group_size(group) == 1 else _GatherSequence.apply(tensor, group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _in_sequence(gather_first_dim(tensor, group)[0], group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_first_dim(_by_rank(grad, ctx.group), ctx.group)[0], None


class _PiecewiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pieces: Sequence[Piece],
        dropout: float,
        group: Group,
    ) -> torch.Tensor:
        gathering = _Gathering(key, value, group)
        found = [_attend(query, key, value, piece, dropout) for piece in pieces]
        whole_key, whole_value = gathering.wait()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # [s / cp, b, heads, d]
        logsumexp = found[0].logsumexp.new_empty(query.shape[1], query.shape[2], query.shape[0])  # [b, heads, s / cp]
        random = []
        for piece, own in zip(pieces, found, strict=True):
            both, before = own, None
            if _sees_before(piece):
                keys, values = (_heads_first(t[piece.before, piece.rows]) for t in (whole_key, whole_value))
                before = attend(_queries(query, piece), keys, values, causal=False, dropout=dropout)
                both = combine(before, own)
            _queries(output, piece).copy_(both.output)
            logsumexp[piece.rows, :, piece.queries] = both.logsumexp
            random.append((own.random, () if before is None else before.random))
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.pieces, ctx.random, ctx.dropout, ctx.group = pieces, random, dropout, group
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gathers, with half of the pieces' own keys meanwhile; then keys before them; reduce-scatters, with the
        rest."""
        query, key, value, output, logsumexp = ctx.saved_tensors
        grad = grad.contiguous()
        grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        grad_key, grad_value = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (key, value))

        def add(piece: Piece, keys: torch.Tensor, values: torch.Tensor, causal: bool, random: Any) -> Any:
            """Adds to the gradient of a piece's queries; returns the gradients of these keys and values."""
            found = Attended(_queries(output, piece), logsumexp[piece.rows, :, piece.queries], random)
            views = (_queries(grad, piece), _queries(query, piece), keys, values)
            grads = attend_backward(*views, found, causal=causal, dropout=ctx.dropout)
            _queries(grad_query, piece).add_(grads[0])
            return grads[1:]

        def add_own(first: int, last: int) -> None:
            for piece, (random, _) in zip(ctx.pieces[first:last], ctx.random[first:last], strict=True):
                grads = add(piece, _queries(key, piece), _queries(value, piece), True, random)
                for total, part in zip((grad_key, grad_value), grads, strict=True):
                    _queries(total, piece).add_(part)

        half = len(ctx.pieces) // 2
        gathering = _Gathering(key, value, ctx.group)
        add_own(0, half)
        whole_key, whole_value = gathering.wait()
        grad_whole = key.new_zeros(len(whole_key), 2, *key.shape[1:])  # [s, key and value, b, groups, d]
        for piece, (_, random) in zip(ctx.pieces, ctx.random, strict=True):
            if _sees_before(piece):
                keys, values = (_heads_first(t[piece.before, piece.rows]) for t in (whole_key, whole_value))
                grads = add(piece, keys, values, False, random)
                for total, part in zip(grad_whole.unbind(1), grads, strict=True):
                    _heads_first(total[piece.before, piece.rows]).add_(part)
        del whole_key, whole_value
        scattering = _Scattering(grad_whole, ctx.group)
        del grad_whole
        add_own(half, len(ctx.pieces))
        for total, part in zip((grad_key, grad_value), scattering.wait(), strict=True):
            total.add_(part)
        return grad_query, grad_key, grad_value, None, None, None


class _Gathering:
    """Gathers keys and values of all ranks in one collective."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, group: Group) -> None:
        self.group, self.own, self.work = group, (key, value), None
        if group is not None and group_size(group) > 1:
            # Owns the gathered memory `[ranks x s, 2, ...]` until `wait`, which drops it; there only with `work`.
            self.both, self.work = gather_first_dim(torch.stack((key, value), 1), group, async_op=True)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits, and returns keys and values, `[s, b, groups, d]`, in the order of the sequence."""
        if self.work is None or self.group is None:
            return self.own
        self.work.wait()
        key, value = _in_sequence(self.both, self.group).unbind(1)
        del self.both
        return key, value


class _Scattering:
    """Reduce-scatters gradients of all keys and values, `[s, 2, b, groups, d]`, to the ranks that have these."""

    def __init__(self, grad: torch.Tensor, group: Group) -> None:
        self.both, self.work = grad, None
        if group is not None and group_size(group) > 1:
            self.both, self.work = reduce_scatter_first_dim(_by_rank(grad, group), group, async_op=True)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Waits, and returns the gradients of this rank's keys and values, `[s / cp, b, groups, d]` each."""
        if self.work is not None:
            self.work.wait()
        return self.both.unbind(1)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, dropout: float) -> Attended:
    """Computes the causal attention of a piece's queries to their own keys."""
    views = (_queries(tensor, piece) for tensor in (query, key, value))
    return attend(*views, causal=True, dropout=dropout)


def _queries(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns the `[b, n, s, d]` of a piece as a view of `[s / cp, b, n, d]`."""
    return _heads_first(tensor[piece.queries, piece.rows])


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `[s, b, n, d]` as a view `[b, n, s, d]`."""
    return tensor.permute(1, 2, 0, 3)


def _sees_before(piece: Piece) -> bool:
    return bool(piece.before.stop > piece.before.start)


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
