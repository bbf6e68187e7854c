"""A reduction that fails in the lane, among others: which one the message names, and what each one's record says."""

from __future__ import annotations

import contextlib
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.comm import collectives
from core.comm.lane import comm_lane
from core.comm.record import record_of
from core.distributed import finalize_model_grads
from core.errors import OutOfStepError
from tests.unit._spawn import group_that_gives_up, reach, run_distributed, wait_for
from tests.unit.distributed._toys import batches, build, loss_of, toy

HAS_MESSAGE = "rank 0 has its message"

State = tuple[bool, bool, bool]
"""Whether a call is over, has failed and is under way."""
ENDED: State = (True, False, False)
FAILED: State = (False, True, False)


def _joins(count: int, reduce: Any) -> Any:
    """Returns a reduction that takes part in the first calls, and then waits elsewhere."""
    called = []

    def reduced(*args: Any, **options: Any) -> None:
        called.append(options.get("what"))
        if len(called) <= count:
            reduce(*args, **options)
        else:
            wait_for(HAS_MESSAGE)

    return reduced


def _do_nothing() -> None:
    pass


def _one_rank_joins(kind: str, count: int) -> tuple[str, list[tuple[str, State]]]:
    """Returns the message, and of each reduction its payload and its state by the record."""
    group = group_that_gives_up()
    model = build(kind, toy(tied=False), group=group)
    loss = loss_of(model, batches(dist.get_rank())[0])
    lane, message = comm_lane(torch.device("cpu")), ""
    if dist.get_rank() == 0:
        try:
            with pytest.raises(OutOfStepError) as caught:
                loss.backward()
                finalize_model_grads([model])
            message = str(caught.value)
        finally:
            reach(HAS_MESSAGE)
    else:  # what it calls afterwards may find the group closed
        patched = {name: _joins(count, getattr(collectives, name)) for name in ("reduce_scatter", "all_reduce")}
        with mock.patch.multiple(collectives, **patched), contextlib.suppress(OutOfStepError, RuntimeError):
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
    assert num_behind >= 1
    assert [state for _, state in calls] == [ENDED] * count + [FAILED] * (1 + num_behind)
