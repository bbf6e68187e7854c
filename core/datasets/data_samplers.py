"""Assigns samples to steps, micro-batches and ranks.

Step k of a run with global batch size g trains on samples `[c, c + g)`, where c = k * g samples were consumed before.
As in Megatron-LM, data-parallel rank r reads for micro-batch m

    [c + (m * dp + r) * micro_batch_size, c + (m * dp + r + 1) * micro_batch_size)

so that the samples of a step depend neither on the number of ranks nor on the micro-batch size, and a checkpoint only
has to store `consumed_samples`. Ranks that differ only in their tensor, context or pipeline coordinate pass the same
data-parallel rank and read the same samples. A `MicroBatchTree` may give a rank other micro-batches of the same step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..base.device import device_type
from ..base.errors import ConfigError, DataError, ParallelConfigError
from ..base.micro_batch_tree import MicroBatchTree
from ..num_microbatches_calculator import num_microbatches


class PretrainingSampler(Sampler[list[int]]):
    """Yields this rank's micro-batches, as lists of sample numbers, from `consumed_samples` on.

    Drops the last samples, on all ranks, if they are fewer than `global_batch_size`.

    Args:
        tree: says which micro-batches of a step are this rank's; None is Megatron-LM's order.

    Raises:
        ParallelConfigError: sizes do not divide, or the rank is outside of the group.
        DataError: fewer samples are left than one step takes.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        tree: MicroBatchTree | None = None,
    ) -> None:
        self.num_microbatches = num_microbatches(global_batch_size, micro_batch_size, data_parallel_size)
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ParallelConfigError(
                f"data_parallel_rank is {data_parallel_rank} of data_parallel_size {data_parallel_size}; count from 0"
            )
        if consumed_samples < 0:
            raise ConfigError(f"consumed_samples is {consumed_samples}; it takes 0 or more")
        if total_samples - consumed_samples < global_batch_size:
            raise DataError(
                f"{max(0, total_samples - consumed_samples)} of {total_samples} samples are left after "
                f"{consumed_samples} consumed, and a step takes global_batch_size {global_batch_size}; build the "
                "dataset with more samples (it repeats its documents), or lower global_batch_size"
            )
        self.total_samples, self.consumed_samples, self.tree = total_samples, consumed_samples, tree
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size

    def __len__(self) -> int:
        """Returns the number of micro-batches that this rank yields."""
        return (self.total_samples - self.consumed_samples) // self.global_batch_size * self.num_microbatches

    def __iter__(self) -> Iterator[list[int]]:
        for micro_batch in range(len(self)):  # micro-batches of a step follow each other, and steps do too
            step, number = divmod(micro_batch, self.num_microbatches)
            first = self.consumed_samples + step * self.global_batch_size + self._place(number) * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))

    def _place(self, number: int) -> int:
        """Returns the index of this rank's micro-batch `number` of a step among all ranks' micro-batches."""
        if self.tree is None:
            return number * self.data_parallel_size + self.data_parallel_rank
        return self.tree.index(self.data_parallel_rank, number, self.num_microbatches)


def build_pretraining_data_loader(
    dataset: Dataset[Any], consumed_samples: int, *, num_workers: int = 0, seed: int = 0, **sampling: Any
) -> DataLoader[Any]:
    """Builds a loader of this rank's micro-batches, each a dict of tensors `[b, s]` for a `GPTDataset`.

    Every new iterator starts at `consumed_samples`.

    Args:
        num_workers: processes that read ahead; 0 reads in this process.
        seed: seed of the loader's own generator. Without one, every new iterator would draw from torch's default
            generator, and a resumed run would differ from the uninterrupted one.
        sampling: sizes, rank and tree, as for `PretrainingSampler`.
    """
    if num_workers < 0:
        raise ConfigError(f"num_workers is {num_workers}; it takes 0 or more")
    total_samples = len(dataset)  # type: ignore[arg-type]  # torch leaves __len__ out of Dataset on purpose
    return DataLoader(
        dataset,
        batch_sampler=PretrainingSampler(total_samples, consumed_samples, **sampling),
        num_workers=num_workers,
        pin_memory=device_type() == "cuda",
        generator=torch.Generator().manual_seed(seed),
    )
