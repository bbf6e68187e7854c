"""What a program sets on sharded parameters stays, and what it assigns over them is refused without a trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import UnitError
from core.distributed import finalize_model_grads
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import batches, build, full, loss_of, toy

UNEVEN = 1 + 2**-12  # no number of bf16


def _trains(calls_with_other_weights: bool, keeps: str) -> dict[str, torch.Tensor]:
    model = build("fsdp2", toy(tied=False), keep_gathered_between_micro_batches=keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = {f"module.{name}": tensor for name, tensor in toy(seed=7, tied=False).state_dict().items()}
    for tokens in batches(dist.get_rank()):
        if calls_with_other_weights:
            with torch.no_grad(), pytest.raises(UnitError, match=r"was replaced after .*functional_call"):
                torch.func.functional_call(model, weights, tokens)
        model.zero_grad_buffer()
        loss_of(model, tokens).backward()
        finalize_model_grads([model])
        optimizer.step()
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("keeps", ["none", "all"])
@on_ranks(2)
def test_training_goes_on_after_a_refused_functional_call(keeps: str) -> None:
    expected, found = _trains(False, keeps), _trains(True, keeps)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@on_ranks(2)
def test_hooks_survive_a_conversion_and_end_with_their_handle() -> None:
    model = build("fsdp2", toy(tied=False))
    seen = []
    handle = model.module.head.weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    model.to(torch.float64)  # makes new parameters
    loss_of(model, batches(dist.get_rank())[0]).backward()
    assert seen == [torch.float64]
    handle.remove()
    loss_of(model, batches(dist.get_rank())[0]).backward()
    assert len(seen) == 1


class _Scale(torch.autograd.Function):
    """Multiplies by a weight in bf16, whose gradient it computes in fp32, as fused norms do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight.float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient * weight.float(), torch.full(weight.shape, UNEVEN)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scale.apply(x.float(), self.weight)


@on_ranks(2)
def test_a_gradient_is_rounded_before_hooks_see_it() -> None:
    model = build("fsdp2", _Scaled(), config=SimpleNamespace(bf16=True), grad_reduce_in_fp32=True, unit_classes=())
    seen: list[torch.Tensor] = []
    (weight,) = model.parameters()
    weight.register_hook(lambda gradient: seen.append(gradient.float()))
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[1.0] * 4] * 2


@on_ranks(2)
def test_a_gradient_sent_to_a_shard_is_not_rounded() -> None:
    model = build("fsdp2", _Scaled(), config=SimpleNamespace(bf16=True), grad_reduce_in_fp32=True, unit_classes=())
    (weight,) = model.parameters()
    model(torch.ones(4)).sum().backward()
    (gradient,) = torch.autograd.grad((weight * UNEVEN).sum(), [weight])
    assert full(gradient).tolist() == [UNEVEN] * 4
