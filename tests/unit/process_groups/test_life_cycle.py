"""`parallel_state` before it is initialised, twice, and after it is destroyed; and what cannot be initialised."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from core import parallel_state as ps
from core.base.errors import ParallelConfigError, ParallelStateError
from tests.unit._ranks import fake_world
from tests.unit.process_groups._oracle import FIRST_RANKS, SIZES_AND_RANKS


def test_before_initialisation_a_rank_is_alone() -> None:
    assert not ps.is_initialized()
    assert not ps.model_parallel_is_initialized()
    for kind in ("tp", "pp", "cp", "ep"):
        size, place = SIZES_AND_RANKS[kind]
        assert (size(), place()) == (1, 0), kind
    assert not ps.experts_are_apart()
    assert ps.is_pipeline_first_stage()
    assert ps.is_pipeline_last_stage()
    with_none = (
        ps.get_tensor_model_parallel_group,
        ps.get_pipeline_model_parallel_group,
        ps.get_context_parallel_group,
        ps.get_model_parallel_group,
        ps.get_tensor_and_context_parallel_group,
        ps.get_tensor_and_data_parallel_group,
        ps.get_embedding_group,
        ps.get_position_embedding_group,
        ps.get_intra_distributed_optimizer_instance_group,
        ps.get_inter_distributed_optimizer_instance_group,
        ps.get_expert_model_parallel_group,
        ps.get_expert_tensor_parallel_group,
        ps.get_expert_tensor_and_model_parallel_group,
        ps.get_expert_tensor_model_pipeline_parallel_group,
        ps.get_expert_data_parallel_group,
    )
    for getter in with_none:
        assert getter(check_initialized=False) is None, getter
        with pytest.raises(
            ParallelStateError, match=r"call shardstack\.parallel_state\.initialize_model_parallel\(\)"
        ):
            getter()
    strict = [pair for kind, pair in SIZES_AND_RANKS.items() if kind not in ("tp", "pp", "cp", "ep")]
    for strict_getter in (
        *(getter for pair in strict for getter in pair),
        *FIRST_RANKS.values(),
        ps.get_data_parallel_group,
        ps.get_device_mesh,
        ps.get_data_parallel_mesh,
        ps.get_expert_data_parallel_mesh,
    ):
        with pytest.raises(
            ParallelStateError, match=r"call shardstack\.parallel_state\.initialize_model_parallel\(\)"
        ):
            strict_getter()


def test_torch_distributed_comes_first() -> None:
    with pytest.raises(
        ParallelStateError, match=r"call shardstack\.rendezvous\.default_group\.init_process_group\(\)"
    ):
        ps.initialize_model_parallel()


def test_initialising_twice_is_refused_until_destroyed() -> None:
    with fake_world(0, 4):
        ps.initialize_model_parallel(2)
        with pytest.raises(ParallelStateError, match=r"call destroy_model_parallel\(\)"):
            ps.initialize_model_parallel(2)
        assert ps.get_tensor_model_parallel_world_size() == 2
        ps.destroy_model_parallel()
        ps.destroy_model_parallel()
        assert not ps.is_initialized()
        assert len(dist.distributed_c10d._world.pg_map) == 1
        ps.initialize_model_parallel(4)
        assert ps.get_tensor_model_parallel_world_size() == 4


def test_groups_whose_world_has_ended_can_still_be_destroyed() -> None:
    with fake_world(0, 2):
        ps.initialize_model_parallel(2)
        dist.destroy_process_group()
        with fake_world(0, 2):
            ps.destroy_model_parallel()
            ps.initialize_model_parallel()
            assert ps.get_data_parallel_world_size() == 2


def test_a_middle_stage_has_no_embedding_group() -> None:
    with fake_world(1, 3):
        ps.initialize_model_parallel(1, 3)
        with pytest.raises(ParallelStateError, match=r"rank 1 .* get_embedding_group\(False\)"):
            ps.get_embedding_group()
        with pytest.raises(ParallelStateError, match=r"rank 1 .* get_position_embedding_group\(False\)"):
            ps.get_position_embedding_group()


def test_partial_data_parallel_needs_context_parallel() -> None:
    with fake_world(0, 2):
        ps.initialize_model_parallel()
        with pytest.raises(ParallelConfigError, match="with_context_parallel=True"):
            ps.get_data_parallel_group(partial_data_parallel=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 2},
            "world of 8 ranks is not divisible by 6 = tensor_model_parallel_size 3 x pipeline_model_parallel_size 2 "
            "x context_parallel_size 1; change a size, or start a multiple of 6 ranks",
        ),
        ({"tensor_model_parallel_size": 16}, "not divisible by 16"),
        ({"context_parallel_size": 0}, "context_parallel_size is 0; it takes a positive number"),
        ({"expert_model_parallel_size": -1}, "expert_model_parallel_size is -1"),
        ({"distributed_timeout_minutes": 0}, "distributed_timeout_minutes is 0"),
        ({"expert_model_parallel_size": 3}, "expert_model_parallel_size 3 does not divide 8 = .*choose a divisor"),
        (
            {"num_distributed_optimizer_instances": 3},
            "num_distributed_optimizer_instances 3 does not divide the data-parallel size 8 .*choose a divisor",
        ),
        (
            {"num_distributed_optimizer_instances": 4, "expert_model_parallel_size": 4},
            "num_distributed_optimizer_instances 4 does not divide the experts' data-parallel size 2 .*lower one",
        ),
        ({"order": "tp-cp-dp-pp", "expert_model_parallel_size": 2}, "leaves out 'ep', whose size is 2"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict[str, int | str], message: str) -> None:
    with fake_world(0, 8):
        with pytest.raises(ParallelConfigError, match=message):
            ps.initialize_model_parallel(**arguments)  # type: ignore[arg-type]
        assert not ps.is_initialized()
        assert len(dist.distributed_c10d._world.pg_map) == 1
