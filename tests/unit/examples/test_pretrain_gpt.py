"""What the training example does before the first step."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base import device
from core.base.errors import ConfigError
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from tests.unit._program import load_program
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.training._configs import small_config


def _replicas(changes: dict[str, Any]) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether this rank's model is on the meta device before it is wrapped, and its weights behind."""
    parallel_state.initialize_model_parallel()
    config = small_config(**changes)
    module = load_program("pretrain_gpt").build_model(config, 128)
    on_meta = {tensor.is_meta for tensor in (*module.parameters(), *module.buffers())}
    assert len(on_meta) == 1
    model = wrap_model(module, config.model, config.ddp)
    model.engine.parameters.settle()
    return on_meta.pop(), {name: weight.detach().clone() for name, weight in model.module.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"bf16": True}, {"use_distributed_optimizer": True}, {"lora_rank": 2}, {"freeze": ["embedding*"]}],
    ids=str,
)
def test_the_first_replica_alone_draws_initial_values(changes: dict[str, Any]) -> None:
    ((alone, expected),) = run_distributed(_replicas, 1, changes)
    assert not alone
    for rank, (on_meta, found) in enumerate(run_distributed(_replicas, 2, changes)):
        assert on_meta == (rank == 1)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(1)
def test_a_low_precision_model_is_cast_before_it_moves() -> None:
    parallel_state.initialize_model_parallel()
    moved: set[str] = set()
    to = nn.Module.to

    def note(module: nn.Module, *args: Any) -> nn.Module:
        moved.update(str(parameter.dtype) for parameter in module.parameters())
        return to(module, *args)

    with mock.patch.object(nn.Module, "to", note):
        load_program("pretrain_gpt").build_model(small_config(bf16=True), 128)
    assert sorted(moved) == [str(torch.bfloat16)]


def test_a_model_fits_if_its_shards_do() -> None:
    check_model_fits = load_program("pretrain_gpt").check_model_fits
    kinds = (DistributedDataParallelConfig, FullyShardedDataParallelConfig, TorchFullyShardedDataParallelConfig)
    with (
        mock.patch.object(device, "memory_bytes", return_value=2 * 4 * 100 * 16),
        mock.patch.object(dist, "get_world_size", return_value=4),
    ):
        for kind in kinds:
            config = dataclasses.replace(
                small_config(), ddp=kind(data_parallel_sharding_strategy="optim_grads_params")
            )
            assert config.use_torch_fsdp2 == (kind is TorchFullyShardedDataParallelConfig)
            check_model_fits(config, vocab_size=400)
        with pytest.raises(ConfigError, match="GiB of weights on each rank"):
            check_model_fits(small_config(), vocab_size=400)
