"""Which ranks work together: Megatron-LM's getters over process groups that are all made at once.

`initialize_model_parallel` cuts the world along the named axes of a grid and keeps the result as one immutable state,
so that no getter communicates. Names, arguments and rank order are those of Megatron-LM's
``megatron/core/parallel_state.py``. Before initialisation a rank is alone: tensor, pipeline, context and expert
sizes are 1, and there are no groups.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import assumed_parallel_state
from ._torch_compat import forget_sharding_decisions
from .absent_names import absent_names
from .assumed_parallel_state import (
    get_virtual_pipeline_model_parallel_rank as get_virtual_pipeline_model_parallel_rank,
)
from .assumed_parallel_state import (
    get_virtual_pipeline_model_parallel_world_size as get_virtual_pipeline_model_parallel_world_size,
)
from .assumed_parallel_state import set_data_parallel_rank as set_data_parallel_rank
from .assumed_parallel_state import set_expert_model_parallel_rank as set_expert_model_parallel_rank
from .assumed_parallel_state import set_expert_model_parallel_world_size as set_expert_model_parallel_world_size
from .assumed_parallel_state import set_expert_tensor_parallel_rank as set_expert_tensor_parallel_rank
from .assumed_parallel_state import set_expert_tensor_parallel_world_size as set_expert_tensor_parallel_world_size
from .assumed_parallel_state import set_pipeline_model_parallel_rank as set_pipeline_model_parallel_rank
from .assumed_parallel_state import set_pipeline_model_parallel_world_size as set_pipeline_model_parallel_world_size
from .assumed_parallel_state import set_tensor_model_parallel_rank as set_tensor_model_parallel_rank
from .assumed_parallel_state import set_tensor_model_parallel_world_size as set_tensor_model_parallel_world_size
from .assumed_parallel_state import (
    set_virtual_pipeline_model_parallel_rank as set_virtual_pipeline_model_parallel_rank,
)
from .assumed_parallel_state import (
    set_virtual_pipeline_model_parallel_world_size as set_virtual_pipeline_model_parallel_world_size,
)
from .errors import ParallelConfigError, ParallelStateError
from .foreign_arguments import ignore, refuse
from .parallel_groups import ParallelGroups, ParallelSizes, RankGroup, make_parallel_groups
from .rank_generator import RankGenerator as RankGenerator  # re-exported: Megatron-LM keeps it here

_NO_INTERLEAVING = "a rank holds one pipeline stage; leave it at None, or give context_parallel_size by its name"
_NO_REMATERIALISED_WEIGHTS = "shard weights by data parallelism (TorchFullyShardedDataParallel)"
_EMBEDDING_RANKS = "tied embeddings are on the first and the last stage of a pipeline; drop it"

_state: ParallelGroups | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Callable[..., list[int]] | None = None,
    get_position_embedding_ranks: Callable[..., list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> None:
    """Makes every model-, context-, data- and expert-parallel group; all ranks call it with equal arguments.

    The leftmost token of `order` has stride 1. With 8 ranks and tensor and pipeline size 2 the tensor-parallel groups
    are [0,1] [2,3] [4,5] [6,7], the data-parallel ones [0,2] [1,3] [4,6] [5,7], the pipelines [0,4] [1,5] [2,6] [3,7].

    `num_distributed_optimizer_instances` cuts the data-parallel (x context-parallel) group into as many consecutive
    parts: optimizer state is sharded within a part and replicated across them. Groups are new, also one that spans
    the world, with the default group's backend and `distributed_timeout_minutes` as their time limit; groups of equal
    ranks are made once. Experts' matrices are cut over `expert_tensor_parallel_size` ranks, by default over as many
    as those of dense layers.

    The arguments and their order are Megatron-LM's. Refused, with the argument's name: interleaved pipeline stages,
    hierarchical or hybrid context parallelism, weights rematerialised over a group, other ranks of embeddings, and
    groups over a part of the world. Settings of communicators (SHARP, NCCL's options, streams, Gloo groups next to
    NCCL's) change no number: they are ignored, with one warning that names them.

    Raises:
        ParallelStateError: `torch.distributed` is not initialised, or the groups exist already.
        ParallelConfigError: sizes, or an order, that contradict each other or do not divide the world; or an argument
            that is refused.
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
    caller = "initialize_model_parallel"
    refuse(
        caller,
        virtual_pipeline_model_parallel_size=(virtual_pipeline_model_parallel_size, None, _NO_INTERLEAVING),
        hierarchical_context_parallel_sizes=(
            hierarchical_context_parallel_sizes,
            None,
            "context parallelism here has one level; use context_parallel_size",
        ),
        hybrid_context_parallel=(
            hybrid_context_parallel,
            False,
            "every sequence is cut over the same ranks; use context_parallel_size",
        ),
        gtp_remat_size=(gtp_remat_size, 1, _NO_REMATERIALISED_WEIGHTS),
        expert_gtp_remat_size=(expert_gtp_remat_size, 1, _NO_REMATERIALISED_WEIGHTS),
        get_embedding_ranks=(get_embedding_ranks, None, _EMBEDDING_RANKS),
        get_position_embedding_ranks=(get_position_embedding_ranks, None, _EMBEDDING_RANKS),
        rank_offset=(rank_offset, 0, "groups span the whole world; start the ranks of a part as a world of their own"),
    )
    world = dist.get_world_size()
    refuse(caller, local_world_size=(local_world_size or world, world, "groups span the whole world"))
    ignore(
        caller,
        "they set how groups communicate, and change no number",
        pipeline_model_parallel_comm_backend=(pipeline_model_parallel_comm_backend, None),
        use_sharp=(use_sharp, False),
        nccl_communicator_config_path=(nccl_communicator_config_path, None),
        high_priority_stream_groups=(high_priority_stream_groups, None),
        sharp_enabled_group=(sharp_enabled_group, None),
    )
    if distributed_timeout_minutes <= 0:
        raise ParallelConfigError(
            f"distributed_timeout_minutes is {distributed_timeout_minutes}; it takes a positive number"
        )
    sizes = ParallelSizes(
        world=world,
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        context=context_parallel_size,
        expert=expert_model_parallel_size,
        expert_tensor=tensor_model_parallel_size
        if expert_tensor_parallel_size is None
        else expert_tensor_parallel_size,
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
    assumed_parallel_state.forget()


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
    if kind in assumed_parallel_state.sizes:
        return assumed_parallel_state.sizes[kind]
    return uninitialized if _state is None and uninitialized is not None else len(_member(kind).ranks)


def _rank(kind: str, *, uninitialized: int | None = None) -> int:
    if kind in assumed_parallel_state.ranks:
        return assumed_parallel_state.ranks[kind]
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


def _carries_host_tensors(group: ProcessGroup) -> ProcessGroup:
    backend = str(dist.get_backend_config(group))
    if "gloo" not in backend:
        raise ParallelStateError(
            f"a Gloo group was asked for, and the groups have the backend {backend}; start with "
            "core.device.init_process_group(carries_host_tensors=True), which makes one group for both devices"
        )
    return group


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


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The replicas of this rank's part of the model; `partial_data_parallel`: those within one optimizer instance.

    `with_gtp_remat` is Megatron-LM's: whether to count ranks that rematerialise weights for each other. Here there
    are none, so that both values name one group.
    """
    return _member(_data_parallel_kind(with_context_parallel, partial_data_parallel)).process_group


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Size of `get_data_parallel_group` with the same arguments."""
    return _size(_data_parallel_kind(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """This rank's place in `get_data_parallel_group` with the same arguments."""
    return _rank(_data_parallel_kind(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of the data-parallel group."""
    return _member(_data_parallel_kind(with_context_parallel, False)).ranks[0]


def get_data_parallel_global_ranks(with_context_parallel: bool = False) -> list[int]:
    """Global ranks of the data-parallel group."""
    return list(_member(_data_parallel_kind(with_context_parallel, False)).ranks)


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """`get_data_parallel_group` with the same arguments, where it carries tensors of the host by gloo.

    Raises:
        ParallelStateError: it does not; no second set of groups is made.
    """
    return _carries_host_tensors(
        get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel)
    )


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Tensor x data, or tensor x data x context."""
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> ProcessGroup:
    """The ranks over which scales of fp8 would be agreed on: tensor x data (x context), or tensor (x context)."""
    kind = "tp" if tp_only_amax_red else "tp_dp"
    if with_context_parallel:
        kind += "_cp"
    return _member(kind).process_group


def get_all_ranks() -> str:
    """This rank's places, tensor, 0, data, context, pipeline and expert parallel, as "1_0_0_0_0_0"."""
    tensor, *others = (_rank(kind, uninitialized=0) for kind in ("tp", "dp", "cp", "pp", "ep"))
    rematerialised = 0  # no ranks rematerialise weights
    return "_".join(map(str, (tensor, rematerialised, *others)))


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


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup | None:
    """Experts' tensor x expert x pipeline: one copy of the model's experts."""
    return _group("expert_tp_ep_pp", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """The replicas of this rank's experts; `partial_expert_data_parallel`: those within one optimizer instance."""
    return _group(_expert_data_parallel_kind(partial_expert_data_parallel), check_initialized)


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Size of `get_expert_data_parallel_group` with the same argument."""
    return _size(_expert_data_parallel_kind(partial_expert_data_parallel))


def get_expert_data_parallel_rank(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
    """This rank's place in `get_expert_data_parallel_group` with the same argument."""
    return _rank(_expert_data_parallel_kind(partial_expert_data_parallel))


def get_expert_data_parallel_global_ranks() -> list[int]:
    """Global ranks of the experts' data-parallel group."""
    return list(_member("expert_dp").ranks)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """`get_expert_data_parallel_group`, as :func:`get_data_parallel_group_gloo` gives that of dense layers."""
    return _carries_host_tensors(_member(_expert_data_parallel_kind(partial_expert_data_parallel)).process_group)


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
        "generate_masked_orthogonal_rank_groups": "use core.rank_generator.rank_groups",
        "HeterogeneousRankGenerator": "every replica has the same sizes; use RankGenerator",
    },
)
