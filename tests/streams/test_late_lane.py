"""Trainings whose collectives run as late as they may have the same bits, on two real ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from core.base.parameters import local_part
from core.comm.lane import comm_lane
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.compositions import runs
from tests.compositions.check import as_test, check_all
from tests.compositions.cover import sample
from tests.streams.late_lane import late_lanes
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import accumulate, build, toy

CPU = torch.device("cpu")


def test_a_task_runs_when_it_is_waited_for() -> None:
    done: list[int] = []
    with late_lanes():
        lane = comm_lane(CPU)
        first, second = (lane.submit(lambda number=number: done.append(number)) for number in range(2))
        failing = lane.submit(lambda: 1 / 0)
        last = lane.submit(lambda: done.append(3))
        assert done == []
        second.wait()
        assert done == [0, 1]
        first.wait()
        last.wait()
        assert done == [0, 1, 3]
        with pytest.raises(ZeroDivisionError):
            failing.wait()
        lane.submit(lambda: done.append(4))
    assert done == [0, 1, 3, 4]
    assert comm_lane(CPU) is not lane


def _trained(kind: str, fields: dict[str, Any], is_late: bool) -> list[torch.Tensor]:
    """Returns this rank's weights after three steps, each followed by an evaluation."""
    with late_lanes() if is_late else nullcontext([]) as lanes:
        model = build(kind, toy(tied=False), **fields)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, clip_grad=0.1), [model])
        for _ in range(3):
            model.zero_grad_buffer()
            accumulate(model)
            finalize_model_grads([model])
            optimizer.step()
            with torch.no_grad():
                model(torch.arange(4).view(1, 4))
        model.engine.parameters.settle()
        assert any(lane.submitted for lane in lanes) == is_late, "no task was late"
        return [local_part(p).detach().clone() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ddp_overlap", {}),
        ("zero1_overlap", {}),
        ("zero2_overlap", {}),
        ("zero2_overlap", {"reduce_every_micro_batch": True}),
        ("zero3", {}),
        ("zero3", {"forward_prefetch": 2, "backward_prefetch": 2, "reduce_every_micro_batch": True}),
    ],
)
@on_ranks(2)
def test_late_collectives_change_no_bit(kind: str, fields: dict[str, Any]) -> None:
    expected, found = (_trained(kind, fields, is_late) for is_late in (False, True))
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


_train_parts = runs._train_parts


def _train_parts_late(parts: Sequence[runs.Run], number: int, folders: Sequence[Path]) -> list[Any]:
    with late_lanes():
        return _train_parts(parts, number, folders)


@contextmanager
def _late() -> Iterator[None]:
    with mock.patch.object(runs, "_train_parts", _train_parts_late):
        yield


SAMPLE = [composition for composition in sample() if composition.ranks > 1]


@pytest.mark.long
@pytest.mark.parametrize("layout", sorted({composition.layout for composition in SAMPLE}))
def test_compositions_train_late_as_one_process_does(layout: str) -> None:
    with _late():
        problems = check_all([composition for composition in SAMPLE if composition.layout == layout])
    text = [f"{problem}\n\n{as_test(composition)}" for composition, problem in problems.items()]
    assert not problems, "\n\n".join(text)
