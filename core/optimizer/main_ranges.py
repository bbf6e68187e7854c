"""The parameters that an optimizer updates on this rank: parts of a wrapped model's, or a plain model's whole ones."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..base.errors import OptimizerError, ParallelConfigError
from ..base.module_protocol import unwrap_model
from ..base.parameters import elements_of
from ..dist_checkpointing.global_view import flat_range_view, noting_copy
from ..distributed import _BaseDataParallel
from ..distributed.engine.engine import owner_of
from ..distributed.flat.flat_engine import FlatEngine
from ..distributed.groups import kind_of, whole_group
from ..distributed.plan.parts import ParamPlan
from ..distributed.step_marks import current_parameter
from ..process_groups_config import ProcessGroupCollection
from .main_params import MainParam


@dataclass(eq=False)
class MainRange(MainParam):
    """The run of a parameter's elements that the plan gives this rank to update. May be empty."""

    engine: FlatEngine = field(repr=False)
    """The engine whose buffers hold the parameter, and which reduces its gradient."""

    start: int
    end: int
    """The run: elements ``[start, end)`` of the flattened parameter."""

    _run: Tensor = field(init=False, repr=False)
    """A view of the run in the wrapper's buffer, which owns the memory. Set once. Valid while the parameter is in the
    buffer, which `check_storage` checks."""

    def __post_init__(self) -> None:
        self._run = elements_of(self.param, self.start, self.end)
        super().__post_init__()

    def local(self) -> Tensor:
        return self._run

    def local_gradient(self) -> Tensor | None:
        return self.engine.gradients.of(self.param)

    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        plan = self.engine.plan.over_ranks_of(kind_of(self.param))
        return (plan.groups.shard,) if plan.num_shards > 1 else ()

    def part_of(self, whole: Tensor) -> Tensor:
        return whole.detach().reshape(-1)[self.start : self.end]

    def whole(self, state: Tensor) -> Tensor:
        return noting_copy(flat_range_view(self.param, state, self.start), self.param)


def collect_main_params(
    model_chunks: Sequence[nn.Module], *, has_master: bool = True, only: Container[nn.Parameter] | None = None
) -> list[MainParam]:
    """Returns every trainable parameter of the chunks once, in order, under its name in the unwrapped model.

    Where chunks have a name in common a name starts with ``chunk<i>.``; virtual pipeline stages have none. A wrapper
    that shards buffers gives this rank's run of each parameter.

    Args:
        only: the parameters to return; None means all.

    Raises:
        OptimizerError: a parameter that is in no buffers of its wrapper, or whose wrapper is none of the chunks.
    """
    main_params: list[MainParam] = []
    identities: set[int] = set()
    names = [name for chunk in model_chunks for name, _ in unwrap_model(chunk).named_parameters()]
    for index, chunk in enumerate(model_chunks):
        model = unwrap_model(chunk)
        planned = chunk.plan.trained_params if isinstance(chunk, _BaseDataParallel) else {}
        prefix = f"chunk{index}." if len(set(names)) < len(names) else ""
        for name, param in model.named_parameters():
            if not param.requires_grad or id(param) in identities or kind_of(param) == "ignored":
                continue
            if only is not None and param not in only:
                continue
            identities.add(id(param))
            owner, _, attribute = name.rpartition(".")
            place = prefix + name, param, model.get_submodule(owner), attribute
            run = _planned_run(chunk, planned.get(name), param, name)
            main_params.append(
                MainParam(*place, has_master=has_master)
                if run is None
                else MainRange(*place, *run, has_master=has_master)
            )
    return main_params


def _planned_run(
    chunk: nn.Module, planned: ParamPlan | None, param: nn.Parameter, name: str
) -> tuple[FlatEngine, int, int] | None:
    """Returns the engine and the bounds of a `MainRange`, or None where the rank updates all that it holds."""
    wrapper = owner_of(param)
    if isinstance(chunk, _BaseDataParallel) and chunk.plan.shards_buffers and isinstance(chunk.engine, FlatEngine):
        if wrapper is not chunk or planned is None or not param.is_contiguous():
            raise OptimizerError(
                f"parameter {name} is in none of the wrapper's buffers: it was added, replaced or unfrozen after "
                "wrapping; wrap the model when it is complete"
            )
        index = chunk.plan.over_ranks_of(kind_of(param)).shard_index
        start, end = planned.bounds[index : index + 2]
        return chunk.engine, start, end
    if wrapper is not None and wrapper.plan.shards_buffers:
        raise OptimizerError(
            f"parameter {name} belongs to a model whose wrapper shards gradients over ranks, and the optimizer was "
            "not given that wrapper; give it what wrap_model returned"
        )
    return None


def find_main_params(
    optimizer: str, params: Sequence[nn.Parameter], model_chunks: Sequence[nn.Module]
) -> dict[nn.Parameter, MainParam]:
    """Returns the `MainParam` of each trainable parameter among `params`, in the model's order.

    Args:
        optimizer: name of what was built with them, before or after the model was wrapped, for messages.

    Raises:
        OptimizerError: a parameter is not one of the chunks', or is what FSDP2 gathers one into.
    """
    given = {current_parameter(optimizer, param): param for param in params}
    found = {given[p.param]: p for p in collect_main_params(model_chunks, only=given)}
    if strangers := [param for param, before in given.items() if param.requires_grad and before not in found]:
        raise OptimizerError(
            f"{optimizer} was built for another model: {len(strangers)} of its {len(params)} parameters, the first in "
            f"the shape {list(strangers[0].shape)}, are not this one's; build it from model.parameters(), "
            "before or after wrap_model"
        )
    return found


def sharing_ranks(params: Iterable[MainParam], model_groups: ProcessGroupCollection) -> dist.ProcessGroup | None:
    """Returns the smallest group with all ranks that hold parts of the model or replicas of them. None for one rank.

    Raises:
        ParallelConfigError: no group has the ranks of both tensor and data parallelism.
    """
    groups, both = [model_groups.tp], model_groups.tp_dp_cp
    for p in params:
        if (wrapper := owner_of(p.param)) is not None:
            groups.append(wrapper.plan.groups.whole)
        elif isinstance(p.param, DTensor):
            groups.append(whole_group(p.param.device_mesh))
    ranks = {group: set(dist.get_process_group_ranks(group)) for group in (*groups, both) if group is not None}
    sharing = set().union(*(ranks[group] for group in groups if group is not None))
    if len(sharing) <= 1:
        return None
    fitting = [group for group, members in ranks.items() if sharing <= members]
    if not fitting:
        raise ParallelConfigError(
            f"ranks {sorted(sharing)} share the model by tensor and data parallelism, and no group has all of them; "
            "initialize shardstack.parallel_state, and let the wrapper take its groups"
        )
    return min(fitting, key=dist.get_world_size)
