"""What FSDP2 cannot add up in a tree is refused; the sums themselves are in `distributed/test_reproducible.py`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from core.base.errors import ShardstackError, UnitError
from core.distributed import TorchFullyShardedDataParallel
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import Toy, Twice, batches, build, loss_of, toy


def _sharded(module: Toy | None = None) -> TorchFullyShardedDataParallel:
    model: Any = build("fsdp2", module or toy(), reproducible_across_ranks=True)
    return model


def _runs_a_unit_twice(count: int) -> None:
    model = _sharded(Twice())
    model.expect_micro_batches(count)
    with pytest.raises(UnitError, match=r"unit blocks\.0 ran twice in one forward"):
        for number, tokens in enumerate(batches(0, count)):
            with nullcontext() if number == count - 1 else model.no_sync():
                loss_of(model, tokens).backward()


@pytest.mark.parametrize("count", [1, 4])
def test_a_unit_that_runs_twice_raises(count: int) -> None:
    run_distributed(_runs_a_unit_twice, 2, count)


def _reduces_before_the_last_backward() -> None:
    model = _sharded()
    model.expect_micro_batches(2)
    with pytest.raises(ShardstackError, match="put every backward of a step but the last inside no_sync"):
        loss_of(model, batches(0)[0]).backward()


def test_an_early_backward_outside_no_sync_raises() -> None:
    run_distributed(_reduces_before_the_last_backward, 2)


def _hooks_the_all_reduce() -> None:
    model = _sharded()
    model.module.set_all_reduce_hook(lambda shard: None)
    with pytest.raises(UnitError, match="set_all_reduce_hook was called on"):
        loss_of(model, batches(0)[0]).backward()


def test_an_all_reduce_hook_of_the_caller_raises() -> None:
    run_distributed(_hooks_the_all_reduce, 2)
