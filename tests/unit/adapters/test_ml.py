"""The mixin of `ml`, and its data-parallel functions."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from core.adapters import ml
from core.adapters.bridge.translation import Replicas
from core.base.errors import ConfigError, warn_once
from core.distributed import TorchFullyShardedDataParallel
from tests.unit._spawn import on_ranks
from tests.unit.adapters._adapters import Net, Task, batch
from tests.unit.distributed._toys import full


class _RecordedTask(Task):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __getattribute__(self, name: str):
        found = super().__getattribute__(name)
        if name.startswith(("on_", "run_", "compute_")):
            calls = super().__getattribute__("calls")

            def recorded(*args: object) -> object:
                calls.append((name, len(args)))
                return found(*args)

            return recorded
        return found


def test_a_task_model_calls_hooks_in_order_and_returns_the_loss():
    task, model = _RecordedTask(), Net()
    loss = ml.TaskModel(task, model)(batch(0, 0, 0), None)
    assert torch.equal(loss, model(batch(0, 0, 0)))
    assert task.calls == [
        ("on_before_forward_step", 3),
        ("run_model", 3),
        ("on_after_forward_step", 4),
        ("compute_loss", 4),
        ("on_after_compute_loss", 5),
    ]


def test_one_rank_keeps_its_model():
    model = Net()
    for world_size in ({"WORLD_SIZE": "1"}, {}):
        with mock.patch.dict(os.environ, world_size):
            if not world_size:
                os.environ.pop("WORLD_SIZE", None)
            assert ml.dp(model, ml.ParallelConfig(use_fsdp=True)) is model


class _Trainer(ml.ParallelMixin):
    def __init__(self, config: ml.TrainerParallelConfig) -> None:
        self.config = config


def test_the_mixin_casts_task_and_model_and_names_folders(tmp_path):
    with mock.patch.dict(os.environ, WORLD_SIZE="1"):
        for double, dtype in ((False, torch.float32), (True, torch.float64)):
            config = ml.TrainerParallelConfig("sl", exp_dir=str(tmp_path), use_double_weight_precision=double)
            task = nn.Linear(2, 2).bfloat16()
            found = _Trainer(config)._get_task_model(task, Net().bfloat16())
            assert isinstance(found, ml.TaskModel) and {p.dtype for p in found.parameters()} == {dtype}
    trainer = _Trainer(config)
    assert trainer.log_dir == tmp_path / "sl" / "logs"
    config.exp_name, config.log_dir_name = "first", "records"
    assert trainer.log_dir == tmp_path / "first" / "records"
    config.exp_dir = None
    assert trainer.exp_dir == Path.cwd() / "first"
    with pytest.raises(ConfigError, match="neither name nor exp_name"):
        _ = _Trainer(ml.TrainerParallelConfig()).exp_dir
    warn_once.cache_clear()
    config.checkpoint = {"every": 3}
    with mock.patch.dict(os.environ, WORLD_SIZE="1"), pytest.warns(UserWarning, match="checkpoint is for the trainer"):
        trainer._get_task_model(Task(), Net())


def test_a_strategy_has_a_name_and_a_typo_suggests_the_nearest():
    assert ml.ParallelConfig(sharding_strategy="SHARD_GRAD_OP").sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    with pytest.raises(ConfigError, match=r"'HYBRID'; did you mean|'HYBRID'; it takes one of FULL_SHARD"):
        ml.ParallelConfig(sharding_strategy="HYBRID")


@pytest.mark.parametrize("use_fsdp", [True, False])
@on_ranks(2)
def test_ranks_hold_equal_weights_after_steps_on_own_batches(use_fsdp: bool) -> None:
    """With groups of one rank each would train on its own gradient."""
    config = ml.TrainerParallelConfig("sl", parallel=ml.ParallelConfig(use_fsdp=use_fsdp))
    model = _Trainer(config)._get_task_model(Task(), Net())
    assert isinstance(model, TorchFullyShardedDataParallel if use_fsdp else Replicas)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        model(batch(step, 0, dist.get_rank()), None).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        mine = full(parameter)
        others = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(others, mine)
        assert torch.equal(*others)
    start = Net()
    assert not torch.equal(full(model.module.model.head.weight), start.head.weight)


@on_ranks(2)
def test_every_field_changes_something_or_warns() -> None:
    def settings(**fields: object) -> tuple[object, list[str]]:
        warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped = ml.dp(Net(), ml.ParallelConfig(**fields))
        mesh = getattr(next(wrapped.parameters()), "device_mesh", None)
        shown = (type(wrapped), vars(wrapped.ddp_config), None if mesh is None else tuple(mesh.shape))
        return shown, [str(w.message) for w in caught]

    plain, sharded = settings(), settings(use_fsdp=True)
    assert plain[0] != sharded[0] and not plain[1] and not sharded[1]
    for name, value in (("cpu_offload", True), ("sharding_strategy", "FULL_SHARD"), ("sync_module_states", False)):
        _seen, warned = settings(**{name: value})
        assert any(name in message for message in warned)
        assert settings(use_fsdp=True, **{name: value})[0] != sharded[0], name
    _, warned = settings(use_fsdp=True, sharding_strategy="NO_SHARD", cpu_offload=True)
    assert any("cpu_offload=True changes nothing: under NO_SHARD" in message for message in warned)
