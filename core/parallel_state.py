"""Megatron-LM's getters of process groups; all groups are made at once.

`initialize_model_parallel` divides the world along the named axes of a grid and stores the result as one immutable
state, so that no getter communicates. Names, arguments and rank order are those of Megatron-LM's
``megatron/core/parallel_state.py``. Before initialisation a rank is alone: tensor, pipeline, context and expert sizes
are 1, and there are no groups. `core.process_groups` makes the groups, and the getters that differ only in the kind
of group; those of experts are there too.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .absent_names import absent_names
from .errors import ParallelConfigError
from .process_groups import current
from .process_groups.expert_getters import *  # noqa: F403  (Megatron-LM keeps them here)
from .process_groups.initialize import destroy_model_parallel as destroy_model_parallel
from .process_groups.initialize import initialize_model_parallel as initialize_model_parallel
from .process_groups.make_getters import (
    carries_host_tensors,
    data_parallel_kind,
    group_getter,
    name_functions,
    rank_getter,
    rank_setter,
    size_getter,
    size_setter,
)
from .process_groups.rank_generator import RankGenerator as RankGenerator  # re-exported: Megatron-LM keeps it here


def is_initialized() -> bool:
    """Returns whether the groups exist."""
    return current.groups_or_none() is not None


def model_parallel_is_initialized() -> bool:
    """Returns whether the groups exist; all of them are made at once."""
    return is_initialized()


# ---- the mesh


def get_device_mesh() -> DeviceMesh:
    """Returns the grid of the whole world: axes pp, dp_replicate, dp_shard, cp and tp, the last token of the order
    first."""
    return current.groups("the device mesh").mesh


def get_data_parallel_mesh() -> DeviceMesh:
    """Returns the mesh of wrappers: ``(dp_cp,)``, or with several optimizer instances ``(dp_replicate, dp_shard_cp)``.

    It spans this rank's data-parallel x context-parallel group, and uses the process groups that the getters return.
    """
    return current.groups("the data-parallel mesh").data_parallel_mesh


# ---- tensor, context and pipeline parallelism: one rank of one before initialisation

get_tensor_model_parallel_group = group_getter("tp", "The ranks that share the matrices of this rank's layers.")
get_tensor_model_parallel_world_size = size_getter("tp", "tensor-parallel group", alone=1)
get_tensor_model_parallel_rank = rank_getter("tp", "tensor-parallel group", alone=0)
set_tensor_model_parallel_world_size = size_setter("tp")
set_tensor_model_parallel_rank = rank_setter("tp")

get_context_parallel_group = group_getter("cp", "The ranks that share each sequence.")
get_context_parallel_world_size = size_getter("cp", "context-parallel group", alone=1)
get_context_parallel_rank = rank_getter("cp", "context-parallel group", alone=0)

get_pipeline_model_parallel_group = group_getter("pp", "The stages of this rank's pipeline.")
get_pipeline_model_parallel_world_size = size_getter("pp", "pipeline in stages", alone=1)
get_pipeline_model_parallel_rank = rank_getter("pp", "pipeline, the stage", alone=0)
set_pipeline_model_parallel_world_size = size_setter("pp")
set_pipeline_model_parallel_rank = rank_setter("pp")

get_model_parallel_group = group_getter("tp_pp", "The ranks that hold one copy of the model: tensor x pipeline.")

get_tensor_and_context_parallel_group = group_getter("tp_cp", "Tensor x context.")
get_tensor_and_context_parallel_world_size = size_getter("tp_cp", "tensor x context group")
get_tensor_and_context_parallel_rank = rank_getter("tp_cp", "tensor x context group")

get_embedding_group = group_getter(
    "embedding", "First and last stage of this rank's pipeline, which hold tied embeddings; a middle stage has none."
)
get_position_embedding_group = group_getter(
    "position_embedding", "The first stage of this rank's pipeline, which holds learned positions; others have none."
)


def get_tensor_model_parallel_src_rank() -> int:
    """Returns the global rank of the first member of the tensor-parallel group."""
    return current.member("tp").ranks[0]


def get_model_parallel_src_rank() -> int:
    """Returns the global rank of the first member of the model-parallel group."""
    return current.member("tp_pp").ranks[0]


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Returns the global ranks of the context-parallel group."""
    return list(current.member("cp").ranks) if check_initialized or is_initialized() else None


# ---- pipeline stages


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns whether this rank has the first stage, which embeds the tokens.

    The arguments are Megatron-LM's, for interleaved stages; here a rank has one stage.
    """
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns whether this rank has the last stage, which computes the loss.

    The arguments are Megatron-LM's, for interleaved stages; here a rank has one stage.
    """
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def get_pipeline_model_parallel_first_rank() -> int:
    """Returns the global rank of the first stage of this rank's pipeline."""
    return current.member("pp").ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the global rank of the last stage of this rank's pipeline."""
    return current.member("pp").ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Returns the global rank of the next stage; that of the last stage is the first."""
    group = current.member("pp")
    return group.ranks[(group.rank + 1) % len(group.ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Returns the global rank of the previous stage; that of the first stage is the last."""
    group = current.member("pp")
    return group.ranks[group.rank - 1]


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns whether `get_embedding_group` has a group for this rank; arguments as for `is_pipeline_first_stage`."""
    return current.has("embedding")


def is_rank_in_position_embedding_group() -> bool:
    """Returns whether `get_position_embedding_group` has a group for this rank."""
    return current.has("position_embedding")


# ---- data parallelism

set_data_parallel_rank = rank_setter("dp")  # of the group without context parallelism
get_intra_distributed_optimizer_instance_group = group_getter(
    "optimizer_instance", "Every rank of this rank's optimizer instance, over all kinds of parallelism."
)
get_inter_distributed_optimizer_instance_group = group_getter(
    "dp_replicate",
    "The ranks that hold the same shard in each optimizer instance; this rank alone when there is one instance.",
)


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Returns the replicas of this rank's part of the model; `partial_data_parallel`: those within one optimizer
    instance.

    `with_gtp_remat` is Megatron-LM's: whether to count ranks that rematerialise weights for each other. Here there
    are none, so that both values name one group.
    """
    return current.member(data_parallel_kind(with_context_parallel, partial_data_parallel)).process_group


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Returns the size of `get_data_parallel_group` with the same arguments."""
    return current.size(data_parallel_kind(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Returns this rank's place in `get_data_parallel_group` with the same arguments."""
    return current.rank(data_parallel_kind(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Returns the global rank of the first member of the data-parallel group."""
    return current.member(data_parallel_kind(with_context_parallel, False)).ranks[0]


def get_data_parallel_global_ranks(with_context_parallel: bool = False) -> list[int]:
    """Returns the global ranks of the data-parallel group."""
    return list(current.member(data_parallel_kind(with_context_parallel, False)).ranks)


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Returns `get_data_parallel_group` with the same arguments, if it carries host tensors by gloo.

    Raises:
        ParallelStateError: it does not; there is no second set of groups.
    """
    return carries_host_tensors(
        get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel)
    )


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Returns the tensor x data group, or tensor x data x context."""
    return current.process_group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> ProcessGroup:
    """Returns the ranks over which scales of fp8 would be agreed on: tensor x data (x context), or tensor (x
    context)."""
    kind = "tp" if tp_only_amax_red else "tp_dp"
    if with_context_parallel:
        kind += "_cp"
    return current.member(kind).process_group


def get_all_ranks() -> str:
    """Returns this rank's places, tensor, 0, data, context, pipeline and expert parallel, as "1_0_0_0_0_0"."""
    tensor, *others = (current.rank(kind, alone=0) for kind in ("tp", "dp", "cp", "pp", "ep"))
    rematerialised = 0  # no ranks rematerialise weights
    return "_".join(map(str, (tensor, rematerialised, *others)))


# ---- stages that are interleaved on a rank: there are none

set_virtual_pipeline_model_parallel_rank = rank_setter("virtual_pp")


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns what was set, which nothing else reads; None by default."""
    return current.assumed_ranks.get("virtual_pp")


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Takes None alone: a rank holds one pipeline stage, and stages are not interleaved.

    Raises:
        ParallelConfigError: a number.
    """
    if world_size is not None:
        raise ParallelConfigError(
            f"set_virtual_pipeline_model_parallel_world_size was given {world_size}, but a rank holds one pipeline "
            "stage; give None"
        )


def get_virtual_pipeline_model_parallel_world_size() -> None:
    """Returns None: pipeline stages are not interleaved."""


name_functions(globals())

_NO_HIERARCHY = "context parallelism here has one level; use get_context_parallel_group"
_NO_REMATERIALISATION = (
    "no group rematerialises weights; TorchFullyShardedDataParallel shards them by data parallelism"
)

__getattr__ = absent_names(
    __name__,
    {
        "get_hierarchical_context_parallel_groups": _NO_HIERARCHY,
        "get_hybrid_data_context_parallel_groups": _NO_HIERARCHY,
        **{
            f"get_{expert}gtp_weight_remat_{what}": _NO_REMATERIALISATION
            for expert in ("", "expert_")
            for what in ("group", "world_size", "rank", "global_ranks")
        },
        "get_global_memory_buffer": "collectives here keep no memory between calls; allocate a tensor",
        "destroy_global_memory_buffer": "collectives here keep no memory between calls; drop the call",
        "get_nccl_options": "give NCCL's options by its environment variables",
        "create_group": "use torch.distributed.new_group",
        "update_pg_timeout": "give distributed_timeout_minutes to initialize_model_parallel",
        "create_all_gather_groups": "use torch.distributed.new_group with get_data_parallel_global_ranks()",
        "generate_masked_orthogonal_rank_groups": "use core.process_groups.rank_generator.rank_groups",
        "HeterogeneousRankGenerator": "every replica has the same sizes; use RankGenerator",
    },
)
