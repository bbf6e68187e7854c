"""Makes an attention kernel and its backward operations of torch, which the compiler takes whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "shardstack"
"""Of the operations, in `torch.ops`."""


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
    qualified = f"{NAMESPACE}::{name}"
    tensors = "Tensor query, Tensor key, Tensor value"
    torch.library.define(qualified, f"({tensors}, {layout}) -> (Tensor, Tensor)")
    torch.library.define(
        f"{qualified}_backward",
        f"(Tensor grad, {tensors}, Tensor output, Tensor logsumexp, {layout}) -> (Tensor, Tensor, Tensor)",
    )
    torch.library.impl(qualified, "CompositeExplicitAutograd", forward)
    torch.library.impl(f"{qualified}_backward", "CompositeExplicitAutograd", backward)

    def shapes(query: Tensor, *unused: Any) -> tuple[Tensor, Tensor]:
        return empty_like(query), empty_logsumexp(query)

    def backward_shapes(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *unused: Any) -> tuple[Tensor, ...]:
        return empty_like(query), empty_like(key), empty_like(value)

    torch.library.register_fake(qualified, shapes)
    torch.library.register_fake(f"{qualified}_backward", backward_shapes)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, *layout_args = inputs
        saved = [argument if isinstance(argument, Tensor) else None for argument in layout_args]
        ctx.others = [None if isinstance(argument, Tensor) else argument for argument in layout_args]
        ctx.save_for_backward(query, key, value, *output, *saved)
        ctx.mark_non_differentiable(output[1])

    def derivative(ctx: Any, grad: Tensor, unused: Any) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp, *saved = ctx.saved_tensors
        layout_args = [other if tensor is None else tensor for tensor, other in zip(saved, ctx.others, strict=True)]
        operation = getattr(getattr(torch.ops, NAMESPACE), f"{name}_backward")
        grads = operation(grad, query, key, value, output, logsumexp, *layout_args)
        return *grads, *(None for _ in layout_args)

    torch.library.register_autograd(qualified, derivative, setup_context=save)
    return qualified
