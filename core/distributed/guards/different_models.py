"""The guard of ranks that wrap different models, or one model with different settings."""

from __future__ import annotations

import hashlib
import json

import torch
import torch.distributed as dist
from torch import nn

from ...base import device
from ...base.dtypes import dtype_name
from ...base.errors import WrapError
from ...base.text import join_parts, texts_by_rank
from ...comm.collectives import all_reduce_by_backend
from ...dist_checkpointing.agreement import Ranks
from ..groups import kind_of
from ..plan import Plan
from ..step import Step
from .guard import Guard

Description = dict[str, str]
"""Description of a rank's model: values by the name in messages, in the model's order."""


class SameModelEverywhere(Guard):
    """All ranks of a group wrap the same model with the same settings. Else the error is raised on all of them.

    Without it the first collective whose sizes differ would hang, fail with a message about bytes, or mix up tensors.
    The ranks compare a hash of the model in one small collective, and exchange descriptions only if it differs.
    """

    def at_plan(self, plan: Plan, step: Step) -> None:
        group = plan.groups.whole
        if group.size() == 1:
            return
        mine = _describe(plan)
        if _is_equal_over_ranks(mine, group):
            return
        name, values = _first_difference(Ranks(group).all_gather(mine))
        differing = join_parts(texts_by_rank(enumerate(values)))
        raise WrapError(
            f"the ranks of a data-parallel group wrap different models, first in {name}: {differing}. Build the same "
            "model from the same settings on every rank (ranks are counted within the group)"
        )


def _describe(plan: Plan) -> Description:
    """Returns everything that must be equal on all ranks, except the values of parameters."""
    (module,), described = plan.root.modules, dict(plan.compared_settings)
    described["the model's class"] = type(module).__name__
    units = {", ".join(unit.names) or "root": unit for unit in plan.units if unit.is_gathered}
    unit_of = {param.name: f", unit {name}" for name, unit in units.items() for param in unit.params}
    first_name: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if kind_of(parameter) == "ignored":
            continue
        first = first_name.setdefault(parameter, name)
        kind, tie = "" if parameter.requires_grad else ", frozen", f", tied to {first}" if first != name else ""
        shape = f"{list(parameter.shape)} {dtype_name(parameter.dtype)}"
        described[f"parameter {name}"] = f"{shape}{kind}{unit_of.get(first, '')}{tie}"
    for name, buffer in module.named_buffers():
        described[f"buffer {name}"] = f"{list(buffer.shape)} {dtype_name(buffer.dtype)}"
    described["the units' order"] = "; ".join(units) or "none"
    return described


def _is_equal_over_ranks(description: Description, group: dist.ProcessGroup) -> bool:
    digest = hashlib.sha256(json.dumps(list(description.items())).encode()).digest()
    pieces = [int.from_bytes(digest[i : i + 4], "big") for i in range(0, 16, 4)]
    # The minimum equals the maximum only if all are equal. One all-reduce, which a simulated group supports too.
    extremes = torch.tensor(
        [*pieces, *(-piece for piece in pieces)], dtype=torch.int64, device=device.current_device()
    )
    all_reduce_by_backend(extremes, group, what="the hash of the model's structure", op=dist.ReduceOp.MIN)
    smallest, largest = extremes.view(2, -1).tolist()
    return bool(smallest == [-piece for piece in largest])


def _first_difference(everyone: list[Description]) -> tuple[str, list[str]]:
    """Returns the name of the first entry that differs, and each rank's value."""
    for name in dict.fromkeys(name for description in everyone for name in description):
        values = [description.get(name, "absent") for description in everyone]
        if len(set(values)) > 1:
            return name, values
    return "the order of its parameters", [", ".join(list(d)[-3:]) for d in everyone]
