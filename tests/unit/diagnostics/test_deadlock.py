"""Ranks that wait for each other are told so at once, and ranks that wait for a slow one are left alone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.comm import collectives
from core.diagnostics.out_of_step import PATIENCE_S
from core.distributed import finalize_model_grads
from tests.unit._spawn import RankFailure, run_distributed
from tests.unit.distributed._toys import build


class Skipping(nn.Module):
    """Layers of one size, so that a gather of one could pass for that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index in skipped else torch.tanh(layer(x))
        return x.sum()


def _skips(kind: str, skipped: Sequence[int]) -> None:
    model = build(kind, Skipping(), unit_classes=(nn.Linear,))
    for step in range(2):
        model.zero_grad_buffer()
        model(torch.ones(2, 6), skipped if step == dist.get_rank() == 1 else ()).backward()
        finalize_model_grads([model])


@pytest.mark.parametrize(("kind", "skipped"), [("zero3", [1]), ("fsdp2", [1]), ("zero3", [3]), ("fsdp2", [3])])
def test_a_unit_that_one_rank_skips_is_named_at_once(kind, skipped):
    with pytest.raises(RankFailure) as caught:
        run_distributed(_skips, 2, kind, skipped)
    report = str(caught.value)
    assert f"rank 0 of 2 waited 1 s for all-gather 2 of the parameters of unit layers.{skipped[0]}" in report or (
        f"unit layers.{skipped[0]} " in report
    )
    assert "look at rank 1" in report
    assert "name its parameters in replicated, or call it with a dummy input on all" in report
    assert "Timed out waiting" not in report  # the backend's limit


def _waits_for_a_slow_rank() -> None:
    if dist.get_rank() == 1:
        time.sleep(4 * PATIENCE_S)
    collectives.all_reduce(torch.ones(8), dist.group.WORLD, what="numbers")


def test_a_slow_rank_is_waited_for():
    run_distributed(_waits_for_a_slow_rank, 2)


def _waits_in_different_groups() -> None:
    """Rank 0 waits for 1 in one group while 1 waits for 2, which comes late: no two wait for each other."""
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 2:
        time.sleep(4 * PATIENCE_S)
    if rank:
        collectives.all_reduce(torch.ones(8), other, what="numbers of the second pair")
    if rank < 2:
        collectives.all_reduce(torch.ones(8), pair, what="numbers of the first pair")


def test_a_chain_of_waiting_ranks_is_waited_for():
    run_distributed(_waits_in_different_groups, 3)
