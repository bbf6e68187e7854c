"""A run starts with groups by its settings, and seeds that tensor-parallel ranks share where they must."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

from core import parallel_state
from core.base.errors import ParallelConfigError
from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig, wrap_model
from core.models.gpt import GPTModel
from core.tensor_parallel.random import get_rng_tracker
from core.training.config.arguments import parse_arguments
from core.training.initialize import initialize
from core.training.launch.entry import environment_threads
from core.transformer.transformer_layer import hidden_dropout
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import full
from tests.unit.training._configs import SMALL, small_config


def _initialized(tensor_parallel: int) -> tuple[int, int, float, float]:
    initialize(small_config(tensor_model_parallel_size=tensor_parallel, seed=7))
    with get_rng_tracker().fork():
        own = torch.rand(()).item()
    sizes = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_data_parallel_world_size())
    return *sizes, torch.rand(()).item(), own


def test_groups_and_seeds_follow_the_settings():
    replicated, cut = run_distributed(_initialized, 2, 1), run_distributed(_initialized, 2, 2)
    assert [ranks[:2] for ranks in replicated] == [(1, 2), (1, 2)]
    assert [ranks[:2] for ranks in cut] == [(2, 1), (2, 1)]
    assert len({ranks[2] for ranks in cut}) == 1  # what tensor-parallel ranks hold whole
    assert len({ranks[3] for ranks in cut}) == 2  # what they hold in part


def _precision_of_products(precision: str | None) -> str:
    flags = [] if precision is None else ["--fp32-matmul-precision", precision]
    required = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    torch.set_float32_matmul_precision("medium" if precision != "medium" else "high")
    initialize(parse_arguments([*required, *flags]))
    return torch.get_float32_matmul_precision()


@pytest.mark.parametrize("precision", [None, "highest", "high", "medium"])
def test_the_precision_of_products_in_fp32_is_torchs(precision: str | None) -> None:
    assert run_distributed(_precision_of_products, 1, precision) == [precision or "highest"]


def _first_mask_and_weights(is_random: bool, uses_fsdp2: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns what dropout leaves of ones, and the weights of a wrapped model."""
    config = small_config(seed=7, data_parallel_random_init=is_random)
    initialize(config)
    with torch.device("meta") if uses_fsdp2 else nullcontext():
        model = GPTModel(config.model, vocab_size=64, max_sequence_length=8)
    ddp_config = TorchFullyShardedDataParallelConfig() if uses_fsdp2 else DistributedDataParallelConfig()
    wrap_model(model, config.model, ddp_config)
    mask = hidden_dropout(torch.ones(64), 0.5, training=True, sequence_parallel=False)
    return mask, {name: full(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("uses_fsdp2", [False, True], ids=["ddp", "fsdp2"])
def test_replicas_drop_differently_where_asked_and_start_equal(uses_fsdp2: bool):
    (first, _), (second, _) = run_distributed(_first_mask_and_weights, 2, False, uses_fsdp2)
    assert torch.equal(first, second)
    (first, weights), (second, others) = run_distributed(_first_mask_and_weights, 2, True, uses_fsdp2)
    assert not torch.equal(first, second)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_settings_are_checked_before_anything_is_made(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ParallelConfigError, match="3 ranks do not divide"):
        initialize(small_config(tensor_model_parallel_size=2))
    assert not torch.distributed.is_initialized()


def test_the_ranks_of_a_machine_share_its_cores(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(18)), raising=False)
    assert (environment_threads(), environment_threads(updates_on_host=True)) == (1, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as launchers set it
    assert (environment_threads(), environment_threads(updates_on_host=True)) == (1, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert environment_threads(updates_on_host=True) == 2
