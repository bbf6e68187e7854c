"""Ranks that meet at a store that earlier rounds have used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from core.base.errors import ParallelStateError
from core.base.rendezvous import GENERATION, store_of_round

LIMIT = timedelta(seconds=600)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def _meet(threads: ThreadPoolExecutor, store: Store) -> list[Store]:
    futures = [threads.submit(store_of_round, store, rank, 3, LIMIT) for rank in (2, 1, 0)]
    return [future.result() for future in futures]


def test_a_round_sees_nothing_of_the_one_before(threads: ThreadPoolExecutor) -> None:
    store = HashStore()
    for number in range(5):
        stores = _meet(threads, store)
        assert not any(of_rank.check(["address"]) for of_rank in stores)
        stores[0].set("address", str(number))
        assert [of_rank.get("address") for of_rank in stores] == [str(number).encode()] * 3


def test_a_round_that_a_rank_left_does_not_mislead_the_next(threads: ThreadPoolExecutor) -> None:
    store = HashStore()
    with pytest.raises(ParallelStateError, match="rank 1 did not join the process group in time"):
        store_of_round(store, 0, 3, timedelta(seconds=0.1))
    with pytest.raises(ParallelStateError, match="rank 0 did not join"):
        store_of_round(store, 2, 3, timedelta(seconds=0.1))
    first, *others = _meet(threads, store)
    first.set("key", "value")
    assert all(other.check(["key"]) for other in others)


def test_ranks_of_two_generations_do_not_meet(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setenv(GENERATION, "3")
    late = threads.submit(store_of_round, store, 1, 2, timedelta(seconds=0.5))  # has not heard of the next one
    while not late.running():
        time.sleep(0.01)
    time.sleep(0.1)
    monkeypatch.setenv(GENERATION, "4")
    with pytest.raises(ParallelStateError, match="rank 1 did not join"):
        store_of_round(store, 0, 2, timedelta(seconds=0.2))
    with pytest.raises(ParallelStateError, match="rank 0 did not join"):
        late.result()
