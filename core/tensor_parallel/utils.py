"""Splits tensors and vocabularies into equal parts: Megatron-LM's helpers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ParallelConfigError
from .first_dim import gather_first_dim
from .groups import Group, group_rank, group_size, resolve_group


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Splits `[..., n]` into `num_partitions` views `[..., n / num_partitions]`, or contiguous copies.

    Raises:
        ParallelConfigError: the partitions do not divide the last dim.
    """
    length = tensor.shape[-1]
    if length % num_partitions:
        raise ParallelConfigError(f"a last dim of {length} cannot be split into {num_partitions} equal parts")
    parts = torch.split(tensor, length // num_partitions, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(
    tensor: torch.Tensor, new_buffer: bool = False, tp_group: Group = None
) -> torch.Tensor:
    """Returns this rank's equal part of a tensor's elements, flat: a view, or with `new_buffer` a copy.

    Raises:
        ParallelConfigError: the ranks do not divide the number of elements.
    """
    group = resolve_group(tp_group)
    ranks = group_size(group)
    if tensor.numel() % ranks:
        raise ParallelConfigError(f"{tensor.numel()} elements cannot be split over {ranks} tensor-parallel ranks")
    part = tensor.view(-1).chunk(ranks)[group_rank(group)]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: torch.Tensor, tp_group: Group = None) -> torch.Tensor:
    """Gathers the parts of :func:`split_tensor_into_1d_equal_chunks` of all ranks into one flat tensor."""
    group = resolve_group(tp_group)
    if group is None or group_size(group) == 1:
        return tensor
    return gather_first_dim(tensor, group, what="the parts of a tensor")[0]


class VocabUtility:
    """Computes a rank's token ids, ``[first, last)``, in a vocabulary split into equal parts."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Returns the range of a rank whose part has `per_partition_vocab_size` entries."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Returns a rank's range from the size of the whole vocabulary.

        Raises:
            ParallelConfigError: `world_size` does not divide it.
        """
        if global_vocab_size % world_size:
            raise ParallelConfigError(f"a vocabulary of {global_vocab_size} cannot be split over {world_size} ranks")
        return VocabUtility.vocab_range_from_per_partition_vocab_size(
            global_vocab_size // world_size, rank, world_size
        )
