"""A model on FSDP2 that is used without a wrapper around it."""

from __future__ import annotations

import warnings

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

from core.base.errors import WrapError, warn_once
from core.comm.record import record_of
from core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import UNITS, batches, build, communication_of, full, gradients, loss_of, oracle, toy


def _sharded(seed: int = 1, mp_policy: MixedPrecisionPolicy | None = None, **settings: object) -> torch.nn.Module:
    model = toy(seed)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    asked = TorchFullyShardedDataParallelConfig(**settings)  # type: ignore[arg-type]
    wrapper = TorchFullyShardedDataParallel(None, asked, model, UNITS, process_group=mesh, mp_policy=mp_policy)
    assert {"blocks.0", "blocks.1"} <= {name for unit in wrapper.units for name in unit.names}
    return wrapper.let_module_be_called()


def _accumulates(kept: str) -> None:
    model = _sharded(keep_gathered_between_micro_batches=kept)
    steps = batches(dist.get_rank())
    gathered = []
    for index, tokens in enumerate(steps):
        model.set_requires_gradient_sync(index == len(steps) - 1)
        loss_of(model, tokens).backward()
        gathered.append(not isinstance(model.blocks[0].down.weight, DTensor))
    assert gathered == [kept != "none"] * (len(steps) - 1) + [False]
    found = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    expected = oracle()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kept", ["none", "ends", "all"])
def test_gradients_accumulate_until_sync_is_set_again(kept):
    run_distributed(_accumulates, 2, kept)


def _steps_while_units_are_gathered() -> None:
    tokens = batches(0)[0]
    losses = []
    for model in (_sharded(), toy()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(model, tokens).backward()
        model(tokens)  # a loss to look at, with a graph for which units stay gathered
        optimizer.step()
        losses.append(loss_of(model, tokens).item())
    assert losses[0] == losses[1]


def test_a_forward_computes_with_what_an_optimizer_has_written():
    run_distributed(_steps_while_units_are_gathered, 2)


def _evaluates() -> None:
    model = _sharded(seed=1 + dist.get_rank())  # the first rank decides
    tokens = batches(0)[0]
    with torch.no_grad():
        before = model(tokens)
        assert torch.equal(before, toy()(tokens))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.to_local().mul_(0.5)
        assert not torch.equal(model(tokens), before)


def test_a_forward_without_backward_leaves_nothing_gathered():
    run_distributed(_evaluates, 2)


def _differs() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dist.get_rank() else None)
    with pytest.raises(WrapError, match="the setting param_dtype"):
        _sharded(mp_policy=policy)


def test_different_settings_across_ranks_raise():
    run_distributed(_differs, 2)


def _offloads() -> None:
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="pin_memory is set"):
        _sharded(cpu_offload=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _sharded(cpu_offload=True, pin_memory=False)


def test_without_an_accelerator_memory_is_unpinned_said_once():
    run_distributed(_offloads, 2)


def _steps_on_memory_of(exchanges: bool) -> list[torch.Tensor]:
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
    return [gradient for _, gradient in sorted(gradients(model).items())]


def _exchanged_and_not() -> bool:
    return all(map(torch.equal, _steps_on_memory_of(False), _steps_on_memory_of(True)))


def test_torchs_collectives_can_have_memory_of_the_backend():
    assert run_distributed(_exchanged_and_not, 2) == [True, True]
