"""Divides a world of ranks: the grids, the groups of every kind along their axes, and the meshes over them.

`initialize_model_parallel` makes the groups that `shardstack.parallel_state` returns. The kinds of groups and the
checks of sizes are plain arithmetic. Only `make_parallel_groups` calls torch.

A rank is a number in mixed radix. Each kind of parallelism is a digit; the first one has stride 1, so that its groups
are neighbouring ranks, which share a machine. A group along some axes is the set of ranks that are equal in every
other digit (`rank_groups`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..base._torch_compat import forget_sharding_decisions
from ..base.device import device_type, set_backend_defaults
from ..base.errors import ParallelConfigError, ParallelStateError, check_positive
from ..base.megatron_names import checks_arguments, refuse
from . import ParallelGroups, RankGroup, groups_or_none, set_groups

_KINDS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("group_kinds.json").read_text("utf-8"))
"""Kinds of groups by the axes of the grid that they run along. Data parallelism is two axes: an optimizer instance
shards over the inner one and is replicated over the outer one. Experts divide the same ranks by another grid, without
a context axis. If they use the grid of dense layers instead, "cp" makes their data-parallel group that of dense
layers."""

_OF_REPLICAS = ("dp", "dp_cp", "dp_shard", "dp_shard_cp", "dp_replicate", "expert_dp", "expert_dp_shard")
"""Kinds that a lane communicates over, on another thread or stream, while a model computes and communicates over other
kinds: they share no process group with these, even where the ranks are the same."""


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """The sizes of `initialize_model_parallel`, with its names and meanings."""

    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    optimizer_instances: int
    order: str
    virtual_pipeline: int | None = None

    def __post_init__(self) -> None:
        model_sizes = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
        }
        others = {
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
            "num_distributed_optimizer_instances": self.optimizer_instances,
        }
        check_positive(model_sizes | others, ParallelConfigError)
        if self.virtual_pipeline is not None and (self.virtual_pipeline < 2 or self.pipeline == 1):
            raise ParallelConfigError(
                f"virtual_pipeline_model_parallel_size is {self.virtual_pipeline} with pipeline_model_parallel_size "
                f"{self.pipeline}; take 2 or more of each, or None for one stage a rank; give context_parallel_size, "
                "another argument, by its name"
            )
        model_size = prod(model_sizes.values())
        if self.world % model_size:
            product = " x ".join(f"{name} {size}" for name, size in model_sizes.items())
            raise ParallelConfigError(
                f"the world of {self.world} ranks is not divisible by {model_size} = {product}; change a size, or "
                f"start a multiple of {model_size} ranks"
            )
        replicas = self.data * self.context
        if self.data % self.optimizer_instances:
            raise ParallelConfigError(
                f"num_distributed_optimizer_instances {self.optimizer_instances} does not divide the data-parallel "
                f"size {self.data} (world {self.world} / {model_size}); choose a divisor of it"
            )
        if self.expert_tensor == self.tensor and replicas % self.expert:
            raise ParallelConfigError(
                f"expert_model_parallel_size {self.expert} does not divide {replicas} = data-parallel size "
                f"{self.data} x context_parallel_size {self.context}, over which experts are spread (world "
                f"{self.world} ranks); choose a divisor of it"
            )
        of_stage = self.world // self.pipeline
        if of_stage % (self.expert_tensor * self.expert):
            raise ParallelConfigError(
                f"expert_tensor_parallel_size {self.expert_tensor} x expert_model_parallel_size {self.expert} does "
                f"not divide the {of_stage} ranks of a pipeline stage; choose a divisor of it"
            )
        if self.expert_data % self.optimizer_instances:
            raise ParallelConfigError(
                f"num_distributed_optimizer_instances {self.optimizer_instances} does not divide the experts' "
                f"data-parallel size {self.expert_data} = {of_stage} / (expert_tensor_parallel_size "
                f"{self.expert_tensor} x expert_model_parallel_size {self.expert}); lower one of them"
            )

    @property
    def data(self) -> int:
        """Number of replicas of a dense parameter that read different samples."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def experts_are_apart(self) -> bool:
        """Whether experts are cut over other ranks than dense layers, so that they have replicas of their own."""
        return self.expert > 1 or self.expert_tensor != self.tensor

    @property
    def expert_data(self) -> int:
        """Number of replicas of an expert's parameter."""
        return self.world // (self.pipeline * self.expert_tensor * self.expert)

    def grids(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns axis sizes, stride 1 first, of the grids of dense layers and of experts.

        Raises:
            ParallelConfigError: the two grids contradict each other in this order.
        """
        dense = self._grid({"tp": self.tensor, "pp": self.pipeline, "cp": self.context, "ep": 1, "dp": self.data})
        expert = self._grid(
            {"tp": self.expert_tensor, "pp": self.pipeline, "cp": 1, "ep": self.expert, "dp": self.expert_data}
        )
        has_own_cut = self.experts_are_apart
        axes = list(dense)
        if self.optimizer_instances > 1 and self.context > 1 and axes.index("cp") > axes.index("dp_shard"):
            raise ParallelConfigError(
                f"order {self.order!r} puts 'dp' before 'cp', so that num_distributed_optimizer_instances "
                f"{self.optimizer_instances} would cut through context-parallel groups; put 'cp' before 'dp', as in "
                "the default order"
            )
        if sorted(rank_groups(expert, ["pp"])) != sorted(rank_groups(dense, ["pp"])):
            if has_own_cut:
                raise ParallelConfigError(
                    f"with order {self.order!r} the experts (expert_model_parallel_size {self.expert}, "
                    f"expert_tensor_parallel_size {self.expert_tensor}) and the dense layers "
                    f"(tensor_model_parallel_size {self.tensor}, context_parallel_size {self.context}) would be on "
                    "different pipelines; put 'pp' last, as in the default order"
                )
            expert = dense  # no second grid is needed
        if has_own_cut and rank_groups(expert, ["dp_replicate"]) != rank_groups(dense, ["dp_replicate"]):
            raise ParallelConfigError(
                f"with order {self.order!r} the {self.optimizer_instances} optimizer instances would not be the same "
                "ranks for experts as for dense layers; put 'dp' after 'cp' and 'ep', as in the default order"
            )
        return dense, expert

    def _grid(self, sizes: Mapping[str, int]) -> dict[str, int]:
        grid: dict[str, int] = {}
        for token in parse_order(self.order, sizes):
            if token == "dp":
                grid["dp_shard"] = sizes["dp"] // self.optimizer_instances
                grid["dp_replicate"] = self.optimizer_instances
            else:
                grid[token] = sizes[token]
        return grid


def make_parallel_groups(world: ProcessGroup, sizes: ParallelSizes, timeout: timedelta) -> ParallelGroups:
    """Makes every process group and mesh. All ranks of `world`, the default group, call it with equal arguments."""
    set_backend_defaults()
    dense, expert = sizes.grids()
    kinds = {kind: rank_groups(dense, axes) for kind, axes in _KINDS["dense"].items()}
    kinds |= {kind: rank_groups(expert, axes) for kind, axes in _KINDS["expert"].items()}
    kinds["embedding"] = [sorted({pipeline[0], pipeline[-1]}) for pipeline in kinds["pp"]]
    kinds["position_embedding"] = [pipeline[:1] for pipeline in kinds["pp"]]
    this_rank = dist.get_rank()
    by_ranks: dict[tuple[bool, tuple[int, ...]], ProcessGroup] = {}
    by_kind: dict[str, RankGroup] = {}
    for kind, rank_lists in kinds.items():  # every rank makes every group, in this same sequence
        for ranks in map(tuple, rank_lists):
            key = kind in _OF_REPLICAS and len(ranks) > 1, ranks
            if key not in by_ranks:
                by_ranks[key] = dist.new_group(list(ranks), timeout=timeout, group_desc=kind)
            if this_rank in ranks:
                by_kind[kind] = RankGroup(by_ranks[key], ranks, ranks.index(this_rank))
    # gloo connects while a group is made, and one end of a connection is ready before the other. If that rank closed
    # the group or ended, its peer would fail with "Connection closed by peer". NCCL connects at first use.
    if "gloo" in str(dist.get_backend_config(world)):
        dist.all_reduce(torch.zeros(1, device="cpu"), group=world)
    return ParallelGroups(
        by_kind=by_kind,
        process_groups=tuple(group for (_, ranks), group in by_ranks.items() if this_rank in ranks),
        world=world,
        mesh=_mesh_of_world(dense, by_kind),
        data_parallel_mesh=_mesh_of_replicas(sizes.optimizer_instances, by_kind, "dp_cp", "dp_shard_cp"),
        expert_data_parallel_mesh=_mesh_of_replicas(
            sizes.optimizer_instances, by_kind, "expert_dp", "expert_dp_shard"
        ),
        experts_are_apart=sizes.experts_are_apart,
        virtual_pipeline_size=sizes.virtual_pipeline,
    )


def _mesh_of_world(grid: dict[str, int], by_kind: Mapping[str, RankGroup]) -> DeviceMesh:
    axes = [axis for axis in reversed(grid) if axis != "ep"]  # a mesh's last axis is the one of stride 1
    shape = [grid[axis] for axis in axes]
    return _mesh_of_axes(axes, torch.arange(prod(shape), device="cpu").view(shape), by_kind)


def _mesh_of_replicas(num_instances: int, by_kind: Mapping[str, RankGroup], whole: str, shard: str) -> DeviceMesh:
    """Returns the mesh ``(whole,)``, or with several optimizer instances ``(dp_replicate, shard)``."""
    replicas = by_kind[whole]
    if num_instances == 1:
        return DeviceMesh.from_group(replicas.process_group, device_type(), mesh_dim_names=(whole,))
    ranks = torch.tensor(replicas.ranks, device="cpu").view(num_instances, -1)
    return _mesh_of_axes(["dp_replicate", shard], ranks, by_kind)


def _mesh_of_axes(axes: list[str], ranks: torch.Tensor, by_kind: Mapping[str, RankGroup]) -> DeviceMesh:
    groups = [by_kind[axis].process_group for axis in axes]
    return DeviceMesh.from_group(groups, device_type(), mesh=ranks, mesh_dim_names=tuple(axes))


_TOKENS = ("tp", "pp", "dp", "ep", "cp")  # also the sequence in which an order's missing tokens are appended


def rank_groups(sizes: Mapping[str, int], axes: Collection[str]) -> list[list[int]]:
    """Returns all groups along `axes` in a world of `sizes`, each ascending.

    `sizes` maps axis names to sizes, the axis of stride 1 first. Groups are in the order of the ranks' digits on the
    remaining axes; the first one changes fastest.
    """
    names = list(sizes)[::-1]
    grid = np.arange(prod(sizes.values())).reshape([sizes[name] for name in names])
    inside = [axis for axis, name in enumerate(names) if name in axes]
    outside = [axis for axis, name in enumerate(names) if name not in axes]
    size = prod(sizes[name] for name in names if name in axes)
    groups: list[list[int]] = grid.transpose(*outside, *inside).reshape(-1, size).tolist()
    return groups


def parse_order(order: str, sizes: Mapping[str, int]) -> list[str]:
    """Returns the tokens of `order`, followed by missing ones of size 1.

    Raises:
        ParallelConfigError: a token is unknown or repeated, or one of size above 1 is missing.
    """
    tokens = order.lower().split("-")
    for token in tokens:
        if token not in _TOKENS:
            raise ParallelConfigError(
                f"order {order!r} has the unknown token {token!r}; it is a permutation of {'-'.join(_TOKENS)}"
            )
        if tokens.count(token) > 1:
            raise ParallelConfigError(f"order {order!r} names {token!r} twice; name each token once")
    for token in _TOKENS:
        if token in tokens:
            continue
        if sizes[token] != 1:
            raise ParallelConfigError(
                f"order {order!r} leaves out {token!r}, whose size is {sizes[token]}; add it where it belongs"
            )
        tokens.append(token)
    return tokens


@checks_arguments
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
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

    Takes Megatron-LM's other arguments too, all in its order. Refused, with the argument's name: hierarchical or
    hybrid context parallelism, weights rematerialised over a group, other ranks of embeddings, and groups over a part
    of the world. Settings of communicators (SHARP, NCCL's options, streams, Gloo groups next to NCCL's) change no
    number: they are ignored, with one warning that names them.

    Raises:
        ParallelStateError: `torch.distributed` is not initialised, or the groups exist already.
        ParallelConfigError: sizes or the order contradict each other, or do not divide the world, or are refused.
    """
    world = dist.group.WORLD
    if world is None:
        raise ParallelStateError(
            "torch.distributed is not initialised; call shardstack.rendezvous.default_group.init_process_group() "
            "before initialize_model_parallel()"
        )
    if groups_or_none() is not None:
        raise ParallelStateError(
            "model parallel groups exist already; call destroy_model_parallel() before initialising them again"
        )
    is_whole = (local_world_size or world.size(), world.size(), "groups span the whole world")
    refuse("initialize_model_parallel", local_world_size=is_whole)
    if distributed_timeout_minutes <= 0:
        raise ParallelConfigError(f"distributed_timeout_minutes is {distributed_timeout_minutes}; make it positive")
    sizes = ParallelSizes(
        world=world.size(),
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
    set_groups(make_parallel_groups(world, sizes, timedelta(minutes=distributed_timeout_minutes)))


def destroy_model_parallel() -> None:
    """Destroys the groups of `initialize_model_parallel`, if any. Keeps the default group."""
    if (groups := groups_or_none()) is not None:
        groups.destroy()
        forget_sharding_decisions()
    set_groups(None)
