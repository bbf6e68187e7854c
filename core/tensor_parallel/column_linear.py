"""The matrix product of a column-parallel layer, whose backward overlaps computation and communication."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..comm.collectives import all_reduce_by_backend
from .groups import Group, group_size
from .partition import gather_first_dim, reduce_scatter_first_dim
from .weight_gradients import lender_of, linear, weight_gradient

_INPUT, _GRADIENT = "the input of a column-parallel layer", "the input gradient of a column-parallel layer"


def column_parallel_linear(
    input_: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group, sequence_parallel: bool
) -> torch.Tensor:
    """Computes `x A^T + b` with this rank's rows of `A` `[n / tp, k]`: from a replicated `[s, b, k]` to `[s, b, n /
    tp]`.

    With `sequence_parallel` the input is this rank's `[s / tp, b, k]`. With one rank it is torch's linear function.
    """
    if group_size(group) == 1:
        return linear(input_, weight, bias)
    kind = input_.device.type
    if torch.is_autocast_enabled(kind):  # the backward runs outside autocast: cast here, where autograd sees it
        dtype = torch.get_autocast_dtype(kind)
        input_, weight = input_.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    output: torch.Tensor = _ColumnParallelLinear.apply(input_, bias, weight, group, sequence_parallel)
    return output


class _ColumnParallelLinear(torch.autograd.Function):
    """Multiplies in forward after gathering the sequence, if it is split.

    Backward, in this order: start gathering the sequence again, because it was not saved; compute the input gradient;
    start its sum over ranks; compute the weight and bias gradients; wait for the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        ctx.group, ctx.sequence_parallel, ctx.lender = group, sequence_parallel, lender_of(weight)
        needs_input, _, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(input_ if needs_weight else None, weight if needs_input else None)
        whole = gather_first_dim(input_, group, what=_INPUT)[0] if sequence_parallel else input_  # [s, b, input_size]
        return F.linear(whole, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input_, weight = ctx.saved_tensors
        needs_input, needs_bias, needs_weight, *_ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        gathering = adding = None
        flat_grad = grad.reshape(-1, grad.shape[-1])  # [s * b, output_size / tp]
        if needs_weight and ctx.sequence_parallel:
            input_, gathering = gather_first_dim(input_, ctx.group, what=_INPUT, async_op=True)
        if needs_input:
            grad_input = flat_grad.matmul(weight).view(*grad.shape[:-1], -1)  # [s, b, input_size]
            if ctx.sequence_parallel:
                grad_input, adding = reduce_scatter_first_dim(grad_input, ctx.group, what=_GRADIENT, async_op=True)
            else:
                adding = all_reduce_by_backend(grad_input, ctx.group, what=_GRADIENT, async_op=True)
        if needs_weight:
            if gathering is not None:
                gathering.wait()
            whole = input_.reshape(-1, input_.shape[-1])
            grad_weight = weight_gradient(ctx, ctx.lender, lambda memory: torch.mm(flat_grad.t(), whole, out=memory))
        if needs_bias:
            grad_bias = flat_grad.sum(0)
        if adding is not None:
            adding.wait()
        return grad_input, grad_bias, grad_weight, None, None
