"""Megatron-LM's getters of process groups. All groups are made at once.

`initialize_model_parallel` divides the world along the named axes of a grid and stores the result as one immutable
state, so that no getter communicates. Names, arguments and rank order are those of Megatron-LM's
``megatron/core/parallel_state.py``. Before initialisation a rank is alone: tensor, pipeline, context and expert sizes
are 1, and there are no groups. `shardstack.process_groups` makes and keeps the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import process_groups
from .base.errors import ParallelConfigError
from .base.megatron_names import absent_names
from .process_groups import RankGroup, make_groups
from .process_groups_config import ProcessGroupCollection, group_of_field

initialize_model_parallel = make_groups.initialize_model_parallel
destroy_model_parallel = make_groups.destroy_model_parallel
get_virtual_pipeline_model_parallel_rank = process_groups.get_virtual_pipeline_model_parallel_rank
set_virtual_pipeline_model_parallel_rank = process_groups.set_virtual_pipeline_model_parallel_rank


def is_initialized() -> bool:
    """Returns whether the groups exist."""
    return process_groups.groups_or_none() is not None


def model_parallel_is_initialized() -> bool:
    """Returns whether the groups exist. All of them are made at once."""
    return is_initialized()


class _GroupGetter(Protocol):
    """Returns this rank's process group, or None if it has none and `check_initialized` is False."""

    def __call__(self, check_initialized: bool = True) -> ProcessGroup | None: ...


def _group(kind: str, text: str) -> _GroupGetter:
    """Makes a getter of this rank's process group. `text` is its docstring."""

    def getter(check_initialized: bool = True) -> ProcessGroup | None:
        return process_groups.process_group(kind, check_initialized)

    getter.__doc__ = text
    return getter


def _size(kind: str, what: str, alone: int | None = None) -> Callable[[], int]:
    """Makes a getter of the number of ranks, which returns `alone`, if given, before initialisation."""
    return _number(lambda group: len(group.ranks), kind, f"the size of the {what}", alone)


def _rank(kind: str, what: str, alone: int | None = None) -> Callable[[], int]:
    """Makes a getter of this rank's place, which returns `alone`, if given, before initialisation."""
    return _number(lambda group: group.rank, kind, f"this rank's place in the {what}", alone)


def _number(of: Callable[[RankGroup], int], kind: str, what: str, alone: int | None) -> Callable[[], int]:
    def getter() -> int:
        return of(process_groups.member(kind)) if alone is None or is_initialized() else alone

    getter.__doc__ = f"Returns {what}{'' if alone is None else f'; {alone} before initialisation'}."
    return getter


# ---- the mesh


def get_device_mesh() -> DeviceMesh:
    """Returns the grid of the whole world: axes pp, dp_replicate, dp_shard, cp and tp, the last token of the order
    first."""
    return process_groups.groups("the device mesh").mesh


def get_data_parallel_mesh() -> DeviceMesh:
    """Returns the mesh of wrappers: ``(dp_cp,)``, or with several optimizer instances ``(dp_replicate, dp_shard_cp)``.

    It spans this rank's data-parallel x context-parallel group, and uses the process groups that the getters return.
    """
    return process_groups.groups("the data-parallel mesh").data_parallel_mesh


def get_expert_data_parallel_mesh() -> DeviceMesh:
    """Returns the mesh of experts' replicas: ``(expert_dp,)``, or ``(dp_replicate, expert_dp_shard)``."""
    return process_groups.groups("the experts' data-parallel mesh").expert_data_parallel_mesh


# ---- tensor, context and pipeline parallelism: one rank of one before initialisation

get_tensor_model_parallel_group = _group("tp", "The ranks that share the matrices of this rank's layers.")
get_tensor_model_parallel_world_size = _size("tp", "tensor-parallel group", alone=1)
get_tensor_model_parallel_rank = _rank("tp", "tensor-parallel group", alone=0)

get_context_parallel_group = _group("cp", "The ranks that share each sequence.")
get_context_parallel_world_size = _size("cp", "context-parallel group", alone=1)
get_context_parallel_rank = _rank("cp", "context-parallel group", alone=0)

get_pipeline_model_parallel_group = _group("pp", "The stages of this rank's pipeline.")
get_pipeline_model_parallel_world_size = _size("pp", "pipeline in stages", alone=1)
get_pipeline_model_parallel_rank = _rank("pp", "pipeline, the stage", alone=0)

get_model_parallel_group = _group("tp_pp", "The ranks that hold one copy of the model: tensor x pipeline.")

get_tensor_and_context_parallel_group = _group("tp_cp", "Tensor x context.")

get_embedding_group = _group(
    "embedding", "First and last stage of this rank's pipeline, which hold tied embeddings; a middle stage has none."
)
get_position_embedding_group = _group(
    "position_embedding", "The first stage of this rank's pipeline, which holds learned positions; others have none."
)


def get_tensor_model_parallel_src_rank() -> int:
    """Returns the global rank of the first member of the tensor-parallel group."""
    return process_groups.member("tp").ranks[0]


# ---- pipeline stages


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of pipeline stages of each rank, or None where it is one."""
    groups = process_groups.groups_or_none()
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
            ZBVZeroBubble ask :func:`shardstack.transformer.pipeline_stages.pipeline_stage`.
    """
    virtual = get_virtual_pipeline_model_parallel_world_size()
    is_last_turn = ignore_virtual or virtual is None or vp_stage == virtual - 1
    return is_last_turn and get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def get_pipeline_model_parallel_first_rank() -> int:
    """Returns the global rank with the first stage of this rank's pipeline."""
    return process_groups.member("pp").ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the global rank with the last stage of this rank's pipeline."""
    return process_groups.member("pp").ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Returns the global rank with the stage after this rank's, of the last one the first."""
    pipeline = process_groups.member("pp")
    return pipeline.ranks[(pipeline.rank + 1) % len(pipeline.ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Returns the global rank with the stage before this rank's, of the first one the last."""
    pipeline = process_groups.member("pp")
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


def _data_kind(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    """Returns the kind of data-parallel group that these arguments of Megatron-LM's getters ask for."""
    if partial_data_parallel and not with_context_parallel:
        raise ParallelConfigError(
            "partial_data_parallel=True was asked for without with_context_parallel=True; an optimizer instance "
            "shards over both, so pass both"
        )
    return "dp_shard_cp" if partial_data_parallel else "dp_cp" if with_context_parallel else "dp"


get_intra_distributed_optimizer_instance_group = _group(
    "optimizer_instance", "Every rank of this rank's optimizer instance, over all kinds of parallelism."
)
get_inter_distributed_optimizer_instance_group = _group(
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
    return process_groups.member(_data_kind(with_context_parallel, partial_data_parallel)).process_group


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Returns the size of `get_data_parallel_group` with the same arguments."""
    return len(process_groups.member(_data_kind(with_context_parallel, partial_data_parallel)).ranks)


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Returns this rank's place in `get_data_parallel_group` with the same arguments."""
    return process_groups.member(_data_kind(with_context_parallel, partial_data_parallel)).rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Returns the global rank of the first member of the data-parallel group."""
    return process_groups.member(_data_kind(with_context_parallel, False)).ranks[0]


def get_data_parallel_global_ranks(with_context_parallel: bool = False) -> list[int]:
    """Returns the global ranks of the data-parallel group."""
    return list(process_groups.member(_data_kind(with_context_parallel, False)).ranks)


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Returns the tensor x data group, or tensor x data x context."""
    return process_groups.process_group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


# ---- experts

get_expert_model_parallel_group = _group("ep", "The ranks that share the experts of a layer.")
get_expert_model_parallel_world_size = _size("ep", "expert-parallel group", alone=1)
get_expert_model_parallel_rank = _rank("ep", "expert-parallel group", alone=0)
get_expert_tensor_parallel_group = _group("expert_tp", "The ranks that share the matrices of one expert.")
get_expert_tensor_parallel_world_size = _size("expert_tp", "experts' tensor-parallel group")
get_expert_tensor_parallel_rank = _rank("expert_tp", "experts' tensor-parallel group")
get_expert_tensor_and_model_parallel_group = _group("expert_tp_ep", "Experts' tensor x expert.")
get_expert_tensor_and_model_parallel_world_size = _size("expert_tp_ep", "experts' tensor x expert group")
get_expert_tensor_and_model_parallel_rank = _rank("expert_tp_ep", "experts' tensor x expert group")


def experts_are_apart() -> bool:
    """Returns whether experts are cut over other ranks than dense layers. Their parameters then have replicas of their
    own, and carry Megatron-LM's mark ``allreduce=False``."""
    groups = process_groups.groups_or_none()
    return groups is not None and groups.experts_are_apart


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup | None:
    """Returns the experts' tensor x expert x pipeline group: one copy of the model's experts."""
    return process_groups.process_group("expert_tp_ep_pp", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Returns the replicas of this rank's experts. `partial_expert_data_parallel`: those within one optimizer
    instance."""
    return process_groups.process_group(_expert_data_kind(partial_expert_data_parallel), check_initialized)


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Returns the size of `get_expert_data_parallel_group` with the same argument."""
    return len(process_groups.member(_expert_data_kind(partial_expert_data_parallel)).ranks)


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Returns this rank's place in `get_expert_data_parallel_group` with the same argument."""
    return process_groups.member(_expert_data_kind(partial_expert_data_parallel)).rank


def _expert_data_kind(is_partial: bool) -> str:
    return "expert_dp_shard" if is_partial else "expert_dp"


# Getters made here are named after their variables, for tracebacks and `help`.
for _name, _getter in list(globals().items()):
    if getattr(_getter, "__qualname__", "").endswith("<locals>.getter"):
        _getter.__name__ = _getter.__qualname__ = _name
        _getter.__module__ = __name__


def check_same_groups(caller: str, groups: ProcessGroupCollection | None, names: Sequence[str]) -> None:
    """Checks that given groups have the ranks of `shardstack.parallel_state`, whose groups the caller uses.

    Args:
        caller: name of the caller, for the error.
        groups: the given groups.
        names: names of the groups to check.

    Raises:
        ParallelConfigError: a group has other ranks.
    """
    if groups is None:
        return
    for name in names:
        theirs, own = getattr(groups, name), group_of_field(name)
        if theirs is None:
            continue
        ranks = dist.get_process_group_ranks(theirs)
        own_ranks = dist.get_process_group_ranks(own) if own is not None else [dist.get_rank()]
        if ranks != own_ranks:
            raise ParallelConfigError(
                f"{caller}: pg_collection.{name} has the ranks {ranks}, but shardstack.parallel_state has "
                f"{own_ranks}; initialise that with the same sizes"
            )


__getattr__ = absent_names(__name__)
