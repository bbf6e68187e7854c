"""Marks of tests that need a GPU, and a process group of one rank on it, in the process of the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base import device

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_GPU = [pytest.mark.gpu, needs_gpu]


@contextmanager
def one_rank_on_a_gpu() -> Iterator[None]:
    """Joins a group of one under NCCL, whose end leaves the process as it was."""
    with mock.patch.dict("os.environ", SHARDSTACK_DEVICE="cuda"):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        device.init_process_group()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.cuda.synchronize()
            dist.destroy_process_group()
