"""Attention of a rank's queries to the keys of all ranks, one call of a kernel for each piece of the queries.

Keys and values are all-gathered in forward and again in backward, so that a rank saves only its own; their gradients
are reduce-scattered. The attention of a chunk's queries to its own keys is computed during the gather. No mask and no
scores are ever in memory.

All pieces together are one operation of torch (`torch.library`), which reads where documents begin when it runs: code
compiled for one layout of documents serves all of them, and collectives break no graph. Only attention that drops
weights is no such operation, because the random state that it saves differs from device to device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base._torch_compat import group_of_name
from ..tensor_parallel.groups import Group, group_rank, group_size
from .attention_backend import PartialAttention, attend, attend_backward, combine
from .document_attention import define_attention
from .sequences import QueryPiece, causal_pieces, document_pieces, start_gathering_keys, start_scattering_gradients

_Random = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The random states of a piece: for its own keys, and for those before."""


def attend_in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_starts: Tensor | None = None,
    dropout: float = 0.0,
    group: Group = None,
) -> Tensor:
    """Computes causal attention of this rank's queries to the keys of all ranks, each document to itself.

    Args:
        query: `[s / cp, b, heads, d]`.
        key, value: `[s / cp, b, groups, d]`.
        document_starts: `[b, s / cp]`, as in `document_pieces`; None without documents.
        dropout: probability; drawn from torch's default stream.
        group: the context-parallel ranks; None is one rank, with the whole sequence.

    Returns:
        `[s / cp, b, heads, d]`.
    """
    if dropout > 0.0:
        output: Tensor = _DroppingAttention.apply(query, key, value, document_starts, dropout, group)
        return output
    name = "" if group is None else group.group_name
    attended: Tensor = torch.ops.shardstack.attend_in_pieces(query, key, value, document_starts, name)[0]
    return attended


class _DroppingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        document_starts: Tensor | None,
        dropout: float,
        group: Group,
    ) -> Tensor:
        ctx.pieces, ctx.dropout, ctx.group = _pieces(query, document_starts, group), dropout, group
        output, logsumexp, ctx.random = _forward(query, key, value, ctx.pieces, dropout, group)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward(grad, ctx.saved_tensors, ctx.pieces, ctx.random, ctx.dropout, ctx.group)
        return *grads, None, None, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[QueryPiece], dropout: float, group: Group
) -> tuple[Tensor, Tensor, list[_Random]]:
    """Returns the output, the log-sum-exp `[b, heads, s / cp]`, and the random states of each piece."""
    wait_for_keys = start_gathering_keys(key, value, group)
    own_views = ([_queries(tensor, piece) for tensor in (query, key, value)] for piece in pieces)
    diagonals = [attend(*views, causal=True, dropout=dropout) for views in own_views]
    whole_key, whole_value = wait_for_keys()
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # [s / cp, b, heads, d]
    logsumexp = diagonals[0].logsumexp.new_empty(query.shape[1], query.shape[2], query.shape[0])  # [b, heads, s / cp]
    random = []
    for piece, own in zip(pieces, diagonals, strict=True):
        both, before = own, None
        if _sees_before(piece):
            keys, values = (_heads_first(t[piece.before, piece.rows]) for t in (whole_key, whole_value))
            before = attend(_queries(query, piece), keys, values, causal=False, dropout=dropout)
            both = combine(before, own)
        _queries(output, piece).copy_(both.output)
        logsumexp[piece.rows, :, piece.queries] = both.logsumexp
        random.append((own.random, () if before is None else before.random))
    return output, logsumexp, random


def _backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    pieces: Sequence[QueryPiece],
    random: Sequence[_Random],
    dropout: float,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key and value while keys are gathered and their gradients reduce-scattered.

    Half of the pieces attend to their own keys during the gather, then all to the keys before them, and the rest to
    their own during the reduce-scatter.

    Args:
        saved: query, key, value, output and logsumexp of the forward.
    """
    query, key, value, output, logsumexp = saved
    grad = grad.contiguous()
    grad_query, grad_key, grad_value = (
        torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
    )

    def add(
        piece: QueryPiece, keys: Tensor, values: Tensor, causal: bool, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Adds to the gradient of a piece's queries, and returns the gradients of these keys and values."""
        partial = PartialAttention(_queries(output, piece), logsumexp[piece.rows, :, piece.queries], state)
        views = (_queries(grad, piece), _queries(query, piece), keys, values)
        grad_queries, grad_keys, grad_values = attend_backward(*views, partial, causal=causal, dropout=dropout)
        _queries(grad_query, piece).add_(grad_queries)
        return grad_keys, grad_values

    def add_own(first: int, last: int) -> None:
        for piece, (state, _) in zip(pieces[first:last], random[first:last], strict=True):
            grads = add(piece, _queries(key, piece), _queries(value, piece), True, state)
            for total, part in zip((grad_key, grad_value), grads, strict=True):
                _queries(total, piece).add_(part)

    half = len(pieces) // 2
    wait_for_keys = start_gathering_keys(key, value, group)
    add_own(0, half)
    whole_key, whole_value = wait_for_keys()
    grad_whole = key.new_zeros(len(whole_key), 2, *key.shape[1:])  # [s, key and value, b, groups, d]
    for piece, (_, state) in zip(pieces, random, strict=True):
        if _sees_before(piece):
            keys, values = (_heads_first(t[piece.before, piece.rows]) for t in (whole_key, whole_value))
            grads = add(piece, keys, values, False, state)
            for total, part in zip(grad_whole.unbind(1), grads, strict=True):
                _heads_first(total[piece.before, piece.rows]).add_(part)
    del whole_key, whole_value
    wait_for_gradients = start_scattering_gradients(grad_whole, group)
    del grad_whole
    add_own(half, len(pieces))
    for total, part in zip((grad_key, grad_value), wait_for_gradients(), strict=True):
        total.add_(part)
    return grad_query, grad_key, grad_value


def _pieces(query: Tensor, document_starts: Tensor | None, group: Group) -> Sequence[QueryPiece]:
    rank, size = group_rank(group), group_size(group)
    if document_starts is None:
        return causal_pieces(query.shape[0], rank, size)
    return document_pieces(document_starts, rank, size)


def _queries(tensor: Tensor, piece: QueryPiece) -> Tensor:
    """Returns the `[b, n, s, d]` of a piece as a view of `[s / cp, b, n, d]`."""
    return _heads_first(tensor[piece.queries, piece.rows])


def _heads_first(tensor: Tensor) -> Tensor:
    """Returns `[s, b, n, d]` as a view `[b, n, s, d]`."""
    return tensor.permute(1, 2, 0, 3)


def _sees_before(piece: QueryPiece) -> bool:
    return bool(piece.before.stop > piece.before.start)


# ---- the operation: its kernels, the shapes that the compiler sees, and its derivative


def _group_of(group: str) -> Group:
    return group_of_name(group) if group else None


def _operation(
    query: Tensor, key: Tensor, value: Tensor, document_starts: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    ranks = _group_of(group)
    output, logsumexp, _ = _forward(query, key, value, _pieces(query, document_starts, ranks), 0.0, ranks)
    return output, logsumexp


def _backward_operation(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *saved, document_starts, group = arguments
    ranks = _group_of(group)
    pieces = _pieces(saved[0], document_starts, ranks)
    random: list[_Random] = [((), ())] * len(pieces)
    return _backward(grad, saved, pieces, random, 0.0, ranks)


def _empty_logsumexp(query: Tensor) -> Tensor:
    length, rows, heads, _ = query.shape
    in_double = query.dtype == torch.float64
    return query.new_empty(rows, heads, length, dtype=torch.float64 if in_double else torch.float32)


OPERATION = define_attention(
    "attend_in_pieces",
    "Tensor? document_starts, str group",
    _operation,
    _backward_operation,
    empty_like=lambda like: like.new_empty(like.shape),
    empty_logsumexp=_empty_logsumexp,
)
"""Name of the operation in `torch.ops`. It takes a process group by name, "" for a rank alone."""
