"""Marks of tests that need a GPU, and one rank on it, in the process of the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.rendezvous import default_group
from tests.unit._spawn import run_distributed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_GPU = [pytest.mark.gpu, needs_gpu]


@contextmanager
def one_rank_on_a_gpu() -> Iterator[None]:
    """Joins a group of one under NCCL, whose end leaves the process as it was."""
    with mock.patch.dict("os.environ", SHARDSTACK_DEVICE="cuda"):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        default_group.init_process_group()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.cuda.synchronize()
            dist.destroy_process_group()


def run_on_one_rank(device_type: str, function: Callable[..., object], *args: Any) -> None:
    """Calls `function(device_type, *args)` on one rank: on a CPU in a process of its own, on a GPU in this one."""
    if device_type == "cpu":
        run_distributed(function, 1, device_type, *args)
        return
    with one_rank_on_a_gpu():
        function(device_type, *args)
