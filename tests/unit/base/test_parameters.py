"""Parameters that are being gathered wait at their first use, and for nothing else."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from core.base.parameters import can_be_pending, end_pending, make_pending


@pytest.fixture
def pending() -> tuple[nn.Linear, list[str]]:
    """Returns a module whose parameters wait, and what has waited."""
    module, waited = nn.Linear(2, 2), []

    def wait() -> None:
        waited.append("waited")
        end_pending(module.parameters())

    make_pending(module.parameters(), wait)
    return module, waited


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m(torch.ones(1, 2)),
        lambda m: m.weight + 1,
        lambda m: m.weight.data,
        lambda m: m.weight.detach(),
        lambda m: torch.stack([m.bias, m.bias]),
        lambda m: m.state_dict(),
        lambda m: nn.utils.parameters_to_vector([m.bias]),
        lambda m: m.weight.tolist(),
        lambda m: m.weight.data_ptr(),
        lambda m: repr(m.weight),
    ],
)
def test_every_use_of_the_values_waits_once(pending: tuple[nn.Linear, list[str]], use: Callable[[nn.Linear], object]):
    module, waited = pending
    use(module)
    assert waited == ["waited"]
    assert all(type(parameter) is nn.Parameter and not vars(parameter) for parameter in module.parameters())


def test_writes_wait(pending: tuple[nn.Linear, list[str]]):
    module, waited = pending
    with torch.no_grad():
        module.weight.clamp_(0, 0)
    assert waited == ["waited"] and not module.weight.any()


def test_what_needs_no_values_does_not_wait(pending: tuple[nn.Linear, list[str]]):
    module, waited = pending
    weight = module.weight
    assert weight.shape == (2, 2) and weight.numel() == 4 and weight.dtype == torch.float32 and len(weight) == 2
    assert weight.requires_grad and weight.is_leaf and weight.grad is None and weight.device.type == "cpu"
    assert isinstance(weight, nn.Parameter) and {weight: 1}[weight] == 1
    weight.grad = None
    module.requires_grad_(False)
    module.zero_grad()
    list(module.parameters())
    assert not waited


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda p: torch.load(_saved(p), weights_only=True)])
def test_a_copy_is_an_ordinary_parameter(pending: tuple[nn.Linear, list[str]], copied: Callable):
    module, waited = pending
    found = copied(module.weight)
    assert type(found) is nn.Parameter and torch.equal(found, module.weight) and waited == ["waited"]


def _saved(parameter: nn.Parameter) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return file


def test_a_parameter_of_another_class_cannot_be_pending():
    class Own(nn.Parameter):
        pass

    assert not can_be_pending(Own(torch.ones(1))) and can_be_pending(nn.Parameter(torch.ones(1)))
