"""Mappings of activations between tensor-parallel ranks: forward and backward of each are a conjugate pair.

    mapping                                        forward                     backward
    copy_to_tensor_model_parallel_region           identity                    all-reduce
    reduce_from_tensor_model_parallel_region       all-reduce                  identity
    scatter_to_tensor_model_parallel_region        keep own part of last dim   all-gather last dim
    gather_from_tensor_model_parallel_region       all-gather last dim         keep own part of last dim
    scatter_to_sequence_parallel_region            keep own part of dim 0      all-gather dim 0
    gather_from_sequence_parallel_region           all-gather dim 0            reduce-scatter dim 0 (or keep own part)
    reduce_scatter_to_sequence_parallel_region     reduce-scatter dim 0        all-gather dim 0

Names and pairs are Megatron-LM's (Shoeybi et al., 2019; the sequence-parallel ones Korthikanti et al., 2022). A
backward calls the conjugate mapping, so that gradients of gradients are right too. No mapping writes into its input:
autograd may pass the same gradient to two consumers.

`group=None` means the tensor-parallel group of `shardstack.parallel_state`. Without a group, or with one rank in it,
every mapping returns its input.

`column_parallel_linear` is a mapping and the product after it, whose backward overlaps computation and communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.megatron_names import ignore, refuse
from ..comm.collectives import all_reduce_by_backend
from .groups import Group, gather_first_dim, group_size, rank_slice, reduce_scatter_first_dim, resolve_group
from .weight_gradients import TORCH, Arithmetic, cast_by_autocast, lender_of, linear, weight_gradient

_INPUT, _GRADIENT = "the input of a column-parallel layer", "the input gradient of a column-parallel layer"


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Forward: identity. Backward: all-reduce. Enters a region whose ranks each compute a part from the whole."""
    return _copy(input_, group)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Forward: all-reduce of partial sums. Backward: identity."""
    return _reduce(input_, group)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Forward: `[..., n]` to this rank's `[..., n / tp]`. Backward: all-gather of the last dim.

    Raises:
        ParallelConfigError: tp does not divide the last dim.
    """
    return _scatter(input_, group)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Forward: `[..., n / tp]` to `[..., n]`. Backward: this rank's part of the gradient, which is the same on all."""
    return _gather(input_, group)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Forward: `[s, ...]` to this rank's `[s / tp, ...]`. Backward: all-gather of dim 0.

    Raises:
        ParallelConfigError: tp does not divide the sequence.
    """
    return _scatter_sequence(input_, group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group = None,
    output_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Forward: `[s / tp, ...]` to `[s, ...]`. Backward: reduce-scatter, or this rank's part.

    Args:
        tensor_parallel_output_grad: the ranks compute different parts with the gathered sequence, so that their
            gradients are partial sums and are added. False if they all compute the same.
        output_split_sizes: Megatron-LM's argument for parts of different lengths; only None is allowed.
        use_global_buffer: Megatron-LM's argument; ignored, as no memory is kept between calls.

    Raises:
        ParallelConfigError: parts of different lengths are requested.
    """
    _check_others("gather_from_sequence_parallel_region", use_global_buffer, output_split_sizes=output_split_sizes)
    return (_gather_sequence if tensor_parallel_output_grad else _gather_same_sequence)(input_, group)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: Group = None, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    """Forward: partial sums `[s, ...]` to this rank's part of their sum, `[s / tp, ...]`. Backward: all-gather.

    `input_split_sizes` and `use_global_buffer` are as in :func:`gather_from_sequence_parallel_region`.

    Raises:
        ParallelConfigError: tp does not divide the sequence, or parts of different lengths are requested.
    """
    _check_others("reduce_scatter_to_sequence_parallel_region", use_global_buffer, input_split_sizes=input_split_sizes)
    return _reduce_scatter_sequence(input_, group)


def column_parallel_linear(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sequence_parallel: bool,
    arithmetic: Arithmetic = TORCH,
) -> Tensor:
    """Computes `x A^T + b` with this rank's rows of `A` `[n / tp, k]`: from a replicated `[s, b, k]` to `[s, b, n /
    tp]`.

    With `sequence_parallel` the input is this rank's `[s / tp, b, k]`. With one rank it is torch's linear function.
    """
    if group_size(group) == 1:
        return linear(input_, weight, bias, arithmetic)
    input_, weight, bias = cast_by_autocast(input_, weight, bias)
    output: Tensor = _ColumnParallelLinear.apply(input_, bias, weight, group, sequence_parallel, arithmetic)
    return output


def _check_others(caller: str, use_global_buffer: bool, **split_sizes: list[int] | None) -> None:
    refuse(caller, **{name: (sizes, None, "pad the parts to one length") for name, sizes in split_sizes.items()})
    ignore(caller, "no memory is kept between calls", use_global_buffer=(use_global_buffer, False))


def _mapping(
    forward_: Callable[[Tensor, dist.ProcessGroup], Tensor], conjugate: Callable[[Tensor, dist.ProcessGroup], Tensor]
) -> Callable[[Tensor, Group], Tensor]:
    """Returns a mapping: `forward_` over the ranks of a group, whose backward is the mapping `conjugate`."""

    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input_: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return forward_(input_, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return conjugate(grad, ctx.group), None

    def apply(input_: Tensor, group: Group) -> Tensor:
        group = resolve_group(group)
        return input_ if group_size(group) == 1 else Region.apply(input_, group)

    return apply


def _sum(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    output = input_.clone(memory_format=torch.contiguous_format)
    all_reduce_by_backend(output, group, what="partial sums of activations")
    return output


def _own_part(dim: int) -> Callable[[Tensor, dist.ProcessGroup], Tensor]:
    return lambda input_, group: rank_slice(input_, dim, group).clone(memory_format=torch.contiguous_format)


def _join_last_dim(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts, _ = gather_first_dim(input_.unsqueeze(0), group, what="activations cut by their last dimension")
    return torch.cat(parts.unbind(), dim=-1)  # [tp, ..., n / tp] -> [..., n]


def _join_sequence(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    return gather_first_dim(input_, group, what="activations cut by the sequence")[0]


def _sum_and_cut(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    return reduce_scatter_first_dim(input_, group, what="partial sums of activations")[0]


_copy = _mapping(lambda input_, group: input_.view_as(input_), reduce_from_tensor_model_parallel_region)
_reduce = _mapping(_sum, copy_to_tensor_model_parallel_region)
_scatter = _mapping(_own_part(-1), gather_from_tensor_model_parallel_region)
_gather = _mapping(_join_last_dim, scatter_to_tensor_model_parallel_region)
_scatter_sequence = _mapping(
    _own_part(0), lambda grad, group: gather_from_sequence_parallel_region(grad, False, group)
)
_gather_sequence = _mapping(_join_sequence, reduce_scatter_to_sequence_parallel_region)
_gather_same_sequence = _mapping(_join_sequence, scatter_to_sequence_parallel_region)
_reduce_scatter_sequence = _mapping(
    _sum_and_cut, lambda grad, group: gather_from_sequence_parallel_region(grad, True, group)
)


class _ColumnParallelLinear(torch.autograd.Function):
    """Multiplies in forward after gathering the sequence, if it is split.

    Backward, in this order: start gathering the sequence again, because it was not saved; compute the input gradient;
    start its sum over ranks; compute the weight and bias gradients; wait for the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        arithmetic: Arithmetic,
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel, ctx.arithmetic = group, sequence_parallel, arithmetic
        ctx.lender = lender_of(weight)
        needs_input, _, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(input_ if needs_weight else None, weight if needs_input else None)
        whole = gather_first_dim(input_, group, what=_INPUT)[0] if sequence_parallel else input_  # [s, b, input_size]
        return arithmetic.linear(whole, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight = ctx.saved_tensors
        needs_input, needs_bias, needs_weight, *_ = ctx.needs_input_grad
        mm = ctx.arithmetic.mm
        grad_input = grad_weight = grad_bias = None
        gathering = adding = None
        flat_grad = grad.reshape(-1, grad.shape[-1])  # [s * b, output_size / tp]
        if needs_weight and ctx.sequence_parallel:
            input_, gathering = gather_first_dim(input_, ctx.group, what=_INPUT, async_op=True)
        if needs_input:
            grad_input = mm(flat_grad, weight).view(*grad.shape[:-1], -1)  # [s, b, input_size]
            if ctx.sequence_parallel:
                grad_input, adding = reduce_scatter_first_dim(grad_input, ctx.group, what=_GRADIENT, async_op=True)
            else:
                adding = all_reduce_by_backend(grad_input, ctx.group, what=_GRADIENT, async_op=True)
        if needs_weight:
            if gathering is not None:
                gathering.wait()
            whole = input_.reshape(-1, input_.shape[-1])
            grad_weight = weight_gradient(ctx, ctx.lender, lambda memory: mm(flat_grad.t(), whole, out=memory))
        if needs_bias:
            grad_bias = flat_grad.sum(0)
        if adding is not None:
            adding.wait()
        return grad_input, grad_bias, grad_weight, None, None, None
