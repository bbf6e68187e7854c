"""What a run stands on: groups by its settings, and seeds that tensor-parallel ranks share where they must."""

from __future__ import annotations

import pytest
import torch

from core import parallel_state
from core.errors import ParallelConfigError
from core.tensor_parallel.random import get_rng_tracker
from core.training.initialize import initialize
from tests.unit._spawn import run_distributed
from tests.unit.training._configs import small_config


def _initialized(tensor_parallel: int) -> tuple[int, int, float, float]:
    initialize(small_config(tensor_model_parallel_size=tensor_parallel, seed=7))
    with get_rng_tracker().fork():
        own = torch.rand(()).item()
    sizes = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_data_parallel_world_size())
    return *sizes, torch.rand(()).item(), own


def test_groups_and_seeds_follow_the_settings():
    alike, cut = run_distributed(_initialized, 2, 1), run_distributed(_initialized, 2, 2)
    assert [ranks[:2] for ranks in alike] == [(1, 2), (1, 2)]
    assert [ranks[:2] for ranks in cut] == [(2, 1), (2, 1)]
    assert len({ranks[2] for ranks in cut}) == 1  # what tensor-parallel ranks hold whole
    assert len({ranks[3] for ranks in cut}) == 2  # what they hold in part


def test_settings_are_checked_before_anything_is_made(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ParallelConfigError, match="3 ranks do not divide"):
        initialize(small_config(tensor_model_parallel_size=2))
    assert not torch.distributed.is_initialized()
