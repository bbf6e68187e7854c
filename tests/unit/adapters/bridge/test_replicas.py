"""Replicas that leave their gradients where torch's do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.adapters.bridge.translation import Replicas
from core.base.errors import ParallelConfigError, ShardstackError
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import on_ranks
from tests.unit.adapters._adapters import Net, batch


@on_ranks(2)
def test_replicas_accumulate_as_torchs_do() -> None:
    wrapped = Replicas(Net(), dist.group.WORLD)
    serial = Net()
    for step in range(3):
        for micro in range(2):
            wrapped(batch(step, micro, dist.get_rank())).backward()  # each reduced, and added to the one before
            for rank in range(2):
                (serial(batch(step, micro, rank)) / 2).backward()
        expected = {name: parameter.grad for name, parameter in serial.named_parameters()}
        found = dict(zip(expected, (parameter.grad for parameter in wrapped.parameters()), strict=True))
        assert_same_sums(found, expected, additions=3)  # two micro-batches of two ranks
        in_place = step == 1
        for parameter in (*wrapped.parameters(), *serial.parameters()):
            if in_place:
                parameter.grad.zero_()
            else:
                parameter.grad = None


@on_ranks(2)
def test_gradients_are_in_grad_and_in_main_grad_after_backward() -> None:
    wrapped = Replicas(Net(), dist.group.WORLD)
    wrapped(batch(0, 0, dist.get_rank())).backward()
    first = [parameter.grad.clone() for parameter in wrapped.parameters()]
    for parameter in wrapped.parameters():
        assert parameter.grad.data_ptr() == parameter.main_grad.data_ptr()
    finalize_model_grads([wrapped])  # calling it nevertheless changes nothing
    assert all(torch.equal(p.grad, g) for p, g in zip(wrapped.parameters(), first, strict=True))
    wrapped.scale_gradients(0.5)
    assert all(torch.equal(p.grad, g / 2) for p, g in zip(wrapped.parameters(), first, strict=True))
    wrapped.zero_grad_buffer()
    assert all(p.grad is None for p in wrapped.parameters())
    with wrapped.no_sync():
        wrapped(batch(0, 0, dist.get_rank())).backward()
        assert all(p.grad is None for p in wrapped.parameters())
    with pytest.raises(ZeroDivisionError), wrapped.no_sync():
        raise ZeroDivisionError
    wrapped(batch(0, 0, dist.get_rank())).backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(wrapped.parameters(), first, strict=True))


@on_ranks(2)
def test_a_parameter_that_is_frozen_for_a_step_stays() -> None:
    wrapped, serial = Replicas(Net(), dist.group.WORLD), Net()
    models = (wrapped.module, serial)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for model in models]
    for step in range(3):
        for model in models:
            model.embedding.weight.requires_grad_(step != 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        wrapped(batch(step, 0, 0)).backward()  # the same on both ranks, so that their mean is exact
        serial(batch(step, 0, 0)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, found), expected in zip(wrapped.module.named_parameters(), serial.parameters(), strict=True):
        assert torch.equal(found, expected), name


@on_ranks(2)
def test_a_backward_that_raised_leaves_nothing_to_the_next() -> None:
    wrapped = Replicas(Net(), dist.group.WORLD)
    tokens = batch(0, 0, dist.get_rank())

    def fail(*unused: object) -> None:
        raise ZeroDivisionError

    handle = wrapped.module.embedding.weight.register_hook(fail)  # the last gradient: all others have come
    with pytest.raises(ZeroDivisionError):
        wrapped(tokens).backward()
    handle.remove()
    wrapped(tokens).backward()
    found = [parameter.grad.clone() for parameter in wrapped.parameters()]
    again = Replicas(Net(), dist.group.WORLD)
    again(tokens).backward()
    assert all(torch.equal(one, other.grad) for one, other in zip(found, again.parameters(), strict=True))


@on_ranks(2)
def test_a_backward_whose_reduction_raised_leaves_nothing() -> None:
    def replicas() -> DistributedDataParallel:
        settings = DistributedDataParallelConfig(check_for_nan_in_grad=True)
        return DistributedDataParallel(None, settings, Net(), process_group=dist.group.WORLD, finish_in_backward=True)

    wrapped, tokens = replicas(), batch(0, 0, dist.get_rank())
    handle = wrapped.module.embedding.weight.register_hook(lambda gradient: gradient / 0.0)
    with pytest.raises(ShardstackError, match="is not finite"):  # when the backward's gradients are reduced
        wrapped(tokens).backward()
    handle.remove()
    wrapped(tokens).backward()
    again = replicas()
    again(tokens).backward()
    for one, other in zip(wrapped.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class _Checkpointed(nn.Module):
    """Layers that are recomputed in backwards of their own, inside that of the model."""

    def __init__(self, num_checkpointed: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)])
        self.num_checkpointed = num_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=True) if index < self.num_checkpointed else layer(x)
        return x.square().mean()


@pytest.mark.parametrize("num_checkpointed", [2, 3])
@on_ranks(2)
def test_reentrant_checkpoints_lose_no_gradient(num_checkpointed: int) -> None:
    wrapped, serial = Replicas(_Checkpointed(num_checkpointed), dist.group.WORLD), _Checkpointed(num_checkpointed)
    inputs = [torch.arange(12.0).view(3, 4) / (3 + rank) for rank in range(2)]
    for _ in range(2):
        wrapped(inputs[dist.get_rank()].clone()).backward()
        for x in inputs:
            (serial(x.clone()) / 2).backward()
    expected = {name: parameter.grad for name, parameter in serial.named_parameters()}
    found = dict(zip(expected, (parameter.grad for parameter in wrapped.parameters()), strict=True))
    assert_same_sums(found, expected, additions=11)  # two micro-batches of two ranks, each a sum over three rows


@on_ranks(1)
def test_gradients_that_are_sharded_are_not_finished_in_backward():
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with pytest.raises(ParallelConfigError, match=r"finish_in_backward leaves whole gradients .* 'optim'"):
        DistributedDataParallel(None, settings, Net(), process_group=dist.group.WORLD, finish_in_backward=True)
