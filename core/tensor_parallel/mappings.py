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

`group=None` means the tensor-parallel group of `core.parallel_state`. Without a group, or with one rank in it, every
mapping returns its input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..comm.by_backend import all_reduce_by_backend
from ..foreign_arguments import ignore, refuse
from .first_dim import gather_first_dim, reduce_scatter_first_dim
from .groups import Group, group_size, resolve_group
from .partition import rank_slice


def copy_to_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward: identity. Backward: all-reduce. Enters a region whose ranks each compute a part from the whole."""
    group = resolve_group(group)
    return input_ if group_size(group) == 1 else _CopyToModelParallelRegion.apply(input_, group)


def reduce_from_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward: all-reduce of partial sums. Backward: identity."""
    group = resolve_group(group)
    return input_ if group_size(group) == 1 else _ReduceFromModelParallelRegion.apply(input_, group)


def scatter_to_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward: `[..., n]` to this rank's `[..., n / tp]`. Backward: all-gather of the last dim.

    Raises:
        ParallelConfigError: tp does not divide the last dim.
    """
    group = resolve_group(group)
    return input_ if group_size(group) == 1 else _ScatterToModelParallelRegion.apply(input_, group)


def gather_from_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward: `[..., n / tp]` to `[..., n]`. Backward: this rank's part of the gradient, which is the same on all."""
    group = resolve_group(group)
    return input_ if group_size(group) == 1 else _GatherFromModelParallelRegion.apply(input_, group)


def scatter_to_sequence_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Forward: `[s, ...]` to this rank's `[s / tp, ...]`. Backward: all-gather of dim 0.

    Raises:
        ParallelConfigError: tp does not divide the sequence.
    """
    group = resolve_group(group)
    return input_ if group_size(group) == 1 else _ScatterToSequenceParallelRegion.apply(input_, group)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group = None,
    output_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Forward: `[s / tp, ...]` to `[s, ...]`. Backward: reduce-scatter, or this rank's part.

    Args:
        tensor_parallel_output_grad: the ranks compute different parts with the gathered sequence, so that their
            gradients are partial sums and are added. False if they all compute the same.
        output_split_sizes: Megatron-LM's, for parts of different lengths; only None is allowed.
        use_global_buffer: Megatron-LM's; ignored, as no memory is kept between calls.

    Raises:
        ParallelConfigError: parts of different lengths are requested.
    """
    _check_foreign("gather_from_sequence_parallel_region", use_global_buffer, output_split_sizes=output_split_sizes)
    group = resolve_group(group)
    if group_size(group) == 1:
        return input_
    output: torch.Tensor = _GatherFromSequenceParallelRegion.apply(input_, group, tensor_parallel_output_grad)
    return output


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor,
    group: Group = None,
    input_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Forward: partial sums `[s, ...]` to this rank's part of their sum, `[s / tp, ...]`. Backward: all-gather.

    `input_split_sizes` and `use_global_buffer` are as in :func:`gather_from_sequence_parallel_region`.

    Raises:
        ParallelConfigError: tp does not divide the sequence, or parts of different lengths are requested.
    """
    _check_foreign(
        "reduce_scatter_to_sequence_parallel_region", use_global_buffer, input_split_sizes=input_split_sizes
    )
    group = resolve_group(group)
    return input_ if group_size(group) == 1 else _ReduceScatterToSequenceParallelRegion.apply(input_, group)


def _check_foreign(caller: str, use_global_buffer: bool, **split_sizes: list[int] | None) -> None:
    refuse(caller, **{name: (sizes, None, "pad the parts to one length") for name, sizes in split_sizes.items()})
    ignore(caller, "no memory is kept between calls", use_global_buffer=(use_global_buffer, False))


class _CopyToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def symbolic(graph: Any, input_: torch.Tensor, group: Group = None) -> torch.Tensor:
        return copy_to_tensor_model_parallel_region(input_, group)

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_from_tensor_model_parallel_region(grad, ctx.group), None


class _ReduceFromModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def symbolic(graph: Any, input_: torch.Tensor, group: Group = None) -> torch.Tensor:
        return reduce_from_tensor_model_parallel_region(input_, group)

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        output = input_.clone(memory_format=torch.contiguous_format)
        all_reduce_by_backend(output, group, what="partial sums of activations")
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return copy_to_tensor_model_parallel_region(grad, ctx.group), None


class _ScatterToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def symbolic(graph: Any, input_: torch.Tensor, group: Group = None) -> torch.Tensor:
        return scatter_to_tensor_model_parallel_region(input_, group)

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return rank_slice(input_, -1, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_from_tensor_model_parallel_region(grad, ctx.group), None


class _GatherFromModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def symbolic(graph: Any, input_: torch.Tensor, group: Group = None) -> torch.Tensor:
        return gather_from_tensor_model_parallel_region(input_, group)

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts, _ = gather_first_dim(
            input_.unsqueeze(0), group, what="activations cut by their last dimension"
        )  # [tp, ..., n / tp]
        return torch.cat(parts.unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter_to_tensor_model_parallel_region(grad, ctx.group), None


class _ScatterToSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def symbolic(graph: Any, input_: torch.Tensor, group: Group = None) -> torch.Tensor:
        return scatter_to_sequence_parallel_region(input_, group)

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return rank_slice(input_, 0, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_from_sequence_parallel_region(grad, False, ctx.group), None


class _GatherFromSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def symbolic(graph: Any, input_: torch.Tensor, group: Group = None) -> torch.Tensor:
        return gather_from_sequence_parallel_region(input_, group=group)

    @staticmethod
    def forward(
        ctx: Any, input_: torch.Tensor, group: dist.ProcessGroup, tensor_parallel_output_grad: bool
    ) -> torch.Tensor:
        ctx.group, ctx.tensor_parallel_output_grad = group, tensor_parallel_output_grad
        return gather_first_dim(input_, group, what="activations cut by the sequence")[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.tensor_parallel_output_grad:
            return reduce_scatter_to_sequence_parallel_region(grad, ctx.group), None, None
        return scatter_to_sequence_parallel_region(grad, ctx.group), None, None


class _ReduceScatterToSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def symbolic(graph: Any, input_: torch.Tensor, group: Group = None) -> torch.Tensor:
        return reduce_scatter_to_sequence_parallel_region(input_, group)

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_first_dim(input_, group, what="partial sums of activations")[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_from_sequence_parallel_region(grad, True, ctx.group), None
