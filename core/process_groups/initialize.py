"""Makes all groups of parallel ranks at once, and destroys them: the first part of Megatron-LM's
``parallel_state``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ..base._torch_compat import forget_sharding_decisions
from ..base.errors import ParallelConfigError, ParallelStateError
from ..base.megatron_names import ignore, refuse
from . import current
from .make_groups import ParallelSizes, make_parallel_groups

_NO_REMATERIALISED_WEIGHTS = "shard weights by data parallelism (TorchFullyShardedDataParallel)"
_EMBEDDING_RANKS = "tied embeddings are on the first and the last stage of a pipeline; drop it"


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
    """Makes every model-, context-, data- and expert-parallel group. All ranks call it with equal arguments.

    The leftmost token of `order` has stride 1. With 8 ranks and tensor and pipeline size 2 the tensor-parallel groups
    are [0,1] [2,3] [4,5] [6,7], the data-parallel ones [0,2] [1,3] [4,6] [5,7], the pipelines [0,4] [1,5] [2,6] [3,7].

    `num_distributed_optimizer_instances` divides the data-parallel (x context-parallel) group into as many consecutive
    parts: optimizer state is sharded within a part and replicated across parts. All groups are new, also one that
    spans the world, with the default group's backend and `distributed_timeout_minutes` as their time limit; kinds with
    equal ranks share one group. Experts' matrices are split over `expert_tensor_parallel_size` ranks, by default as
    many as those of dense layers.

    The arguments and their order are Megatron-LM's. Refused, with the argument's name: hierarchical or hybrid context
    parallelism, weights rematerialised over a group, other ranks of embeddings, and
    groups over a part of the world. Settings of communicators (SHARP, NCCL's options, streams, Gloo groups next to
    NCCL's) change no number: they are ignored, with one warning that names them.

    Raises:
        ParallelStateError: `torch.distributed` is not initialised, or the groups exist already.
        ParallelConfigError: sizes or the order contradict each other or do not divide the world; or an argument is
            refused.
    """
    if not dist.is_initialized():
        raise ParallelStateError(
            "torch.distributed is not initialised; call core.base.device.init_process_group() before "
            "initialize_model_parallel()"
        )
    if current.groups_or_none() is not None:
        raise ParallelStateError(
            "model parallel groups exist already; call destroy_model_parallel() before initialising them again"
        )
    caller = "initialize_model_parallel"
    refuse(
        caller,
        hierarchical_context_parallel_sizes=(
            hierarchical_context_parallel_sizes,
            None,
            "context parallelism here has one level; use context_parallel_size",
        ),
        hybrid_context_parallel=(
            hybrid_context_parallel,
            False,
            "every sequence is split over the same ranks; use context_parallel_size",
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
        virtual_pipeline=virtual_pipeline_model_parallel_size,
        context=context_parallel_size,
        expert=expert_model_parallel_size,
        expert_tensor=tensor_model_parallel_size
        if expert_tensor_parallel_size is None
        else expert_tensor_parallel_size,
        optimizer_instances=num_distributed_optimizer_instances,
        order=order,
    )
    current.set_groups(make_parallel_groups(sizes, timedelta(minutes=distributed_timeout_minutes)))


def destroy_model_parallel() -> None:
    """Destroys the groups of `initialize_model_parallel`, if any. Keeps the default group."""
    made = current.groups_or_none()
    if made is not None:
        made.destroy()
        forget_sharding_decisions()
    current.set_groups(None)
