"""The phases of a bucket and the contents of its places, and a bucket that some micro-batches do not reach."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.distributed.buffers.life_cycle import BucketPhase, Content
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import build, gradients


@pytest.mark.parametrize("reduces_each", [False, True])
def test_gradients_after_sending_are_late_or_sent_again(reduces_each: bool):
    assert BucketPhase.FILLING.begun(reduces_each) is BucketPhase.FILLING
    phase = BucketPhase.FILLING.sent()
    assert phase is BucketPhase.SENT and phase.has_left and phase.has_reduced
    phase = phase.begun(reduces_each)
    assert phase is (BucketPhase.REFILLING if reduces_each else BucketPhase.LATE)
    assert phase.has_left is not reduces_each and phase.has_reduced
    assert phase.begun(reduces_each) is phase
    assert phase.sent() is (
        BucketPhase.SENT if reduces_each else BucketPhase.LATE
    )  # what was dropped is still missing


def test_each_step_begins_with_nothing():
    assert {phase.restarted() for phase in BucketPhase} == {BucketPhase.FILLING}
    assert not BucketPhase.FILLING.has_left and not BucketPhase.FILLING.has_reduced
    assert {content.cleared() for content in Content} == {Content.STALE}


def test_a_slot_remembers_its_gradient_until_the_step_ends():
    content = Content.STALE.lent().returned()
    assert content is Content.STALE and not content.counts
    content = content.added()
    assert content.counts and content.has_arrived
    content = content.released()
    assert content is Content.SENT and content.has_arrived and not content.counts
    assert content.zeroed() is Content.GRADIENT  # to be reduced again, with zeros
    for content in (Content.STALE, Content.LENT, Content.ZEROS):
        assert content.released() is Content.STALE and content.zeroed() is Content.ZEROS


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        x = self.first(x)
        return (self.second(x) if uses_second else x).square().sum()


USES_SECOND = ((True, True, True), (True, False, False))
"""Of each rank's micro-batches."""


def _batch(rank: int, index: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * rank + index))


def _reaches_some_buckets(every: bool) -> None:
    serial = _Branches()
    for rank in range(2):
        for index, uses_second in enumerate(USES_SECOND[rank]):
            (serial(_batch(rank, index), uses_second) / 2).backward()
    model = build("zero2_overlap", _Branches(), bucket_size=72, reduce_every_micro_batch=every)
    assert len(model.bucket_groups) == 2
    rank = dist.get_rank()
    for _ in range(2):
        model.zero_grad_buffer()
        for index, uses_second in enumerate(USES_SECOND[rank]):
            with nullcontext() if index == 2 else model.no_sync():
                model(_batch(rank, index), uses_second).backward()
        model.finish_grad_sync()
        for name, gradient in gradients(model).items():
            expected = serial.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected)  # sums of six addends, in another order


@pytest.mark.parametrize("every", [False, True])
def test_a_bucket_one_rank_misses_is_reduced_with_zeros(every: bool):
    run_distributed(_reaches_some_buckets, 2, every)
