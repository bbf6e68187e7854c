"""Which ranks work together: Megatron-LM's getters over process groups that are all made at once.

`initialize_model_parallel` cuts the world along the named axes of a grid and keeps the result as one immutable state,
so that no getter communicates. Names, arguments and rank order are those of Megatron-LM's
``megatron/core/parallel_state.py``. Before initialisation a rank is alone: tensor, pipeline, context and expert
sizes are 1, and there are no groups.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ._torch_compat import forget_sharding_decisions
from .errors import ParallelConfigError, ParallelStateError
from .parallel_groups import ParallelGroups, ParallelSizes, RankGroup, make_parallel_groups
from .rank_generator import RankGenerator as RankGenerator  # re-exported: Megatron-LM keeps it here

_state: ParallelGroups | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    *,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    order: str = "tp-cp-ep-dp-pp",
    distributed_timeout_minutes: float = 30,
) -> None:
    """Makes every model-, context-, data- and expert-parallel group; all ranks call it with equal arguments.

    The leftmost token of `order` has stride 1. With 8 ranks and tensor and pipeline size 2 the tensor-parallel groups
    are [0,1] [2,3] [4,5] [6,7], the data-parallel ones [0,2] [1,3] [4,6] [5,7], the pipelines [0,4] [1,5] [2,6] [3,7].

    `num_distributed_optimizer_instances` cuts the data-parallel (x context-parallel) group into as many consecutive
    parts: optimizer state is sharded within a part and replicated across them. Groups are new, also one that spans
    the world, with the default group's backend and `distributed_timeout_minutes` as their time limit; groups of equal
    ranks are made once.

    Raises:
        ParallelStateError: `torch.distributed` is not initialised, or the groups exist already.
        ParallelConfigError: sizes, or an order, that contradict each other or do not divide the world.
    """
    global _state
    if not dist.is_initialized():
        raise ParallelStateError(
            "torch.distributed is not initialised; call core.device.init_process_group() before "
            "initialize_model_parallel()"
        )
    if _state is not None:
        raise ParallelStateError(
            "model parallel groups exist already; call destroy_model_parallel() before initialising them again"
        )
    if distributed_timeout_minutes <= 0:
        raise ParallelConfigError(
            f"distributed_timeout_minutes is {distributed_timeout_minutes}; it takes a positive number"
        )
    sizes = ParallelSizes(
        world=dist.get_world_size(),
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        context=context_parallel_size,
        expert=expert_model_parallel_size,
        optimizer_instances=num_distributed_optimizer_instances,
        order=order,
    )
    _state = make_parallel_groups(sizes, timedelta(minutes=distributed_timeout_minutes))


def destroy_model_parallel() -> None:
    """Destroys what `initialize_model_parallel` made, if anything; the default group stays."""
    global _state
    if _state is not None:
        _state.destroy()
        forget_sharding_decisions()
    _state = None


def is_initialized() -> bool:
    """Whether the groups exist."""
    return _state is not None


def model_parallel_is_initialized() -> bool:
    """Whether the groups exist; all of them are made at once."""
    return _state is not None


def _initialized(asked: str) -> ParallelGroups:
    if _state is None:
        raise ParallelStateError(
            f"{asked} was asked for before initialisation; call core.parallel_state.initialize_model_parallel() first"
        )
    return _state


# ---- how the getters read the state


def _member(kind: str) -> RankGroup:
    by_kind = _initialized(f"the {kind!r} group").by_kind
    if kind not in by_kind:
        raise ParallelStateError(
            f"rank {dist.get_rank()} is at a pipeline stage without {kind!r} group; ask is_rank_in_{kind}_group() "
            "first"
        )
    return by_kind[kind]


def _group(kind: str, check_initialized: bool) -> ProcessGroup | None:
    if not check_initialized and (_state is None or kind not in _state.by_kind):
        return None
    return _member(kind).process_group


def _size(kind: str, *, uninitialized: int | None = None) -> int:
    return uninitialized if _state is None and uninitialized is not None else len(_member(kind).ranks)


def _rank(kind: str, *, uninitialized: int | None = None) -> int:
    return uninitialized if _state is None and uninitialized is not None else _member(kind).rank


def _data_parallel_kind(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    if partial_data_parallel and not with_context_parallel:
        raise ParallelConfigError(
            "partial_data_parallel=True was asked for without with_context_parallel=True; an optimizer instance "
            "shards over both, so pass both"
        )
    return "dp_shard_cp" if partial_data_parallel else "dp_cp" if with_context_parallel else "dp"


def _expert_data_parallel_kind(partial_expert_data_parallel: bool) -> str:
    return "expert_dp_shard" if partial_expert_data_parallel else "expert_dp"


# ---- the mesh


def get_device_mesh() -> DeviceMesh:
    """The grid of the whole world: axes pp, dp_replicate, dp_shard, cp and tp, the last token of the order first."""
    return _initialized("the device mesh").mesh


def get_data_parallel_mesh() -> DeviceMesh:
    """What wrappers shard over: axis ``dp_cp``, or with several optimizer instances ``(dp_replicate, dp_shard_cp)``.

    It spans this rank's data-parallel x context-parallel group, over the process groups that the getters return.
    """
    return _initialized("the data-parallel mesh").data_parallel_mesh


# ---- tensor, pipeline and context parallelism: one rank of one before initialisation


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that share the matrices of this rank's layers."""
    return _group("tp", check_initialized)


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor-parallel group; 1 before initialisation."""
    return _size("tp", uninitialized=1)


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group; 0 before initialisation."""
    return _rank("tp", uninitialized=0)


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of the tensor-parallel group."""
    return _member("tp").ranks[0]


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that share each sequence."""
    return _group("cp", check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Global ranks of the context-parallel group."""
    return list(_member("cp").ranks) if check_initialized or _state is not None else None


def get_context_parallel_world_size() -> int:
    """Size of the context-parallel group; 1 before initialisation."""
    return _size("cp", uninitialized=1)


def get_context_parallel_rank() -> int:
    """This rank's place in the context-parallel group; 0 before initialisation."""
    return _rank("cp", uninitialized=0)


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that together hold one copy of the model: tensor x pipeline."""
    return _group("tp_pp", check_initialized)


def get_model_parallel_src_rank() -> int:
    """Global rank of the first member of the model-parallel group."""
    return _member("tp_pp").ranks[0]


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Tensor x context."""
    return _group("tp_cp", check_initialized)


def get_tensor_and_context_parallel_world_size() -> int:
    """Size of the tensor x context group."""
    return _size("tp_cp")


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's place in the tensor x context group."""
    return _rank("tp_cp")


# ---- pipeline stages


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The stages of this rank's pipeline."""
    return _group("pp", check_initialized)


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages; 1 before initialisation."""
    return _size("pp", uninitialized=1)


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage; 0 before initialisation."""
    return _rank("pp", uninitialized=0)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the first stage, which embeds the tokens.

    The arguments are Megatron-LM's, for stages that are interleaved on a rank; here a rank holds one.
    """
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the last stage, which computes the loss.

    The arguments are Megatron-LM's, for stages that are interleaved on a rank; here a rank holds one.
    """
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage of this rank's pipeline."""
    return _member("pp").ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage of this rank's pipeline."""
    return _member("pp").ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; the last stage's next is the first."""
    group = _member("pp")
    return group.ranks[(group.rank + 1) % len(group.ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the stage before; the first stage's is the last."""
    group = _member("pp")
    return group.ranks[group.rank - 1]


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """First and last stage of this rank's pipeline, which hold tied embeddings; a middle stage has none."""
    return _group("embedding", check_initialized)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether `get_embedding_group` has a group for this rank; arguments as for `is_pipeline_first_stage`."""
    return _state is not None and "embedding" in _state.by_kind


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The first stage of this rank's pipeline, which holds the learned positions; other stages have none."""
    return _group("position_embedding", check_initialized)


def is_rank_in_position_embedding_group() -> bool:
    """Whether `get_position_embedding_group` has a group for this rank."""
    return _state is not None and "position_embedding" in _state.by_kind


# ---- data parallelism


def get_data_parallel_group(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> ProcessGroup:
    """The replicas of this rank's part of the model; `partial_data_parallel`: those within one optimizer instance."""
    return _member(_data_parallel_kind(with_context_parallel, partial_data_parallel)).process_group


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Size of `get_data_parallel_group` with the same arguments."""
    return _size(_data_parallel_kind(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """This rank's place in `get_data_parallel_group` with the same arguments."""
    return _rank(_data_parallel_kind(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of the data-parallel group."""
    return _member(_data_parallel_kind(with_context_parallel, False)).ranks[0]


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Tensor x data, or tensor x data x context."""
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Every rank of this rank's optimizer instance, over all kinds of parallelism."""
    return _group("optimizer_instance", check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that hold the same shard in each optimizer instance; this rank alone when there is one instance."""
    return _group("dp_replicate", check_initialized)


# ---- experts


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that share the experts of a layer."""
    return _group("ep", check_initialized)


def get_expert_model_parallel_world_size() -> int:
    """Size of the expert-parallel group; 1 before initialisation."""
    return _size("ep", uninitialized=1)


def get_expert_model_parallel_rank() -> int:
    """This rank's place in the expert-parallel group; 0 before initialisation."""
    return _rank("ep", uninitialized=0)


def get_expert_model_parallel_src_rank() -> int:
    """Global rank of the first member of the expert-parallel group."""
    return _member("ep").ranks[0]


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that share the matrices of one expert."""
    return _group("expert_tp", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    """Size of the experts' tensor-parallel group."""
    return _size("expert_tp")


def get_expert_tensor_parallel_rank() -> int:
    """This rank's place in the experts' tensor-parallel group."""
    return _rank("expert_tp")


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Experts' tensor x expert."""
    return _group("expert_tp_ep", check_initialized)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Size of the experts' tensor x expert group."""
    return _size("expert_tp_ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's place in the experts' tensor x expert group."""
    return _rank("expert_tp_ep")


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Experts' tensor x expert x pipeline: one copy of the model's experts."""
    return _group("expert_tp_ep_pp", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """The replicas of this rank's experts; `partial_expert_data_parallel`: those within one optimizer instance."""
    return _group(_expert_data_parallel_kind(partial_expert_data_parallel), check_initialized)


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Size of `get_expert_data_parallel_group` with the same argument."""
    return _size(_expert_data_parallel_kind(partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """This rank's place in `get_expert_data_parallel_group` with the same argument."""
    return _rank(_expert_data_parallel_kind(partial_expert_data_parallel))
