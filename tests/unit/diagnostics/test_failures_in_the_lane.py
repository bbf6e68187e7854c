"""A reduction that fails in the lane, among others: which one the message names, and what each one's record says."""

from __future__ import annotations

import contextlib
import re
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.errors import OutOfStepError
from core.comm import collectives
from core.comm.lane import comm_lane
from core.comm.record import record_of
from core.distributed import finalize_model_grads
from tests.unit._lane import called_before_waiting
from tests.unit._spawn import JOB_LIMIT_S, give_up_soon, reach, run_distributed, wait_for
from tests.unit.distributed._toys import batches, build, loss_of, toy

HAS_MESSAGE = "rank 0 has its message"

State = tuple[bool, bool, bool]
"""Whether a call is over, has failed and is under way."""
ENDED: State = (True, False, False)
FAILED: State = (False, True, False)


def _joins(count: int, reduce: Any, group: dist.ProcessGroup) -> Any:
    """Returns a reduction that takes part in the first calls, and then waits elsewhere."""
    called = []

    def reduced(*args: Any, **options: Any) -> None:
        called.append(options.get("what"))
        if len(called) <= count:
            reduce(*args, **options)
        else:
            wait_for(HAS_MESSAGE)
            give_up_soon(group)

    return reduced


class _MainThread:
    """Knows which task of the lane the main thread waits for."""

    def __init__(self) -> None:
        self._waited_for: Any = None
        self._changed = threading.Condition()

    def note(self, task: Any) -> None:
        with self._changed:
            self._waited_for = task
            self._changed.notify_all()

    def wait_until_it_waits(self) -> None:
        """Waits in the lane's task until the main thread waits for this one, or for one behind it."""
        if threading.current_thread() is not threading.main_thread():
            with self._changed:
                assert self._changed.wait_for(self._is_waiting, JOB_LIMIT_S / 2)

    def _is_waiting(self) -> bool:
        return self._waited_for is not None and not self._waited_for.has_ended


def _fails(count: int, reduce: Any, group: dist.ProcessGroup, main_thread: _MainThread) -> Any:
    """Returns a reduction that gives up soon after the first calls, once the main thread gathers nothing more."""
    called = []

    def reduced(*args: Any, **options: Any) -> None:
        called.append(options.get("what"))
        if len(called) == count + 1:
            main_thread.wait_until_it_waits()
            give_up_soon(group)
        reduce(*args, **options)

    return reduced


def _do_nothing() -> None:
    pass


def _one_rank_joins(kind: str, count: int) -> tuple[str, list[tuple[str, State]]]:
    """Returns the message, and of each reduction its payload and its state by the record."""
    group, main_thread = dist.new_group(), _MainThread()
    model = build(kind, toy(tied=False), group=group)
    loss = loss_of(model, batches(dist.get_rank())[0])
    lane, message = comm_lane(torch.device("cpu")), ""
    reductions = {name: getattr(collectives, name) for name in ("reduce_scatter", "all_reduce")}
    if dist.get_rank() == 0:
        failing = {name: _fails(count, reduce, group, main_thread) for name, reduce in reductions.items()}
        try:
            with (
                mock.patch.multiple(collectives, **failing),
                called_before_waiting(main_thread.note),
                pytest.raises(OutOfStepError) as caught,
            ):
                loss.backward()
                finalize_model_grads([model])
            message = str(caught.value)
        finally:
            reach(HAS_MESSAGE)
    else:  # what it calls afterwards may find the group closed
        joining = {name: _joins(count, reduce, group) for name, reduce in reductions.items()}
        with mock.patch.multiple(collectives, **joining), contextlib.suppress(OutOfStepError, RuntimeError):
            loss.backward()
            finalize_model_grads([model])
    lane.run(_do_nothing)  # after those behind it
    calls = [call for call in record_of(group).calls if call.what.startswith("the gradients of ")]
    return message, [(call.what, (call.is_over, call.has_failed, call.is_under_way)) for call in calls]


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("kind", [pytest.param("ddp_overlap", marks=pytest.mark.long), "zero2_overlap", "fsdp2"])
def test_the_reduction_that_failed_is_named_among_others(kind: str, count: int):
    message, calls = run_distributed(_one_rank_joins, 2, kind, count)[0]
    named = re.search(r"^rank 0 of 2 waited \d+ s for (?:reduce-scatter|all-reduce) \d+ of (.*?) \(", message)
    assert named is not None and named.group(1) == calls[count][0]
    num_behind = len(calls) - count - 1
    assert (num_behind == 0) if kind == "fsdp2" else (num_behind >= 1)  # FSDP2 reduces without the lane
    assert [state for _, state in calls] == [ENDED] * count + [FAILED] * (1 + num_behind)
