"""What programs do next to a step: streams of their own, errors in the middle, copies of batches, checkpoints."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

from core.distributed.buffers.reduction import BucketReduction
from tests.streams.process import assert_no_race
from tests.streams.steps import Case, groups_of, make_step, train, wrapped


@pytest.mark.parametrize("wrapper", ["zero1", "zero2", "zero3", "fsdp2"])
def test_a_users_stream_averages_the_weights(wrapper: str) -> None:
    """The side stream is the first to read parameters that are being gathered; the forward waits all the same."""
    assert_no_race(train, Case(wrapper, between="average"))


def _fails_in_a_reduction(case: Case) -> None:
    """Drops a step whose third reduction runs out of memory after it has begun, and trains on."""
    reduce, calls = BucketReduction.reduce, list[int]()

    def fail_third(*args: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            args[1].mul_(1.0)  # type: ignore[attr-defined]  # as fp16 does: the lane writes the whole gradient
            raise torch.OutOfMemoryError("planted")
        reduce(*args)  # type: ignore[arg-type]

    with groups_of(case):
        model, optimizer = wrapped(case)
        with mock.patch.object(BucketReduction, "reduce", fail_third), pytest.raises(torch.OutOfMemoryError):
            make_step(case, model, optimizer)
        gc.collect()
        torch.zeros(64)  # takes the memory of what was freed
        model.zero_grad_buffer()
        make_step(case, model, optimizer)
        assert len(calls) >= 3


@pytest.mark.parametrize("wrapper", ["zero2", "zero3"])
def test_an_error_in_a_lane_frees_no_memory_in_use(wrapper: str) -> None:
    assert_no_race(_fails_in_a_reduction, Case(wrapper, micro_batches=1))
