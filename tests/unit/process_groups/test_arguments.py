"""Megatron-LM's arguments of `initialize_model_parallel`, and its setters: what they mean, and what is refused."""

from __future__ import annotations

import warnings

import pytest

from core import parallel_state as ps
from core.base.errors import ParallelConfigError, warn_once
from tests.unit._ranks import fake_world
from tests.unit.process_groups._oracle import ranks_of


def test_the_third_position_is_virtual_pipeline_parallelism():
    with fake_world(0, 8):
        with pytest.raises(ParallelConfigError, match=r"virtual_pipeline_model_parallel_size is 2.*context_parallel"):
            ps.initialize_model_parallel(2, 1, 2)
        assert not ps.is_initialized()
        ps.initialize_model_parallel(2, 2, 2)
        assert ps.get_virtual_pipeline_model_parallel_world_size() == 2
        ps.set_virtual_pipeline_model_parallel_rank(1)
        assert ps.get_virtual_pipeline_model_parallel_rank() == 1
        ps.destroy_model_parallel()
        assert ps.get_virtual_pipeline_model_parallel_rank() is None
        ps.initialize_model_parallel(2, 2, None)
        assert ps.get_virtual_pipeline_model_parallel_world_size() is None
        assert ps.get_context_parallel_world_size() == 1
        assert ps.get_data_parallel_world_size() == 2


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_ends_and_neighbours_of_a_pipeline(rank: int):
    with fake_world(rank, 6):
        ps.initialize_model_parallel(2, 3, 2)  # the pipelines are [0, 2, 4] and [1, 3, 5]
        assert ps.get_pipeline_model_parallel_first_rank() == rank % 2
        assert ps.get_pipeline_model_parallel_last_rank() == 4 + rank % 2
        assert ps.get_pipeline_model_parallel_next_rank() == (rank + 2) % 6
        assert ps.get_pipeline_model_parallel_prev_rank() == (rank - 2) % 6
        firsts = [ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=turn) for turn in range(2)]
        lasts = [ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=turn) for turn in range(2)]
        assert firsts == [rank < 2, False] and lasts == [False, rank > 3]
        assert ps.is_pipeline_first_stage() == ps.is_rank_in_position_embedding_group() == (rank < 2)
        assert ps.is_pipeline_last_stage() == (rank > 3)
        assert ps.is_rank_in_embedding_group() == (ps.get_embedding_group(False) is not None)


@pytest.mark.parametrize(
    "refused",
    [
        {"hierarchical_context_parallel_sizes": [2, 2]},
        {"hybrid_context_parallel": True},
        {"gtp_remat_size": 2},
        {"expert_gtp_remat_size": 2},
        {"get_embedding_ranks": lambda ranks, split: ranks},
        {"get_position_embedding_ranks": lambda ranks, split: ranks},
        {"rank_offset": 1},
        {"local_world_size": 2},
    ],
)
def test_what_would_change_the_groups_is_refused_by_name(refused):
    with fake_world(0, 4), pytest.raises(ParallelConfigError, match=next(iter(refused))):
        ps.initialize_model_parallel(**refused)


def test_communicator_settings_warn_once():
    warn_once.cache_clear()
    given = {"use_sharp": True, "nccl_communicator_config_path": "x.yaml", "create_gloo_process_groups": False}
    with fake_world(0, 4):
        with pytest.warns(UserWarning, match="nccl_communicator_config_path, use_sharp: they set how") as caught:
            ps.initialize_model_parallel(2, **given)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        ps.destroy_model_parallel()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ps.initialize_model_parallel(2, **given)


def test_experts_may_shard_over_another_number_of_ranks():
    with fake_world(5, 8):
        ps.initialize_model_parallel(2, expert_tensor_parallel_size=4, expert_model_parallel_size=2)
        assert ranks_of(ps.get_tensor_model_parallel_group()) == [4, 5]
        assert ranks_of(ps.get_data_parallel_group()) == [1, 3, 5, 7]
        assert ranks_of(ps.get_expert_tensor_parallel_group()) == [4, 5, 6, 7]
        assert ranks_of(ps.get_expert_model_parallel_group()) == [1, 5]
        assert ranks_of(ps.get_expert_data_parallel_group()) == [5]


def test_experts_that_do_not_divide_a_stage_are_refused():
    with fake_world(0, 8), pytest.raises(ParallelConfigError, match="expert_tensor_parallel_size 3 x expert_model"):
        ps.initialize_model_parallel(2, expert_tensor_parallel_size=3)
