"""Flat ranges of tensors: their boxes, their views and what is gathered of them."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core.base.errors import CheckpointError
from core.dist_checkpointing import flat_range_view, load, save
from core.dist_checkpointing.global_view import boxes_of_range
from tests.unit._spawn import run_distributed
from tests.unit._whole import whole as gathered


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3), (2, 2, 2, 3)], ids=str
)
def test_boxes_hold_the_run_in_its_order(shape):
    elements = torch.arange(math.prod(shape)).view(shape)
    for start in range(elements.numel() + 1):
        for end in range(start, elements.numel() + 1):
            boxes = boxes_of_range(shape, start, end)
            cut = [elements[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in boxes]
            assert [int(e) for piece in cut for e in piece.flatten()] == list(range(start, end))
            assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_the_view_is_the_whole_tensor_and_shares_storage():
    param, values = torch.nn.Parameter(torch.zeros(3, 4)), torch.arange(7.0)
    view = flat_range_view(param, values, 3)
    assert isinstance(view, torch.Tensor) and view.shape == (3, 4) and view.dtype == torch.float32
    assert view.detach().held.data_ptr() == values.data_ptr()
    assert repr(view) == "FlatRange(shape=[3, 4], dtype=torch.float32, 7 elements here)"
    with pytest.raises(CheckpointError, match=r"aten.add.Tensor was called on a tensor .* flat range"):
        view + 1
    for wrong, start in [(torch.zeros(7), 6), (torch.zeros(7), -1), (torch.zeros(2, 2), 0), (torch.zeros(6)[::2], 0)]:
        with pytest.raises(CheckpointError, match=r"no run of a parameter of shape \[3, 4\]"):
            flat_range_view(param, wrong, start)


def _gathered(dtype: torch.dtype) -> None:
    """Three ranks: the first two have a part each, and the last is a replica of the second."""
    values = torch.tensor([[4e4, -0.0, 0.1], [float("nan"), float("inf"), -1.0]]).to(dtype)
    start, end = [(0, 2), (2, 6), (2, 6)][dist.get_rank()]
    for shape in ((2, 3), (6,), (1, 6, 1)):
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        found = gathered(flat_range_view(param, values.view(-1)[start:end].clone(), start))
        assert found.shape == shape and torch.equal(
            found.view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)
        )
    empty, scalar = (torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((0, 3), ()))
    assert gathered(flat_range_view(empty, torch.zeros(0, dtype=dtype), 0)).shape == (0, 3)
    kept = torch.full((int(end > 2),), 0.1, dtype=dtype)
    assert torch.equal(gathered(flat_range_view(scalar, kept, 0)), torch.tensor(0.1, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_range_is_gathered_bit_by_bit_with_replicas(dtype):
    run_distributed(_gathered, 3, dtype)


def test_a_tensor_without_elements_keeps_its_name(tmp_path: Path):
    param = torch.nn.Parameter(torch.zeros(0, 3))
    save({"none": flat_range_view(param, torch.zeros(0), 0), "one": torch.ones(1)}, tmp_path / "it", metadata={})
    load({"none": torch.zeros(0, 3), "one": torch.zeros(1)}, tmp_path / "it")
