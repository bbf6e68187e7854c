"""Decides which rank writes what several ranks hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

_MARK = "written_by_first_rank"


def of_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view whose values `SpreadPlanner` takes from the first rank that holds them."""
    view = tensor.detach()
    setattr(view, _MARK, True)
    return view


class SpreadPlanner(DefaultSavePlanner):
    """Spreads what replicas hold over the ranks that write, all but buffers, which may differ: they are the first
    rank's.

    Args:
        state: tensors by name; those of `of_first_rank` are buffers.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._buffers = {name for name, tensor in state.items() if getattr(tensor, _MARK, False)}

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        written: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in written]
            written |= {item.index for item in items if item.index.fqn in self._buffers}
            plans.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(plans)
