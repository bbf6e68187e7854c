"""What stays gathered between micro-batches: which units, and no longer than until the step ends."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core.distributed.fsdp2.torch_private import TorchState
from core.distributed.plan import UnitPlan
from core.distributed.plan.make_plan import units_at_the_ends
from core.distributed.plan.units import unit_of
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import build, toy


def _unit(name: str, *, read_in_backward: bool = True, is_minority: bool = False) -> UnitPlan:
    module = nn.Identity()
    module.weights_used_in_backward = read_in_backward
    return unit_of((module,), {module: name}, is_minority=is_minority)


def test_the_ends_include_units_that_backward_does_not_gather():
    units = [
        _unit("table", read_in_backward=False),
        _unit("layers.0.norm", is_minority=True),
        _unit("layers.0"),
        _unit("layers.1"),
        _unit("layers.2"),
        _unit("head"),
        _unit("head.norm", is_minority=True),
    ]
    assert [unit.names[0] for unit in units_at_the_ends(units)] == ["table", "layers.0", "head"]
    assert units_at_the_ends([]) == []


def _bytes_gathered(settings: dict) -> list[int]:
    """Returns the gathered bytes after each of three micro-batches, and after the step."""
    module = toy(tied=False)
    module.embedding.weights_used_in_backward = False
    model = build("fsdp2", module, config=SimpleNamespace(), **settings)
    held = []
    for index in range(3):
        with nullcontext() if index == 2 else model.no_sync():
            model(torch.tensor([[1, 2, 3]])).sum().backward()
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in TorchState(module).gathered_tensors()
        }
        held.append(sum(storages.values()))
    return held


@pytest.mark.parametrize("settings", [{}, {"collectives": "torch"}])
def test_nothing_stays_gathered_beyond_the_last_micro_batch(settings):
    every = run_distributed(_bytes_gathered, 2, {"keep_gathered_between_micro_batches": "all", **settings})[0]
    ends = run_distributed(_bytes_gathered, 2, settings)[0]
    none = run_distributed(_bytes_gathered, 2, {"keep_gathered_between_micro_batches": "none", **settings})[0]
    lean = run_distributed(_bytes_gathered, 2, {"reduce_every_micro_batch": True, **settings})[0]
    assert every[0] == every[1] > ends[0] == ends[1] > 0
    assert none == lean == [0, 0, 0] and every[2] == ends[2] == 0
