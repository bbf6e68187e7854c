"""What the watch over reads catches, and what it lets pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core.base.device import current_device
from core.transformer.piecewise_attention import attend_in_pieces
from core.transformer.sequences import PackedDocuments
from tests.unit.training._reads import watched


def _write(x: Tensor, at: Any, value: Any) -> None:
    x[at] = value


WAIT: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool((x > 0).any()),
    "larger of two": lambda x: max(x[0], x[1]),
    "in": lambda x: 1.0 in x,
    "equal": lambda x: torch.equal(x, x),
    "cpu": lambda x: x.cpu(),
    "to text": lambda x: x.to("cpu"),
    "to device": lambda x: x.to(torch.device("cpu")),
    "to keyword": lambda x: x.to(device=torch.device("cpu")),
    "copy to host": lambda x: torch.empty(3).copy_(x),
    "copy from host": lambda x: x.copy_(torch.ones(3)),
    "move from host": lambda x: torch.ones(3).to(x.device),
    "tensor of numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "new tensor of numbers": lambda x: x.new_tensor([1.0, 2.0]),
    "both memories": lambda x: x + torch.ones(3),
    "mask": lambda x: x[x > 0],
    "mask in bytes": lambda x: x[(x > 0).byte()],
    "mask of rows": lambda x: x.view(3, 1)[x > 0, 0],
    "write by mask": lambda x: _write(x, x > 0, x[:1]),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "unique rows": lambda x: x.view(3, 1).unique(dim=0),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: torch.bincount(x.long()),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
}

PASS: dict[str, Callable[[Tensor], Any]] = {
    "cast": lambda x: x.to(torch.float64),
    "to its device": lambda x: x.to(x.device),
    "to the current device": lambda x: x.to(current_device()),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "number": lambda x: x * 2.0 + torch.tensor(2.0),
    "full": lambda x: torch.full((3,), 2.0, device=x.device) + x,
    "rows": lambda x: x[x.long() - 1],
    "repeats": lambda x: x.repeat_interleave(2),
    "repeats of a known sum": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "numbers of the host": lambda x: torch.tensor([1, 2]).tolist(),
    "computed on the host": lambda x: bool((torch.ones(3, device="cpu") > 0).nonzero().numel()),
    "moved meanwhile": lambda x: torch.ones(3).to(x.device, non_blocking=True) + x,
}


def _tensor() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("name", WAIT)
def test_what_waits_is_caught(name: str) -> None:
    x = _tensor()
    with pytest.raises(AssertionError, match=r"wait|of the device's tensors and one of the host"), watched():
        WAIT[name](x)


@pytest.mark.parametrize("name", PASS)
def test_what_does_not_wait_passes(name: str) -> None:
    x = _tensor()
    with watched():
        PASS[name](x)


def test_an_operation_of_ours_is_watched_inside() -> None:
    starts = torch.tensor([[0, 0, 2, 2]])
    query, key, value = (torch.rand(4, 1, 2, 8, requires_grad=True) for _ in range(3))
    with watched([starts]):
        attend_in_pieces(query, key, value, PackedDocuments(starts).starts).sum().backward()
    with pytest.raises(AssertionError, match=r"Tensor.numpy waits"), watched():  # the starts are the device's
        attend_in_pieces(query, key, value, starts)
