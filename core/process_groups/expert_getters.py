"""Megatron-LM's getters of the process groups of experts; users import them from `core.parallel_state`."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from . import current
from .make_getters import (
    carries_host_tensors,
    group_getter,
    name_functions,
    rank_getter,
    rank_setter,
    size_getter,
    size_setter,
)

__all__ = [
    "get_expert_data_parallel_global_ranks",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_group_gloo",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_src_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
]

get_expert_model_parallel_group = group_getter("ep", "The ranks that share the experts of a layer.")
get_expert_model_parallel_world_size = size_getter("ep", "expert-parallel group", alone=1)
get_expert_model_parallel_rank = rank_getter("ep", "expert-parallel group", alone=0)
set_expert_model_parallel_world_size = size_setter("ep")
set_expert_model_parallel_rank = rank_setter("ep")

get_expert_tensor_parallel_group = group_getter("expert_tp", "The ranks that share the matrices of one expert.")
get_expert_tensor_parallel_world_size = size_getter("expert_tp", "experts' tensor-parallel group")
get_expert_tensor_parallel_rank = rank_getter("expert_tp", "experts' tensor-parallel group")
set_expert_tensor_parallel_world_size = size_setter("expert_tp")
set_expert_tensor_parallel_rank = rank_setter("expert_tp")

get_expert_tensor_and_model_parallel_group = group_getter("expert_tp_ep", "Experts' tensor x expert.")
get_expert_tensor_and_model_parallel_world_size = size_getter("expert_tp_ep", "experts' tensor x expert group")
get_expert_tensor_and_model_parallel_rank = rank_getter("expert_tp_ep", "experts' tensor x expert group")


def get_expert_model_parallel_src_rank() -> int:
    """Returns the global rank of the first member of the expert-parallel group."""
    return current.member("ep").ranks[0]


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup | None:
    """Returns the experts' tensor x expert x pipeline group: one copy of the model's experts."""
    return current.process_group("expert_tp_ep_pp", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Returns the replicas of this rank's experts; `partial_expert_data_parallel`: those within one optimizer
    instance."""
    return current.process_group(_expert_data_parallel_kind(partial_expert_data_parallel), check_initialized)


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Returns the size of `get_expert_data_parallel_group` with the same argument."""
    return current.size(_expert_data_parallel_kind(partial_expert_data_parallel))


def get_expert_data_parallel_rank(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
    """Returns this rank's place in `get_expert_data_parallel_group` with the same argument."""
    return current.rank(_expert_data_parallel_kind(partial_expert_data_parallel))


def get_expert_data_parallel_global_ranks() -> list[int]:
    """Returns the global ranks of the experts' data-parallel group."""
    return list(current.member("expert_dp").ranks)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Returns `get_expert_data_parallel_group`, as `get_data_parallel_group_gloo` gives that of dense layers."""
    kind = _expert_data_parallel_kind(partial_expert_data_parallel)
    return carries_host_tensors(current.member(kind).process_group)


def _expert_data_parallel_kind(partial_expert_data_parallel: bool) -> str:
    return "expert_dp_shard" if partial_expert_data_parallel else "expert_dp"


name_functions(globals())
