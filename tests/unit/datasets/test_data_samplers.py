"""Samplers: the same samples in the same steps for every number of ranks, and resumable from one number."""

from pathlib import Path

import pytest
import torch

from core.base.errors import ConfigError, DataError, ParallelConfigError
from core.datasets.data_samplers import PretrainingSampler, build_pretraining_data_loader, num_microbatches
from core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from tests.unit.datasets._corpus import random_documents, write_corpus


def _micro_batches(total: int, consumed: int, micro: int, batch: int, rank: int, ranks: int) -> list[list[int]]:
    sizes = {"micro_batch_size": micro, "global_batch_size": batch}
    sampler = PretrainingSampler(total, consumed, **sizes, data_parallel_rank=rank, data_parallel_size=ranks)
    result = list(sampler)
    assert len(sampler) == len(result)
    return result


def test_each_rank_reads_its_samples():
    assert _micro_batches(19, 1, 2, 8, 0, 2) == [[1, 2], [5, 6], [9, 10], [13, 14]]
    assert _micro_batches(19, 1, 2, 8, 1, 2) == [[3, 4], [7, 8], [11, 12], [15, 16]]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_global_order_does_not_depend_on_layout(ranks: int, micro: int):
    total, consumed, batch = 45, 3, 8
    by_rank = [_micro_batches(total, consumed, micro, batch, rank, ranks) for rank in range(ranks)]
    dealt = [sample for step in zip(*by_rank, strict=True) for part in step for sample in part]
    assert dealt == list(range(3, 43))  # five full steps; no rank gets the two samples beyond them


def test_resume_with_another_layout():
    first = [_micro_batches(40, 0, 2, 8, rank, 4)[:2] for rank in range(4)]
    then = [_micro_batches(40, 16, 4, 12, rank, 1) for rank in range(1)]
    samples = [sample for part in (first, then) for rank in part for batch in rank for sample in batch]
    assert sorted(samples) == list(range(40))


def test_indivisible_batch_sizes_name_nearest():
    assert num_microbatches(24, 2, 3) == 4
    with pytest.raises(
        ParallelConfigError, match=r"global_batch_size 20 .* 2 x data-parallel size 3 = 6; .* 18 or 24"
    ):
        num_microbatches(20, 2, 3)
    with pytest.raises(ParallelConfigError, match=r"the nearest that is: 6$"):
        num_microbatches(5, 2, 3)
    with pytest.raises(ParallelConfigError, match="micro_batch_size is 0; it takes a positive number"):
        num_microbatches(8, 0, 2)


def test_other_mistakes_are_named():
    with pytest.raises(ParallelConfigError, match="data_parallel_rank is 2 of data_parallel_size 2"):
        _micro_batches(40, 0, 1, 8, 2, 2)
    with pytest.raises(ConfigError, match="consumed_samples is -1"):
        _micro_batches(40, -1, 1, 8, 0, 2)
    with pytest.raises(DataError, match=r"7 of 40 samples are left after 33 consumed, and a step takes .* 8"):
        _micro_batches(40, 33, 1, 8, 0, 2)
    with pytest.raises(DataError, match="0 of 40 samples are left after 99"):
        _micro_batches(40, 99, 1, 8, 0, 2)


def _loader(dataset: GPTDataset, consumed: int, rank: int = 0, ranks: int = 1, workers: int = 0):
    sizes = {"micro_batch_size": 2, "global_batch_size": 4, "num_workers": workers}
    return build_pretraining_data_loader(dataset, consumed, **sizes, data_parallel_rank=rank, data_parallel_size=ranks)


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    corpus = write_corpus(tmp_path / "c", random_documents(0, 60, 30))
    return GPTDataset(corpus, "train", GPTDatasetConfig(sequence_length=8, split="1"), 24)


def test_a_loader_yields_stacked_samples_in_order(dataset: GPTDataset):
    batches = list(_loader(dataset, 4, rank=1, ranks=2))
    assert len(batches) == (len(dataset) - 4) // 4
    for step, batch in enumerate(batches):
        expected = torch.stack([dataset[4 + 4 * step + 2 + i]["tokens"] for i in range(2)])
        assert torch.equal(batch["tokens"], expected)  # [b, s]
        assert batch["loss_mask"].shape == (2, 8)


def test_workers_change_nothing(dataset: GPTDataset):
    alone, helped = list(_loader(dataset, 0)), list(_loader(dataset, 0, workers=2))
    assert len(alone) == len(helped) > 0
    for a, b in zip(alone, helped, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_reading_leaves_the_default_generator_alone(dataset: GPTDataset):
    before = torch.get_rng_state()
    for _ in range(2):
        next(iter(_loader(dataset, 0)))
    assert torch.equal(before, torch.get_rng_state())


def test_a_negative_number_of_workers_is_refused(dataset: GPTDataset):
    with pytest.raises(ConfigError, match="num_workers is -1"):
        _loader(dataset, 0, workers=-1)
