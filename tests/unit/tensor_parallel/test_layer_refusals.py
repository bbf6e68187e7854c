"""Sizes, degrees and tokens that layers split over ranks cannot take."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from core.base.errors import DataError, ParallelConfigError
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.unit._spawn import run_distributed
from tests.unit.tensor_parallel._layers import H, V, config, integers


def _refusals() -> list[str]:
    messages = []
    group = dist.group.WORLD
    for build in (
        lambda: ColumnParallelLinear(4, 5, config=config(2), init_method=integers, tp_group=group),
        lambda: RowParallelLinear(5, 4, config=config(2), init_method=integers, tp_group=group),
        lambda: VocabParallelEmbedding(5, 4, config=config(2), init_method=integers, tp_group=group),
        lambda: ColumnParallelLinear(4, 4, config=config(4), init_method=integers, tp_group=group),
        lambda: RowParallelLinear(
            4, 4, config=config(2, True), init_method=integers, input_is_parallel=False, tp_group=group
        ),
    ):
        with pytest.raises(ParallelConfigError) as caught:
            build()
        messages.append(str(caught.value))
    embedding = VocabParallelEmbedding(V, H, config=config(2), init_method=integers, tp_group=group)
    with pytest.raises(DataError) as unknown:
        embedding(torch.tensor([[0, 99]]))
    return [*messages, str(unknown.value)]


def test_indivisible_sizes_are_refused_with_remedy():
    column, row, embedding, degree, whole_input, unknown = run_distributed(_refusals, 2)[1]
    assert "output_size of a ColumnParallelLinear is 5" in column
    assert "make it 6" in column
    assert "input_size of a RowParallelLinear is 5" in row
    assert "vocabulary (num_embeddings) of a VocabParallelEmbedding is 5" in embedding
    assert "tensor_model_parallel_size is 4" in degree
    assert "has 2 rank(s)" in degree
    assert "input_is_parallel=False" in whole_input
    assert "token id 99" in unknown
    assert "12 tokens" in unknown


def test_degree_without_group_is_refused_with_remedy():
    with pytest.raises(ParallelConfigError, match="call initialize_model_parallel"):
        ColumnParallelLinear(4, 4, config=config(2), init_method=integers)


@pytest.mark.parametrize("bad", [-1, V])
def test_unknown_token_is_a_data_error(bad: int):
    embedding = VocabParallelEmbedding(V, H, config=config(), init_method=integers)
    with pytest.raises(DataError, match=f"token id {bad} is outside the vocabulary of {V}"):
        embedding(torch.tensor([[1, bad]]))
