"""Attention within each of many documents, by one call of CUDA's kernel for sequences of different lengths.

It is an operation of torch, which reads how many documents there are when it runs, so that compiled code serves every
layout of them. See `piecewise_attention` for what there is elsewhere; `define_attention` makes the operations of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention_backend import align_channels, no_random_state

NAMESPACE = "shardstack"
"""Namespace of the operations in `torch.ops`."""


def define_attention(
    name: str,
    layout: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, ...]],
    *,
    empty_like: Callable[[Tensor], Tensor],
    empty_logsumexp: Callable[[Tensor], Tensor],
) -> str:
    """Defines ``torch.ops.shardstack.NAME``, differentiable, and ``NAME_backward``, which its derivative calls.

    Args:
        layout: arguments that follow query, key and value, as in a schema of torch; they get no gradient.
        forward: given query, key, value and the layout, returns the output and the log-sum-exp of the scores.
        backward: given the output's gradient, query, key, value, output, log-sum-exp and the layout, returns the
            gradients of query, key and value.
        empty_like: returns an empty tensor with the shape and strides of the output, given the query, or of a
            gradient, given the tensor that it is the gradient of.
        empty_logsumexp: returns a tensor with the shape and dtype of the log-sum-exp, given the query.

    Returns:
        The operation's name, ``shardstack::NAME``.
    """
    full_name = f"{NAMESPACE}::{name}"
    tensors = "Tensor query, Tensor key, Tensor value"
    torch.library.define(full_name, f"({tensors}, {layout}) -> (Tensor, Tensor)")
    torch.library.define(
        f"{full_name}_backward",
        f"(Tensor grad, {tensors}, Tensor output, Tensor logsumexp, {layout}) -> (Tensor, Tensor, Tensor)",
    )
    torch.library.impl(full_name, "CompositeExplicitAutograd", forward)
    torch.library.impl(f"{full_name}_backward", "CompositeExplicitAutograd", backward)

    torch.library.register_fake(full_name, lambda query, *_: (empty_like(query), empty_logsumexp(query)))
    torch.library.register_fake(f"{full_name}_backward", lambda grad, *of: tuple(map(empty_like, of[:3])))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, *layout_args = inputs
        tensors = [argument if isinstance(argument, Tensor) else None for argument in layout_args]
        ctx.others = [None if isinstance(argument, Tensor) else argument for argument in layout_args]
        ctx.save_for_backward(query, key, value, *output, *tensors)
        ctx.mark_non_differentiable(output[1])

    def derivative(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp, *tensors = ctx.saved_tensors
        layout_args = [other if tensor is None else tensor for tensor, other in zip(tensors, ctx.others, strict=True)]
        operation = getattr(getattr(torch.ops, NAMESPACE), f"{name}_backward")
        grads = operation(grad, query, key, value, output, logsumexp, *layout_args)
        return *grads, *(None for _ in layout_args)

    torch.library.register_autograd(full_name, derivative, setup_context=save)
    return full_name


def attend_within_documents(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, counts: Tensor, dropout: float = 0.0
) -> Tensor:
    """Computes the causal attention of each document to itself, differentiably, in one call of a kernel.

    Args:
        query: `[s, b, n, d]`; keys and values may have fewer heads.
        bounds, counts: fields of `PackedDocuments`.
        dropout: probability; drawn from torch's default stream.

    Returns:
        `[s, b, n, d]`.
    """
    if dropout > 0.0:  # torch's own kernel: with dropout the shapes of its saved tensors differ between devices
        return _unflatten(_attend(query, key, value, bounds, counts, dropout)[0], query)
    output: Tensor = torch.ops.shardstack.attend_within_documents(query, key, value, bounds, counts)[0]
    return output


def _attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, counts: Tensor, dropout: float) -> Any:
    """Runs the kernel and returns the output, `[b * s, n, d]` with padded channels, the log-sum-exp, and the rest."""
    flat = [_flatten(tensor) for tensor in (query, key, value)]
    scale = 1.0 / math.sqrt(query.shape[-1])
    return torch.ops.aten._flash_attention_forward(*flat, *_lengths(bounds, counts), dropout, True, False, scale=scale)


def _lengths(bounds: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Returns cumulative lengths and the maximum length, for queries and for keys, without the padding of `bounds`."""
    number, longest = counts.tolist()
    cu_seqlens = bounds[: number + 1]
    return cu_seqlens, cu_seqlens, longest, longest


def _flatten(tensor: Tensor) -> Tensor:
    """Reshapes `[s, b, n, d]` to `[b * s, n, d]`, with padded channels."""
    return align_channels(tensor.transpose(0, 1).flatten(0, 1))


def _unflatten(flat: Tensor, like: Tensor) -> Tensor:
    """Undoes `_flatten`: `[s, b, n, d]`, in memory `[b, s, n, d]`."""
    length, rows, _, channels = like.shape
    output: Tensor = flat[..., :channels].unflatten(0, (rows, length)).contiguous().transpose(0, 1)
    return output


# ---- the operation: its kernels, the shapes that the compiler sees, and its derivative


def _operation(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    results = _attend(query, key, value, bounds, counts, 0.0)
    return _unflatten(results[0], query), results[1]


def _backward_operation(grad: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
    query, key, value, output, logsumexp, bounds, counts = arguments
    flat = [_flatten(tensor) for tensor in (grad, query, key, value, output)]
    grads = torch.ops.aten._flash_attention_backward(
        *(*flat, logsumexp, *_lengths(bounds, counts), 0.0, True, *no_random_state(query)),
        scale=1.0 / math.sqrt(query.shape[-1]),
    )
    return tuple(_unflatten(of, like) for of, like in zip(grads, (query, key, value), strict=True))


def _empty_logsumexp(query: Tensor) -> Tensor:
    length, rows, heads, _ = query.shape
    return query.new_empty(heads, rows * length, dtype=torch.float32)


def _empty(like: Tensor) -> Tensor:
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
