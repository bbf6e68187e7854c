"""A tensor-parallel group, or None for a rank alone, and what each of its ranks has of a tensor.

Checks sizes that ranks divide and ids of a vocabulary, copies parts of parameters, and gathers and reduces along the
first dimension.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .. import parallel_state
from ..base.errors import ConfigError, DataError, ParallelConfigError
from ..comm.call import FunctionWork
from ..comm.collectives import all_gather_by_backend, all_to_all_by_backend, reduce_scatter_by_backend
from ..comm.gloo import exchanges_directly
from ..model_parallel_config import ModelParallelConfig

Group = dist.ProcessGroup | None


def resolve_group(group: Group) -> Group:
    """Returns `group`, else the tensor-parallel group of `shardstack.parallel_state`, else None if that is not
    initialised."""
    return group if group is not None else parallel_state.get_tensor_model_parallel_group(check_initialized=False)


def expert_tensor_group() -> Group:
    """Returns the ranks that share the matrices of each expert, None if nothing is initialised."""
    if parallel_state.experts_are_apart():
        return parallel_state.get_expert_tensor_parallel_group()
    return resolve_group(None)


def group_size(group: Group) -> int:
    """Returns the number of ranks in `group`, 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    """Returns this rank's number in `group`, 0 for None."""
    return 0 if group is None else group.rank()


def check_degrees(config: ModelParallelConfig, **ranks: int) -> None:
    """Raises ParallelConfigError unless groups have as many ranks as the config says.

    Args:
        ranks: size of a group by the config's field, whose None takes any number.
    """
    for name, num_ranks in ranks.items():
        if getattr(config, name) not in (None, num_ranks):
            raise ParallelConfigError(
                f"config.{name} is {getattr(config, name)}, but there are such groups of {num_ranks}; call "
                "initialize_model_parallel with the same size first, or give a layer its group as tp_group"
            )


def per_rank(size: int, group: Group, what: str, degree: str = "tensor_model_parallel_size") -> int:
    """Returns a rank's part of `size`.

    Raises:
        ParallelConfigError: the ranks do not divide `size`, which the message calls `what`.
    """
    ranks = group_size(group)
    if size % ranks:
        raise ParallelConfigError(
            f"the {what} is {size}, which {degree} {ranks} does not divide; "
            f"make it {-(-size // ranks) * ranks}, or choose another {degree}"
        )
    return size // ranks


def pad_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """Returns the smallest multiple of `multiple` that holds `vocab_size` tokens.

    It does not depend on the degrees of parallelism, so that one checkpoint fits all of them. 128 is a multiple of
    every power of two up to it as a tensor-parallel size, and keeps the logits' matrix aligned for GPU kernels.

    Raises:
        ConfigError: either number is below one.
    """
    if vocab_size < 1 or multiple < 1:
        raise ConfigError(f"a vocabulary of {vocab_size} padded to a multiple of {multiple}: both must be positive")
    return -(-vocab_size // multiple) * multiple


def check_ids(ids: torch.Tensor, vocab_size: int, what: str, *, exception: int | None = None) -> None:
    """Checks that ids are in the vocabulary, for tensors on the CPU, where the check costs almost nothing.

    Args:
        what: name of the ids in the message.
        exception: one value outside of the vocabulary that is allowed.

    Raises:
        DataError: an id is below zero or beyond the vocabulary; the message names it.
    """
    # Subclasses (fake tensors, DTensors) and traced tensors have no values to check.
    if type(ids) is not torch.Tensor or ids.device.type != "cpu" or not ids.numel() or torch.compiler.is_compiling():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low >= 0 and high < vocab_size:
        return
    outside = (ids < 0) | (ids >= vocab_size)
    if exception is not None:
        outside &= ids != exception
    if outside.any():
        raise DataError(
            f"{what} id {int(ids[outside][0])} is outside the vocabulary of {vocab_size} tokens "
            f"(0 to {vocab_size - 1}); use the tokenizer that the model was made for, or raise the vocabulary size"
        )


def rank_slice(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Returns this rank's part of `tensor` along `dim`, as a view.

    Raises:
        ParallelConfigError: the ranks do not divide it.
    """
    size = group_size(group)
    check_divides(tensor, dim, size)
    return tensor.chunk(size, dim)[group_rank(group)]


def check_divides(tensor: torch.Tensor, dim: int, size: int) -> None:
    """Raises ParallelConfigError if `size` ranks do not divide a dimension, the last one or the first."""
    length = tensor.shape[dim]
    if length % size:
        what, fix = "last dim", "choose a size that it divides"
        if dim == 0:
            what, fix = "sequence", f"pad the sequence to a multiple of {size}, or turn sequence_parallel off"
        raise ParallelConfigError(
            f"a {what} of {length} ({list(tensor.shape)}) cannot be split over {size} tensor-parallel ranks; {fix}"
        )


def gather_first_dim(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, what: str, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """Gathers `[n, ...]` of every rank into one `[tp * n, ...]`.

    Args:
        what: the payload as messages name it.
        async_op: return work; the result is valid once it is waited for.
    """
    whole = tensor.new_empty(tensor.shape[0] * group_size(group), *tensor.shape[1:])
    return whole, all_gather_by_backend(whole, tensor.contiguous(), group, what=what, async_op=async_op)


def reduce_scatter_first_dim(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, what: str, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """Reduces `[n, ...]` over ranks to this rank's `[n / tp, ...]`, with the arguments of :func:`gather_first_dim`.

    gloo implements reduce-scatter as an all-reduce, which sends twice the bytes. There each rank sends parts to their
    owners, which add them in rank order.

    Raises:
        ParallelConfigError: the ranks do not divide dim 0.
    """
    size = group_size(group)
    check_divides(tensor, 0, size)
    part = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
    if not exchanges_directly(group, tensor.device):
        return part, reduce_scatter_by_backend(part, tensor.contiguous(), group, what=what, async_op=async_op)
    addends = tensor.new_empty(tensor.shape)
    work = all_to_all_by_backend(addends, tensor.contiguous(), group, what=what, async_op=async_op)

    def add() -> None:
        if work is not None:
            work.wait()
        torch.sum(addends.view(size, *part.shape), 0, out=part)

    if async_op:
        return part, FunctionWork(add)
    add()
    return part, None
