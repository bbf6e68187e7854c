"""Torch's collectives on any tensor are recorded; an asynchronous one until it is waited for."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.errors import OutOfStepError
from core.comm.call import FunctionWork
from core.comm.collectives import (
    all_gather_by_backend,
    all_reduce_by_backend,
    all_to_all_by_backend,
    broadcast_by_backend,
    reduce_scatter_by_backend,
)
from core.comm.record import record_of
from tests.unit._ranks import fake_world
from tests.unit._spawn import run_distributed

CORE = Path(__file__).parents[3] / "core"
UNNAMED = {
    "comm/": "records them, and closes connections by a message that never comes",
    "base/_torch_compat.py": "says what they are called in this version of torch",
    "dist_checkpointing/agreement.py": "has time limits and messages of its own",
    "dist_checkpointing/host_copies.py": "sends behind the step, on a thread and over a group of its own",
    "verify/__init__.py": "gathers objects after training",
    "process_groups/make_groups.py": "makes the groups",
    "base/device.py": "has the barrier",
}
"""Files that may call torch's collectives without a name, and why."""


def _values(async_op: bool) -> list[list[float]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    own = torch.tensor([1.0, 2.0]) + 10 * rank  # [1, 2] and [11, 12]
    total, gathered, part, exchanged, sent = own.clone(), torch.empty(4), torch.empty(1), torch.empty(2), own.clone()
    works = [
        all_reduce_by_backend(total, what="a", async_op=async_op),
        all_gather_by_backend(gathered, own, group, what="b", async_op=async_op),
        reduce_scatter_by_backend(part, own, group, what="c", async_op=async_op),
        all_to_all_by_backend(exchanged, own, group, what="d", async_op=async_op),
    ]
    broadcast_by_backend(sent, what="e")
    calls = list(record_of().calls)[-5:]
    assert [(call.kind, call.what) for call in calls] == [
        *(("all-reduce", "a"), ("all-gather", "b"), ("reduce-scatter", "c"), ("all-to-all", "d"), ("broadcast", "e"))
    ]
    assert [call.is_over for call in calls] == [not async_op] * 4 + [True]
    for work in works:
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
    assert all(call.is_over for call in calls)
    return [tensor.tolist() for tensor in (total, gathered, part, exchanged, sent)]


@pytest.mark.parametrize("async_op", [False, True])
def test_collectives_equal_torch_and_are_recorded(async_op: bool) -> None:
    gathered = [1.0, 2.0, 11.0, 12.0]
    first, second = run_distributed(_values, 2, async_op)
    assert first == [[12.0, 14.0], gathered, [12.0], [1.0, 11.0], [1.0, 2.0]]
    assert second == [[12.0, 14.0], gathered, [14.0], [2.0, 12.0], [1.0, 2.0]]


def test_a_wait_that_fails_is_explained() -> None:
    work = mock.Mock()
    work.wait.side_effect = RuntimeError("Timed out waiting 10ms for recv operation")
    with fake_world(rank=0, world_size=2), mock.patch("core.comm.record.ask_other_ranks"):
        pending = _started(work)
        assert record_of().first_unfinished() is not None
        with pytest.raises(OutOfStepError, match=r"^rank 0 of 2 waited \d+ s for all-reduce 1 of the loss"):
            pending.wait()
        assert record_of().calls[-1].has_failed and record_of().first_unfinished() is None


def test_dropped_work_is_not_under_way() -> None:
    with fake_world(rank=0, world_size=2):
        pending = _started(mock.Mock())
        assert record_of().first_unfinished() is not None
        del pending  # as where an error comes between
        gc.collect()
        assert record_of().first_unfinished() is None


def test_what_is_sent_lives_until_it_is_waited_for() -> None:
    with fake_world(rank=0, world_size=2), mock.patch.object(dist, "all_reduce", return_value=mock.Mock()):
        total = torch.ones(1)
        sent = weakref.ref(total)
        pending = all_reduce_by_backend(total, what="the loss", async_op=True)
        del total
        dist.all_reduce.reset_mock()  # which keeps its arguments
        assert pending is not None and sent() is not None
        pending.wait()
        assert sent() is None


def _started(work: dist.Work) -> dist.Work:
    with mock.patch.object(dist, "all_reduce", return_value=work):
        pending = all_reduce_by_backend(torch.ones(1), what="the loss", async_op=True)
    assert pending is not None
    return pending


def test_every_collective_of_core_has_a_name() -> None:
    call = re.compile(
        r"\bdist\.(all_reduce|broadcast|all_gather|reduce_scatter|all_to_all|send|recv|isend|irecv|gather|scatter|reduce"
        r"|barrier|batch_isend_irecv)\w*\("
    )
    actual = {
        f"{path.relative_to(CORE)}:{number}"
        for path in CORE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if call.search(line) and not str(path.relative_to(CORE)).startswith(tuple(UNNAMED))
    }
    assert not actual, "call these through core.comm, with what="


def test_what_a_wait_refers_to_is_dropped_after_it() -> None:
    tensor, fails = torch.zeros(1), [True, False]
    alive = weakref.ref(tensor)

    def end(memory: torch.Tensor = tensor) -> None:
        if fails.pop(0):
            raise RuntimeError("a rank has gone")

    work = FunctionWork(end)
    del tensor, end
    with pytest.raises(RuntimeError, match="a rank has gone"):
        work.wait()
    assert alive() is not None and work.wait()
    assert alive() is None and work.wait() and fails == []
