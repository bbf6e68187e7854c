"""The life of a bucket and of gradients in its places, and a bucket that some micro-batches do not reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import ShardstackError
from core.distributed.flat.grad_slot import GradSlot
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import build, gradients, synced_last


def _slot() -> GradSlot:
    slot = GradSlot(nn.Parameter(torch.zeros(2)), "w", 0, 2, torch.float32, lambda: slot.hold(torch.full((2,), 7.0)))
    return slot


def test_a_slot_remembers_its_gradient_until_the_step_ends():
    slot = _slot()
    assert not slot.counts
    assert slot.lend() is not None and not slot.counts and slot.lend() is None
    slot.take_back()
    assert slot.lend() is not None
    slot.take_back()
    slot.add(torch.ones(2))
    slot.add(torch.ones(2))
    assert slot.counts and slot.has_arrived and slot.param.main_grad.tolist() == [2.0, 2.0]
    slot.release()
    assert slot.has_arrived and not slot.counts and slot.param.main_grad is None
    slot.complete()
    assert slot.counts and slot.has_arrived and slot.param.main_grad.tolist() == [0.0, 0.0]  # sent again, with zeros
    slot.clear()
    assert not slot.counts and not slot.has_arrived and slot.param.main_grad is None


@pytest.mark.parametrize("before", ["stale", "lent", "zeros"])
def test_a_slot_without_a_gradient_counts_as_zeros(before: str):
    slot = _slot()
    if before == "lent":
        slot.lend()
    elif before == "zeros":
        slot.complete()
    assert slot.counts is (before == "zeros") and not slot.has_arrived
    slot.complete()
    assert slot.counts and not slot.has_arrived and slot.param.main_grad.tolist() == [0.0, 0.0]
    assert slot.borrower is None
    slot.release()
    assert not slot.counts and slot.param.main_grad is None


@pytest.mark.parametrize("end", [GradSlot.clear, GradSlot.complete])
def test_a_loan_ends_when_its_gradient_cannot_come(end: Callable[[GradSlot], None]):
    slot = _slot()
    assert slot.lend() is not None
    slot.borrower = 5  # a backward that raised
    with pytest.raises(ShardstackError, match="another backward had begun"):
        slot.take_back()
    end(slot)
    slot.take_back()
    assert slot.borrower is None


@pytest.mark.parametrize("every", [False, True])
@on_ranks(2)
def test_gradients_after_sending_are_dropped_or_sent_again(every: bool) -> None:
    model = build("zero2_overlap", _Branches(), bucket_size=72, reduce_every_micro_batch=every)
    group = model.bucket_groups[0]
    slot, gradient = group.slots[0], torch.ones_like(group.params[0])
    for _ in range(2):
        model.zero_grad_buffer()
        assert not group.has_left and not group.has_reduced
        assert group.add_gradient(slot, gradient)
        group.start_grad_sync()
        assert group.has_left and group.has_reduced
        assert group.add_gradient(slot, gradient) is every  # else it is dropped
        assert group.has_left is not every and group.has_reduced


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


@pytest.mark.parametrize("every", [False, True])
@on_ranks(2)
def test_a_bucket_one_rank_misses_is_reduced_with_zeros(every: bool) -> None:
    serial = _Branches()
    for rank in range(2):
        for index, uses_second in enumerate(USES_SECOND[rank]):
            (serial(_batch(rank, index), uses_second) / 2).backward()
    model = build("zero2_overlap", _Branches(), bucket_size=72, reduce_every_micro_batch=every)
    assert len(model.bucket_groups) == 2
    rank = dist.get_rank()
    for _ in range(2):
        model.zero_grad_buffer()
        for index, uses_second in synced_last(model, enumerate(USES_SECOND[rank])):
            model(_batch(rank, index), uses_second).backward()
        model.finish_grad_sync()
        for name, gradient in gradients(model).items():
            expected = serial.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected)  # sums of six addends, in another order
