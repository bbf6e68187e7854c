"""Names of Megatron-LM that only `parallel_state` has, and those that it does not have."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from core import parallel_state as ps
from core.errors import ParallelConfigError, ParallelStateError
from core.process_groups.rank_generator import RankGenerator
from tests.unit._ranks import fake_world
from tests.unit._spawn import run_distributed


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def test_virtual_stages_are_none_and_stay_so():
    assert ps.get_virtual_pipeline_model_parallel_world_size() is None
    assert ps.get_virtual_pipeline_model_parallel_rank() is None
    ps.set_virtual_pipeline_model_parallel_world_size(None)
    with pytest.raises(ParallelConfigError, match="set_virtual_pipeline_model_parallel_world_size was given 2"):
        ps.set_virtual_pipeline_model_parallel_world_size(2)
    ps.set_virtual_pipeline_model_parallel_rank(0)
    assert ps.get_virtual_pipeline_model_parallel_rank() == 0
    ps.destroy_model_parallel()
    assert ps.get_virtual_pipeline_model_parallel_rank() is None


def test_groups_of_fp8_scales_and_the_name_of_a_rank():
    with fake_world(5, 8):
        ps.initialize_model_parallel(2, context_parallel_size=2)
        assert _ranks(ps.get_amax_reduction_group()) == _ranks(ps.get_tensor_and_data_parallel_group())
        assert ps.get_amax_reduction_group(True) is ps.get_tensor_and_data_parallel_group(with_context_parallel=True)
        assert ps.get_amax_reduction_group(tp_only_amax_red=True) is ps.get_tensor_model_parallel_group()
        assert ps.get_amax_reduction_group(True, True) is ps.get_tensor_and_context_parallel_group()
        assert ps.get_all_ranks() == "1_0_1_0_0_0"
        assert ps.get_data_parallel_global_ranks() == _ranks(ps.get_data_parallel_group())


def _returns_gloo_groups() -> None:
    ps.initialize_model_parallel()
    assert ps.get_data_parallel_group_gloo() is ps.get_data_parallel_group()
    assert ps.get_expert_data_parallel_group_gloo() is ps.get_expert_data_parallel_group()


def test_gloo_groups_are_those_that_carry_tensors_of_the_host():
    run_distributed(_returns_gloo_groups, 2)
    with fake_world(0, 2):
        ps.initialize_model_parallel()
        with pytest.raises(ParallelStateError, match="carries_host_tensors=True"):
            ps.get_data_parallel_group_gloo()


def test_an_absent_name_says_where_the_thing_is():
    with pytest.raises(ImportError, match=r"get_gtp_weight_remat_group: .*TorchFullyShardedDataParallel"):
        from core.parallel_state import get_gtp_weight_remat_group  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from core.parallel_state import nothing  # noqa: F401


def test_the_generator_is_found_where_megatron_keeps_it() -> None:
    assert ps.RankGenerator is RankGenerator
