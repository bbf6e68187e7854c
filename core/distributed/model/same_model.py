"""Rejects ranks that wrap different models, or one model with different settings.

Without a check at construction the first collective whose sizes differ would hang, fail with a message about bytes, or
mix up tensors. Every rank describes its model, the ranks compare a hash in one small collective, and they exchange the
descriptions only if it differs.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...base import device
from ...base.errors import WrapError
from ...base.text import listed, rank_list
from ...comm.collectives import all_gather_by_backend, all_reduce_by_backend
from ..plan import Plan

Description = dict[str, str]
"""Description of a rank's model: values by the name in messages, in the model's order."""


def reject_different_models(module: nn.Module, plan: Plan, units: Sequence[Sequence[str]] = ()) -> None:
    """Raises, on every rank of the group, unless all of them wrap the same model with the same settings.

    Args:
        module: the model, before it is wrapped; its parameters may be on the meta device.
        plan: its settings must be equal on all ranks.
        units: names of the modules of each unit.

    Raises:
        WrapError: names the first difference, and the value of each rank.
    """
    group = plan.groups.whole
    if group.size() == 1:
        return
    mine = describe_structure(module, plan.settings, units)
    if _is_equal_over_ranks(mine, group):
        return
    everyone = _gather(mine, group)
    name, values = _first_difference(everyone)
    by_value: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        by_value[value].append(rank)
    found = listed([f"{rank_list(ranks)}: {value}" for value, ranks in by_value.items()])
    raise WrapError(
        f"the ranks of a data-parallel group wrap different models, first in {name}: {found}. Build the same model "
        "from the same settings on every rank (ranks are counted within the group)"
    )


def describe_structure(
    module: nn.Module, settings: Iterable[tuple[str, str]] = (), units: Sequence[Sequence[str]] = ()
) -> Description:
    """Returns everything that must be equal on all ranks, except the values of parameters."""
    described = dict(settings)
    described["the model's class"] = type(module).__name__
    unit_of = {name: ", ".join(unit) for unit in units for name in unit}
    first_name: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tie = first_name.setdefault(parameter, name)
        kind = "" if parameter.requires_grad else ", frozen"
        unit = f", unit {_innermost(name, unit_of)}" if units else ""
        described[f"parameter {name}"] = f"{list(parameter.shape)} {_short(parameter.dtype)}{kind}{unit}"
        if tie != name:
            described[f"parameter {name}"] += f", tied to {tie}"
    for name, buffer in module.named_buffers():
        described[f"buffer {name}"] = f"{list(buffer.shape)} {_short(buffer.dtype)}"
    described["the units' order"] = "; ".join(", ".join(unit) for unit in units) or "none"
    return described


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _innermost(parameter: str, unit_of: Mapping[str, str]) -> str:
    path = parameter.split(".")[:-1]
    for length in range(len(path), 0, -1):
        if (unit := unit_of.get(".".join(path[:length]))) is not None:
            return unit
    return "root"


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


def _gather(description: Description, group: dist.ProcessGroup) -> list[Description]:
    """Gathers every rank's description as JSON in plain tensors, so that nothing is unpickled."""
    here = device.current_device()
    text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8).to(here)
    length = torch.tensor([len(text)], dtype=torch.int64, device=here)
    lengths = length.new_empty(group.size())
    all_gather_by_backend(lengths, length, group, what="the length of the model's structure")
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=here)
    padded[: len(text)] = text
    texts = padded.new_empty(group.size(), longest)
    all_gather_by_backend(texts, padded.unsqueeze(0), group, what="the model's structure")
    found = zip(texts.tolist(), lengths.tolist(), strict=True)
    return [json.loads(bytes(text[:size]).decode()) for text, size in found]


def _first_difference(everyone: list[Description]) -> tuple[str, list[str]]:
    """Returns the name of the first entry that differs, and each rank's value."""
    for name in dict.fromkeys(name for description in everyone for name in description):
        values = [description.get(name, "absent") for description in everyone]
        if len(set(values)) > 1:
            return name, values
    return "the order of its parameters", [", ".join(list(d)[-3:]) for d in everyone]
