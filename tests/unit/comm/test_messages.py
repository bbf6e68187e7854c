"""Values that only move arrive in tensors of any layout and dtype, and nothing is written outside of a tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.base.errors import ShardstackError
from core.comm.collectives import (
    all_gather,
    all_gather_by_backend,
    all_reduce_by_backend,
    broadcast_by_backend,
    exchange,
)
from core.comm.messages import as_message, write_back
from tests.unit._spawn import on_ranks, run_distributed

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda values: values.clone(),
    "every other column": lambda values: torch.stack((values, values), -1).flatten(1)[:, ::2],
    "transposed": lambda values: values.t().contiguous().t(),
    "transposed on one rank": lambda values: values.t().contiguous().t() if dist.get_rank() else values.clone(),
}
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64),
    *(torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
)


def _values(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.arange(24) * 7 + 5 * rank) % 11).view(6, 4).to(dtype)


def _same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@on_ranks(2)
def test_layouts_do_not_change_values() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    first, second = _values(0), _values(1)
    own = (first, second)[rank]
    for name, layout in LAYOUTS.items():
        sent, total, received = layout(own), layout(own), layout(torch.full((6, 4), -1.0))
        broadcast_by_backend(sent, what="a tensor")
        assert torch.equal(sent, first), name
        all_reduce_by_backend(total, what="a tensor")
        assert torch.equal(total, first + second), name
        exchange([(layout(own), 1 - rank)], [(received, 1 - rank)], what="a tensor")
        assert torch.equal(received, (second, first)[rank]), name
    with pytest.raises(ValueError, match="asynchronous all-reduce of a tensor needs a contiguous tensor"):
        all_reduce_by_backend(own.t(), what="a tensor", async_op=True)


def _check_dtypes() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    for dtype in DTYPES:
        first, second = _values(0, dtype), _values(1, dtype)
        own = (first, second)[rank]
        sent = own.clone()
        broadcast_by_backend(sent, what="a tensor")
        assert _same(sent, first), dtype
        for gather in (all_gather_by_backend, all_gather):
            gathered = torch.empty(48, dtype=dtype)
            gather(gathered, own.reshape(-1), group, what="a tensor")
            assert _same(gathered, torch.cat((first.reshape(-1), second.reshape(-1)))), (dtype, gather)
        received = torch.empty_like(own)
        exchange([(own, 1 - rank)], [(received, 1 - rank)], what="a tensor")
        assert _same(received, (second, first)[rank]), dtype


@pytest.mark.parametrize("direct", ["1", "0"])
@on_ranks(2)
def test_dtypes_that_gloo_does_not_know_travel_as_bytes(direct: str) -> None:
    with mock.patch.dict(os.environ, SHARDSTACK_DIRECT_EXCHANGE=direct):
        _check_dtypes()


@on_ranks(2)
def test_an_expanded_tensor_is_written_once() -> None:
    memory = torch.zeros(32)
    expanded = memory[:6].fill_(dist.get_rank() + 1.0).expand(4, 6)
    broadcast_by_backend(expanded, what="a tensor")
    assert torch.equal(expanded, torch.ones(4, 6))
    assert not memory[6:].any()  # the memory behind it


def _broadcast_into_expanded() -> str:
    tensor = torch.zeros(6).expand(4, 6) if dist.get_rank() else torch.arange(24.0).view(4, 6)
    try:
        broadcast_by_backend(tensor, what="a tensor")
    except ShardstackError as error:
        return str(error)
    return ""


def test_values_that_do_not_fit_an_expanded_tensor_are_refused() -> None:
    first, second = run_distributed(_broadcast_into_expanded, 2)
    assert first == ""
    assert second.startswith("a tensor of shape [4, 6] and strides [0, 1] has one memory for several elements")


def test_a_contiguous_tensor_is_its_own_message() -> None:
    tensor = torch.ones(3, 4)
    assert as_message(tensor) is tensor
    assert as_message(tensor.t()).data_ptr() != tensor.data_ptr()
    turned = torch.zeros(4, 3).t()
    write_back(turned, as_message(tensor))
    assert torch.equal(turned, tensor)
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert as_message(conjugate).view(torch.complex64).tolist() == [1 - 2j, 3 + 1j]
    write_back(conjugate, as_message(torch.tensor([2 + 0j, 1j])))
    assert conjugate.tolist() == [2, 1j]
