"""Attention within each of many documents, by one call of CUDA's kernel for sequences of different lengths.

It is an operation of torch, which reads how many documents there are when it runs, so that compiled code serves every
layout of them. See `piecewise_attention` for what there is elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..dtypes import LOW_PRECISION
from .attention_kernels import MOST_CHANNELS, aligned, no_random_state
from .attention_operation import define_attention


def has_kernel_for_documents(query: torch.Tensor) -> bool:
    """Returns whether one call attends within each of many documents: on CUDA, in half precision."""
    return query.is_cuda and query.dtype in LOW_PRECISION and query.shape[-1] <= MOST_CHANNELS


def attend_within_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    counts: torch.Tensor,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Computes the causal attention of each document to itself, in one call of a kernel; differentiable.

    Args:
        query: `[s, b, n, d]`; keys and values may have fewer heads.
        bounds, counts: as in `PackedDocuments`.
        dropout: probability; drawn from torch's default stream.

    Returns:
        `[s, b, n, d]`.
    """
    output: torch.Tensor
    if dropout > 0.0:  # torch's own kernel: with dropout the shapes of its saved tensors differ between devices
        output = _unflattened(_attend(query, key, value, bounds, counts, dropout)[0], query)
    else:
        output = torch.ops.shardstack.attend_within_documents(query, key, value, bounds, counts)[0]
    return output


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    counts: torch.Tensor,
    dropout: float,
) -> Any:
    """Runs the kernel; returns its results: the output, `[b * s, n, d]` with padded channels, the log-sum-exp, ..."""
    flat = [_flattened(tensor) for tensor in (query, key, value)]
    scale = 1.0 / math.sqrt(query.shape[-1])
    return torch.ops.aten._flash_attention_forward(*flat, *_lengths(bounds, counts), dropout, True, False, scale=scale)


def _lengths(bounds: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Returns bounds of queries and of keys, and the longest of each, without what fills up `bounds`."""
    number, longest = counts.tolist()
    own = bounds[: number + 1]
    return own, own, longest, longest


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    """`[s, b, n, d]` to `[b * s, n, d]`, with padded channels."""
    return aligned(tensor.transpose(0, 1).flatten(0, 1))


def _unflattened(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undoes `_flattened`: `[s, b, n, d]`, in memory `[b, s, n, d]`."""
    length, rows, _, channels = like.shape
    own: torch.Tensor = flat[..., :channels].unflatten(0, (rows, length)).contiguous()
    return own.transpose(0, 1)


# ---- the operation: its kernels, the shapes that the compiler sees, and its derivative


def _operation(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    found = _attend(query, key, value, bounds, counts, 0.0)
    return _unflattened(found[0], query), found[1]


def _backward_operation(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    bounds: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    flat = [_flattened(tensor) for tensor in (grad, query, key, value, output)]
    grads = torch.ops.aten._flash_attention_backward(
        *(*flat, logsumexp, *_lengths(bounds, counts), 0.0, True, *no_random_state(query)),
        scale=1.0 / math.sqrt(query.shape[-1]),
    )
    return tuple(_unflattened(of, like) for of, like in zip(grads, (query, key, value), strict=True))


def _empty_logsumexp(query: torch.Tensor) -> torch.Tensor:
    length, rows, heads, _ = query.shape
    return query.new_empty(heads, rows * length, dtype=torch.float32)


def _empty(like: torch.Tensor) -> torch.Tensor:
    length, rows, heads, channels = like.shape
    return like.new_empty(rows, length, heads, channels).transpose(0, 1)


OPERATION = define_attention(
    "attend_within_documents",
    "Tensor bounds, Tensor counts",
    _operation,
    _backward_operation,
    empty_like=_empty,
    empty_logsumexp=_empty_logsumexp,
)
"""Name of the operation in `torch.ops`."""
