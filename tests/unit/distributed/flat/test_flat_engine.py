"""Reductions of ZeRO-3 travel in a group and a lane of their own, so that gathers do not hold them up."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import nn

from core.comm.lane import comm_lane
from core.distributed.groups import twin_group
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import Stack, build

LONGEST_S = 60.0
"""A reduction that is held up fails the test after this time; one that is not takes milliseconds."""


@on_ranks(2)
def test_a_gather_that_is_under_way_holds_up_no_reduction() -> None:
    model = build("zero3", Stack(layers=4), unit_classes=(nn.Linear,), reshard_after_forward=False)
    loss = model(torch.ones(2, 6)).sum()
    gate, was_opened = threading.Event(), list[bool]()
    gather = comm_lane(torch.device("cpu")).submit(lambda: was_opened.append(gate.wait(LONGEST_S)))
    loss.backward()
    model.finish_grad_sync()
    gate.set()
    gather.wait()
    assert was_opened == [True]


@on_ranks(2)
def test_a_group_has_one_twin_of_the_same_ranks() -> None:
    world = dist.group.WORLD
    twin = twin_group(world)
    assert twin is not world and twin is twin_group(world)
    assert dist.get_process_group_ranks(twin) == dist.get_process_group_ranks(world)


@on_ranks(2, limit_s=90.0)
def test_a_group_of_some_ranks_made_earlier_is_no_hang() -> None:
    dist.new_group([0])  # every rank calls it, as torch asks
    model = build("zero3", Stack(layers=2), unit_classes=(nn.Linear,), group=dist.new_group([0, 1]))
    model(torch.ones(2, 6)).sum().backward()
    model.finish_grad_sync()
