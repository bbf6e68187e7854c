"""`wrap_model` chooses a wrapper by the config's type, then by its strategy."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig, wrap_model
from core.warn import warn_once
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import toy

OURS, TORCHS = "DistributedDataParallel", "TorchFullyShardedDataParallel"


def _chooses() -> list[tuple[str, int]]:
    warn_once.cache_clear()  # ranks are reused
    found = []
    for ddp_config in (
        DistributedDataParallelConfig(),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads"),
        TorchFullyShardedDataParallelConfig(),
        DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params"),
        DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = wrap_model(toy(), object(), ddp_config, process_group=dist.group.WORLD)
        said = [str(warning.message) for warning in caught if "is used instead" in str(warning.message)]
        found.append((type(model).__name__, len(said)))
    return found


def test_wrap_model_chooses_and_warns_once_that_fsdp2_is_used():
    assert run_distributed(_chooses, 1) == [[(OURS, 0)] * 3 + [(TORCHS, 0), (TORCHS, 1), (TORCHS, 0)]]
