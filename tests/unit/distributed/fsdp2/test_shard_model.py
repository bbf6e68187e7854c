"""A model on FSDP2 that is used without a wrapper around it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)
from torch.distributed.tensor import DTensor

from core.base.errors import WrapError
from core.comm.record import record_of
from core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import UNITS, batches, build, communication_of, full, gradients, loss_of, oracle, toy


def _sharded(seed: int = 1, mp_policy: MixedPrecisionPolicy | None = None, **settings: object) -> torch.nn.Module:
    model = toy(seed)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    asked = TorchFullyShardedDataParallelConfig(**settings)  # type: ignore[arg-type]
    wrapper = TorchFullyShardedDataParallel(None, asked, model, UNITS, process_group=mesh, mp_policy=mp_policy)
    assert {"blocks.0", "blocks.1"} <= {name for unit in wrapper.engine.units for name in unit.names}
    return wrapper.let_module_be_called()


@pytest.mark.parametrize("kept", ["none", "ends", "all"])
@on_ranks(2)
def test_gradients_accumulate_until_sync_is_set_again(kept: str) -> None:
    model = _sharded(keep_gathered_between_micro_batches=kept)
    steps = batches(dist.get_rank())
    gathered = []
    for index, tokens in enumerate(steps):
        model.set_requires_gradient_sync(index == len(steps) - 1)
        loss_of(model, tokens).backward()
        gathered.append(not isinstance(model.blocks[0].down.weight, DTensor))
    assert gathered == [kept != "none"] * (len(steps) - 1) + [False]
    assert_same({name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}, oracle())


@on_ranks(2)
def test_a_forward_computes_with_what_an_optimizer_has_written() -> None:
    tokens = batches(0)[0]
    losses = []
    for model in (_sharded(), toy()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(model, tokens).backward()
        model(tokens)  # a loss to look at, with a graph for which units stay gathered
        optimizer.step()
        losses.append(loss_of(model, tokens).item())
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_forward_without_backward_leaves_nothing_gathered() -> None:
    model = _sharded(seed=1 + dist.get_rank())  # the first rank decides
    tokens = batches(0)[0]
    with torch.no_grad():
        before = model(tokens)
        assert torch.equal(before, toy()(tokens))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.to_local().mul_(0.5)
        assert not torch.equal(model(tokens), before)


@on_ranks(2)
def test_different_settings_across_ranks_raise() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dist.get_rank() else None)
    with pytest.raises(WrapError, match="the setting param_dtype"):
        _sharded(mp_policy=policy)


def _steps_on_memory_of(exchanges: bool) -> dict[str, torch.Tensor]:
    model = build("fsdp2", toy(), collectives="torch")
    gather, reduce = communication_of(model.module)
    assert isinstance(gather, DefaultAllGather) and isinstance(reduce, DefaultReduceScatter)
    if exchanges:
        model.module.set_allocate_memory_from_process_group_for_comm(True)
        assert type(communication_of(model.module)[0]) is ProcessGroupAllocAllGather
    loss_of(model, batches(dist.get_rank())[0]).backward()
    model.finish_grad_sync()
    if exchanges:
        gather, reduce = communication_of(model.module)
        assert isinstance(gather, ProcessGroupAllocAllGather) and isinstance(reduce, ProcessGroupAllocReduceScatter)
    else:
        calls = [(call.kind, call.what) for call in record_of(dist.group.WORLD).calls]
        assert ("all-gather", "the parameters of the root unit") in calls
    return gradients(model)


@on_ranks(2)
def test_torchs_collectives_can_have_memory_of_the_backend() -> None:
    assert_same(_steps_on_memory_of(False), _steps_on_memory_of(True))


@on_ranks(2)
def test_a_write_to_shards_between_forwards_is_seen() -> None:
    model, plain, tokens = build("fsdp2", toy(), reshard_after_forward=False), toy(), batches(0)[0]
    shards = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(tokens)  # no backward follows, so that units stay gathered
    with torch.no_grad():
        for parameter in (*shards, *(p for p in plain.parameters() if p.requires_grad)):
            parameter.mul_(0.5)
        assert torch.equal(model(tokens), plain(tokens))
