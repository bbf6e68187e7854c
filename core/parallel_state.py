"""Megatron-LM's getters of process groups. All groups are made at once.

`initialize_model_parallel` divides the world along the named axes of a grid and stores the result as one immutable
state, so that no getter communicates. Names, arguments and rank order are those of Megatron-LM's
``megatron/core/parallel_state.py``. Before initialisation a rank is alone: tensor, pipeline, context and expert sizes
are 1, and there are no groups. `core.process_groups` makes the groups, and the getters that differ only in the kind
of group.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .base.megatron_names import absent_names
from .process_groups import current
from .process_groups.current import data_parallel_kind, group_getter, name_functions, rank_getter, size_getter

initialize_model_parallel = current.initialize_model_parallel
destroy_model_parallel = current.destroy_model_parallel
get_virtual_pipeline_model_parallel_rank = current.get_virtual_pipeline_model_parallel_rank
set_virtual_pipeline_model_parallel_rank = current.set_virtual_pipeline_model_parallel_rank


def is_initialized() -> bool:
    """Returns whether the groups exist."""
    return current.groups_or_none() is not None


def model_parallel_is_initialized() -> bool:
    """Returns whether the groups exist. All of them are made at once."""
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


def get_expert_data_parallel_mesh() -> DeviceMesh:
    """Returns the same for experts: ``(expert_dp,)``, or ``(dp_replicate, expert_dp_shard)``."""
    return current.groups("the experts' data-parallel mesh").expert_data_parallel_mesh


# ---- tensor, context and pipeline parallelism: one rank of one before initialisation

get_tensor_model_parallel_group = group_getter("tp", "The ranks that share the matrices of this rank's layers.")
get_tensor_model_parallel_world_size = size_getter("tp", "tensor-parallel group", alone=1)
get_tensor_model_parallel_rank = rank_getter("tp", "tensor-parallel group", alone=0)

get_context_parallel_group = group_getter("cp", "The ranks that share each sequence.")
get_context_parallel_world_size = size_getter("cp", "context-parallel group", alone=1)
get_context_parallel_rank = rank_getter("cp", "context-parallel group", alone=0)

get_pipeline_model_parallel_group = group_getter("pp", "The stages of this rank's pipeline.")
get_pipeline_model_parallel_world_size = size_getter("pp", "pipeline in stages", alone=1)
get_pipeline_model_parallel_rank = rank_getter("pp", "pipeline, the stage", alone=0)

get_model_parallel_group = group_getter("tp_pp", "The ranks that hold one copy of the model: tensor x pipeline.")

get_tensor_and_context_parallel_group = group_getter("tp_cp", "Tensor x context.")

get_embedding_group = group_getter(
    "embedding", "First and last stage of this rank's pipeline, which hold tied embeddings; a middle stage has none."
)
get_position_embedding_group = group_getter(
    "position_embedding", "The first stage of this rank's pipeline, which holds learned positions; others have none."
)


def get_tensor_model_parallel_src_rank() -> int:
    """Returns the global rank of the first member of the tensor-parallel group."""
    return current.member("tp").ranks[0]


# ---- pipeline stages


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of pipeline stages of each rank, or None where it is one."""
    groups = current.groups_or_none()
    return None if groups is None else groups.virtual_pipeline_size


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns whether this rank has the first stage, which embeds the tokens.

    Args:
        ignore_virtual: whether any of the rank's virtual stages counts.
        vp_stage: else the virtual stage that is asked about; None means the first.
    """
    is_first_turn = ignore_virtual or get_virtual_pipeline_model_parallel_world_size() is None or not vp_stage
    return is_first_turn and get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns whether this rank has the last stage, which computes the loss.

    Args:
        ignore_virtual, vp_stage: as in `is_pipeline_first_stage`. Stages are interleaved; for the schedule
            ZBVZeroBubble ask :func:`core.transformer.pipeline_stages.pipeline_stage`.
    """
    virtual = get_virtual_pipeline_model_parallel_world_size()
    is_last_turn = ignore_virtual or virtual is None or vp_stage == virtual - 1
    return is_last_turn and get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def get_pipeline_model_parallel_first_rank() -> int:
    """Returns the global rank with the first stage of this rank's pipeline."""
    return current.member("pp").ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the global rank with the last stage of this rank's pipeline."""
    return current.member("pp").ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Returns the global rank with the stage after this rank's, of the last one the first."""
    pipeline = current.member("pp")
    return pipeline.ranks[(pipeline.rank + 1) % len(pipeline.ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Returns the global rank with the stage before this rank's, of the first one the last."""
    pipeline = current.member("pp")
    return pipeline.ranks[pipeline.rank - 1]


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns whether this rank has an end of its pipeline, which hold tied embeddings.

    Args:
        ignore_virtual, vp_stage: as in `is_pipeline_first_stage`.
    """
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(ignore_virtual, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Returns whether this rank has the first stage of its pipeline, which holds learned positions."""
    return is_pipeline_first_stage()


# ---- data parallelism

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
    """Returns the replicas of this rank's part of the model. `partial_data_parallel`: those within one optimizer
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


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Returns the tensor x data group, or tensor x data x context."""
    return current.process_group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


# ---- experts

get_expert_model_parallel_group = group_getter("ep", "The ranks that share the experts of a layer.")
get_expert_model_parallel_world_size = size_getter("ep", "expert-parallel group", alone=1)
get_expert_model_parallel_rank = rank_getter("ep", "expert-parallel group", alone=0)
get_expert_tensor_parallel_group = group_getter("expert_tp", "The ranks that share the matrices of one expert.")
get_expert_tensor_parallel_world_size = size_getter("expert_tp", "experts' tensor-parallel group")
get_expert_tensor_parallel_rank = rank_getter("expert_tp", "experts' tensor-parallel group")
get_expert_tensor_and_model_parallel_group = group_getter("expert_tp_ep", "Experts' tensor x expert.")
get_expert_tensor_and_model_parallel_world_size = size_getter("expert_tp_ep", "experts' tensor x expert group")
get_expert_tensor_and_model_parallel_rank = rank_getter("expert_tp_ep", "experts' tensor x expert group")


def experts_are_apart() -> bool:
    """Returns whether experts are cut over other ranks than dense layers. Their parameters then have replicas of their
    own, and carry Megatron-LM's mark ``allreduce=False``."""
    groups = current.groups_or_none()
    return groups is not None and groups.experts_are_apart


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup | None:
    """Returns the experts' tensor x expert x pipeline group: one copy of the model's experts."""
    return current.process_group("expert_tp_ep_pp", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Returns the replicas of this rank's experts. `partial_expert_data_parallel`: those within one optimizer
    instance."""
    return current.process_group(_expert_data_kind(partial_expert_data_parallel), check_initialized)


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Returns the size of `get_expert_data_parallel_group` with the same argument."""
    return current.size(_expert_data_kind(partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Returns this rank's place in `get_expert_data_parallel_group` with the same argument."""
    return current.rank(_expert_data_kind(partial_expert_data_parallel))


def _expert_data_kind(is_partial: bool) -> str:
    return "expert_dp_shard" if is_partial else "expert_dp"


name_functions(globals())


__getattr__ = absent_names(__name__)
