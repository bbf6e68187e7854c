"""Products of experts, grouped in one call and looped, on either device: against a product in double precision."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.transformer.moe.experts import grouped_matmul, looped_matmul
from tests.unit._on_gpu import ON_GPU
from tests.unit.transformer.moe._layers import gradients, layer_of, permutation_of

EXPERTS, INPUTS, OUTPUTS = 4, 64, 48
ENDS = {
    "rows for every expert": ([9, 17, 30, 37], 37),
    "an expert without rows": ([9, 9, 30, 37], 37),
    "the first and the last without rows": ([0, 9, 37, 37], 37),
    "no rows": ([0, 0, 0, 0], 0),
    "dropped rows": ([9, 9, 20, 28], 37),
    "dropped rows alone": ([0, 0, 0, 0], 37),
}
"""Ends of the rows of each expert, and the number of rows. `make gpu-first` runs splits in which no expert has a row
in a process of their own: a GPU's kernel that fails there would take all later tests of the process with it."""
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
DTYPES = [torch.float32, torch.bfloat16]


def _tensors(num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Makes rows, the experts' matrices, and a gradient of the outputs."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(num_rows, INPUTS), (EXPERTS, OUTPUTS, INPUTS), (num_rows, OUTPUTS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _in_double(rows: Tensor, weight: Tensor, grad: Tensor, ends: list[int]) -> list[Tensor]:
    """Returns the outputs, and the gradients of rows and matrices. Dropped rows have zeros."""
    rows, weight, grad = rows.double(), weight.double(), grad.double()
    output, of_rows, of_weight = torch.zeros_like(grad), torch.zeros_like(rows), torch.zeros_like(weight)
    for expert, (begin, end) in enumerate(pairwise([0, *ends])):
        output[begin:end] = rows[begin:end] @ weight[expert].t()
        of_rows[begin:end] = grad[begin:end] @ weight[expert]
        of_weight[expert] = grad[begin:end].t() @ rows[begin:end]
    return [output, of_rows, of_weight]


def _leave_nan_in_memory(like: list[Tensor]) -> None:
    """Frees blocks of NaN, which the allocator hands out next for tensors of these sizes."""
    blocks = [torch.full_like(tensor, torch.nan) for tensor in like for _ in range(8)]
    del blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", ENDS, ids=lambda split: split.replace(" ", "-"))
@pytest.mark.parametrize("multiply", [grouped_matmul, looped_matmul])
def test_products_equal_those_in_double(device: str, dtype: torch.dtype, split: str, multiply: Any):
    """A sum of n products is off by at most n roundings of fp32, and few of the result's dtype, of the sum of their
    absolute values: by nothing where no row is added."""
    ends, num_rows = ENDS[split]
    rows, weight, grad = _tensors(num_rows, dtype)
    expected = _in_double(rows, weight, grad, ends)
    sizes = _in_double(rows.abs(), weight.abs(), grad.abs(), ends)
    rows[ends[-1] :] = grad[ends[-1] :] = torch.nan
    rows, weight, grad = (tensor.to(device) for tensor in (rows, weight, grad))
    permutation = permutation_of(ends, num_rows, has_dropped=ends[-1] < num_rows, device=device)
    leaves = [tensor.requires_grad_() for tensor in (rows, weight)]
    with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as kernel:
        _leave_nan_in_memory([grad, rows, weight])
        output = multiply(*leaves, permutation)
        _leave_nan_in_memory([grad, rows, weight])
        output.backward(grad)
    assert kernel.call_count == (multiply is grouped_matmul)
    names, additions = ("output", "gradient of rows", "gradient of matrices"), (INPUTS, OUTPUTS, num_rows)
    for name, actual, value, size, n in zip(
        names, [output, *(leaf.grad for leaf in leaves)], expected, sizes, additions, strict=True
    ):
        assert actual.dtype == dtype and actual.device.type == device and actual.shape == value.shape, name
        limit = (2 * torch.finfo(dtype).eps + n * torch.finfo(torch.float32).eps) * size
        off = (actual.detach().cpu().double() - value).abs()
        assert (off <= limit).all(), f"{name} is off by up to {(off - limit).max()} more than its rounding"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expanded_gradient_is_that_of_equal_elements(device: str, dtype: torch.dtype):
    ends, num_rows = ENDS["an expert without rows"]
    rows, weight, _ = (tensor.to(device) for tensor in _tensors(num_rows, dtype))
    permutation, results = permutation_of(ends, num_rows, has_dropped=False, device=device), []
    expanded = torch.full((1, 1), 0.5, dtype=dtype, device=device).expand(num_rows, OUTPUTS)
    for grad in (expanded, expanded.contiguous()):
        leaves = [tensor.clone().requires_grad_() for tensor in (rows, weight)]
        grouped_matmul(*leaves, permutation).backward(grad)
        results.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *results))


ROUTED: dict[str, dict[str, Any]] = {
    "every token": {},
    "dropped tokens": {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    "one expert": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routed", ROUTED)
def test_grouped_layer_equals_the_looped_one(device: str, dtype: torch.dtype, routed: str):
    """Routing has the same bits in both. Sums of up to 96 products, in fp32, and what is rounded after them differ."""
    generator, results = torch.Generator().manual_seed(4), []
    x, grad = (torch.randn(23, 2, 32, generator=generator).to(device, dtype) for _ in range(2))
    x = x.abs() if routed == "one expert" else x
    for grouped in (False, True):
        sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "params_dtype": dtype, "init_method_std": 0.2}
        layer = layer_of(moe_grouped_gemm=grouped, **sizes, **ROUTED[routed]).to(device)
        if routed == "one expert":  # the others have no rows
            with torch.no_grad():
                layer.router.weight.zero_()[2] = (
                    0.05  # a small margin, so that the gradient of logits is not rounding alone
                )
        leaf = x.clone().requires_grad_()
        with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as kernel:
            output = layer(leaf)
            output.backward(grad)
        assert kernel.call_count == (2 if grouped else 0)
        assert leaf.grad is not None
        results.append({"output": output.detach(), "x": leaf.grad, **gradients(layer)})
        counts = layer.router.step_sums[:4].tolist()
        assert routed != "one expert" or counts == [0, 0, 46, 0], counts
    looped, grouped = results
    for name, expected in looped.items():
        actual, tolerance = grouped[name], 4 * torch.finfo(dtype).eps + 32 * torch.finfo(torch.float32).eps
        assert actual.isfinite().all(), name
        off = (actual.double() - expected.double()).norm()
        assert off <= tolerance * expected.double().norm(), name
