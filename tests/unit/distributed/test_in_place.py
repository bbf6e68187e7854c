"""A model that is sharded in place, and used without a wrapper around it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from core.distributed.in_place import set_gradient_sync, shard_in_place, usable_offload_policy
from core.distributed.mesh_axes import mesh_axes
from core.distributed.warn import warn_once
from core.errors import WrapError
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import UNITS, batches, full, loss_of, oracle, toy


def _sharded(seed: int = 1, **options: object) -> torch.nn.Module:
    model = toy(seed)
    axes = mesh_axes(init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    units = shard_in_place(model, axes, UNITS, caller="a test", **options)  # type: ignore[arg-type]
    assert {"blocks.0", "blocks.1"} <= {name for unit in units for name in unit.names}
    return model


def _accumulates() -> None:
    model = _sharded()
    steps = batches(dist.get_rank())
    for index, tokens in enumerate(steps):
        set_gradient_sync(model, index == len(steps) - 1)
        loss_of(model, tokens).backward()
    found = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    expected = oracle()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_accumulate_until_sync_is_set_again():
    run_distributed(_accumulates, 2)


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


def test_ranks_that_ask_for_different_things_hear_of_it():
    run_distributed(_differs, 2)


def test_without_an_accelerator_memory_is_not_pinned_which_is_said_once():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="pin_memory is set"):
        policy = usable_offload_policy(CPUOffloadPolicy(pin_memory=True))
    assert isinstance(policy, CPUOffloadPolicy) and not policy.pin_memory
    assert usable_offload_policy(None) is None
    plain = CPUOffloadPolicy(pin_memory=False)
    assert usable_offload_policy(plain) is plain
