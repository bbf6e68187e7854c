"""Shared by every test: one thread per process, the CPU as device, and an end of the rank processes."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SHARDSTACK_DEVICE", "cpu")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin starve the ranks of other tests
if (capability := os.environ.get("ATEN_CPU_CAPABILITY")) is not None:
    # Torch's cache of compiled graphs takes no notice of it: code of another width would run, and compute nonsense.
    cache = Path(tempfile.gettempdir(), f"shardstack-inductor-{capability}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))

import pytest
import torch

from tests._forked import start_server
from tests.unit._spawn import close_pools


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden values of tests/functional/cases again, and say what changed",
    )
    parser.addoption(
        "--write-missing-golden",
        action="store_true",
        help="write the golden values of cases that have none for this device, and compare the others",
    )


_GPU_FILES = pytest.StashKey[set[Path]]()  # set once the tests are collected


@pytest.hookimpl(tryfirst=True)  # before `-m` drops tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_GPU_FILES] = {item.path for item in items if item.get_closest_marker("gpu")}


@pytest.fixture
def files_with_gpu_tests(request: pytest.FixtureRequest) -> set[Path]:
    """The files of collected tests that have the mark `gpu`, of those too that `-m` drops."""
    return request.config.stash[_GPU_FILES]


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 20)
    gc.freeze()  # what the tests have imported: no collection has to look at it again
    start_server()  # before a test changes what its forks would inherit
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _random_streams_end_with_the_test() -> Iterator[None]:
    yield
    random = sys.modules.get(
        "shardstack.tensor_parallel.random"
    )  # only a test that imported it can have tracked streams
    if random is not None:
        random.get_rng_tracker().reset()
