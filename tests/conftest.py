"""What every test shares: one thread a process, a CPU device, and the rank processes ended at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SHARDSTACK_DEVICE", "cpu")

import pytest
import torch

from tests.unit._spawn import close_pools


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    close_pools()
