"""Chains of operations that a GPU gets compiled, compiled for the CPU here: the same results, and few compilations.

Tolerances: u is half of fp32's epsilon. Compiled code adds in another order and has another exp, both within 2 u. A
sum of c positive terms differs by 2 c u of itself, and its logarithm by as much; a gradient by 8 u of a probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from core.base import fused
from core.tensor_parallel.cross_entropy import _columns, _gradient_of_logits, _log_sum_exp
from tests.unit._on_gpu import ON_GPU
from tests.unit._spawn import run_distributed
from tests.unit.tensor_parallel.test_linear_cross_entropy import _equals_the_plain_form

U = 2**-24


@pytest.fixture
def compiled_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused, "COMPILED_ON", ["cuda", "cpu"])
    for function in (_log_sum_exp, _gradient_of_logits):
        monkeypatch.setattr(function, "_compiled_function", None)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _part(rows: int, columns: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Returns logits, the column of each target and whether there is one, a log-sum-exp and a scale, `[n, 1]` both."""
    draw = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, columns, generator=draw).mul_(4).to(dtype)
    column = torch.randint(0, columns, (rows, 1), generator=draw)
    here = torch.arange(rows) % 3 != 1
    whole = logits.float().logsumexp(1, keepdim=True) + 1.0  # the other parts have logits too
    scale = torch.rand(rows, 1, generator=draw)
    part = logits, column.masked_fill(~here.unsqueeze(1), 0), here, whole, scale
    return tuple(tensor.to(device) for tensor in part)


def _check(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    logits, column, here, whole, scale = _part(rows, columns, dtype, device)
    expected, of_targets = _log_sum_exp.function(logits.clone(), column, here)
    actual, found_targets = _log_sum_exp(logits.clone(), column, here)
    assert torch.equal(found_targets, of_targets)
    assert ((actual - expected).abs() <= (2 * columns + 4 + expected.abs()) * 2 * U).all()
    gradient = _gradient_of_logits.function(logits.clone(), column, here, whole, scale)
    actual = _gradient_of_logits(logits.clone(), column, here, whole, scale)
    assert actual.dtype is dtype and actual.shape == gradient.shape
    rounding = 8 * U * scale + (0 if dtype is torch.float32 else torch.finfo(dtype).eps * gradient.abs().float())
    assert ((actual.float() - gradient.float()).abs() <= rounding).all()


@pytest.mark.parametrize(
    ("widths", "dtype", "device", "backend"),
    [
        ([64], torch.bfloat16, "cpu", "aot_eager"),  # graphs as on a GPU, without the seconds of a C++ compiler
        *(
            pytest.param(widths, dtype, device, "inductor", marks=mark)
            for device, mark in (("cpu", pytest.mark.long), ("cuda", ON_GPU))
            for widths, dtype in product([[64], [64, 24]], [torch.float32, torch.bfloat16])
        ),
    ],
)
def test_compiled_code_computes_what_is_written(widths, dtype, device, backend, compiled_on_cpu, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for rows in (6, 9, 5):
        for columns in widths:  # of whole parts, and of the last
            _check(rows, columns, dtype, device)
    # Once each for a width, with any number of tokens.
    assert counters["stats"]["unique_graphs"] == 2 * len(widths)


def test_gpu_part_widths_are_powers_of_two():
    widths = {_columns(tokens, on_gpu=True) for tokens in range(1, 300_000, 997)}
    assert len(widths) <= 20 and min(widths) >= 64
    assert all(width * tokens <= 2**26 for tokens in (1, 4096, 8191, 100_000) for width in [_columns(tokens, True)])
    assert _columns(8192, on_gpu=True) == 8192 and _columns(2**26 + 1, on_gpu=True) == 64


def _equals_the_plain_form_compiled(*case: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "COMPILED_ON", ["cpu"])
        counters.clear()
        _equals_the_plain_form(*case)
    return counters["stats"]["unique_graphs"]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "chunk"), [(1, 32), (2, 16)])
def test_compiled_loss_equals_whole_logits(ranks, chunk):
    for graphs in run_distributed(_equals_the_plain_form_compiled, ranks, torch.bfloat16, chunk, ranks == 2):
        assert graphs == 4  # of two functions, for parts of two widths
