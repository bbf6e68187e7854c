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
from torch._inductor import metrics

from core.base import fused
from core.base.device import MEMORY_BYTES
from core.tensor_parallel import cross_entropy, vocab_parallel_cross_entropy
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
    """Returns logits, the column of each target and whether there is one, a log-sum-exp and a scale, `[n]` both."""
    draw = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, columns, generator=draw).mul_(4).to(dtype)
    column = torch.randint(0, columns, (rows, 1), generator=draw)
    here = torch.arange(rows) % 3 != 1
    whole = logits.float().logsumexp(1) + 1.0  # the other parts have logits too
    scale = torch.rand(rows, generator=draw)
    part = logits, column.masked_fill(~here.unsqueeze(1), 0), here, whole, scale
    return tuple(tensor.to(device) for tensor in part)


def _check(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    logits, column, here, whole, scale = _part(rows, columns, dtype, device)
    expected, of_targets = _log_sum_exp.function(logits.clone(), column, here)
    actual, found_targets = _log_sum_exp(logits.clone(), column, here)
    assert torch.equal(found_targets, of_targets)
    assert ((actual - expected).abs() <= (2 * columns + 4 + expected.abs()) * 2 * U).all()
    gradient, actual = logits.clone(), logits.clone()
    _gradient_of_logits.function(gradient, column, here, whole, scale)
    _gradient_of_logits(actual, column, here, whole, scale)
    rounding = 8 * U * scale[:, None] + (0 if dtype is torch.float32 else torch.finfo(dtype).eps * gradient.abs())
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


def _check_whole(
    rows: int, columns: int, dtype: torch.dtype, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the compiled loss of whole logits, in chunks of four rows, with the same loss that is not compiled."""
    monkeypatch.setattr(cross_entropy, "_COMPILED_CHUNK_ELEMENTS", 5 * columns)  # of which 4 is the power of two
    logits, column, here, _, scale = _part(rows, columns, dtype, "cpu")
    target = column.squeeze(1).masked_fill(~here, -100)
    results = []
    for places in (["cpu"], []):
        monkeypatch.setattr(fused, "COMPILED_ON", places)
        leaf = logits.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, target, smoothing)
        (loss * scale).sum().backward(retain_graph=True)
        first, leaf.grad = leaf.grad, None
        (loss * scale).sum().backward()
        assert torch.equal(first, leaf.grad) and torch.equal(leaf, logits) and not leaf.grad[~here].any()
        results.append((loss.detach(), leaf.grad.float()))
    (loss, gradient), (expected, expected_gradient) = results
    # With smoothing, a mean of as many logits is subtracted too.
    size = expected.abs() + (logits.float().abs().sum(1) * smoothing if smoothing else 0)
    assert ((loss - expected).abs() <= (2 * columns + 8 + size) * 2 * U * (1 + size)).all()
    rounding = 16 * U * scale[:, None]
    if dtype is not torch.float32:
        rounding = rounding + torch.finfo(dtype).eps * expected_gradient.abs()
    assert ((gradient - expected_gradient).abs() <= rounding + (2 * columns) * 2 * U * scale[:, None]).all()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compiled_whole_loss_computes_what_is_written(backend, smoothing, compiled_on_cpu, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for dtype in (torch.float32, torch.bfloat16):
        counters.clear()
        for rows in (10, 15, 6):  # chunks of 4 rows, and of 2 or 3
            _check_whole(rows, 64, dtype, smoothing, monkeypatch)
        assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.long
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compiled_code_reads_logits_once_in_each_direction(smoothing, compiled_on_cpu):
    rows, columns = 32, 4096
    logits, column, *_ = _part(rows, columns, torch.bfloat16, "cpu")
    torch._logging.set_logs(inductor_metrics=True)  # else the compiler does not count
    metrics.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        leaf = logits.requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, column.squeeze(1), smoothing)
        forward = metrics.num_bytes_accessed
        loss.sum().backward()
    torch._logging.set_logs()
    assert logits.nbytes < forward < 1.02 * logits.nbytes
    # Logits are read and their gradient is written; the compiler counts memory that it writes to as read too.
    assert 2 * logits.nbytes < metrics.num_bytes_accessed - forward < 3.02 * logits.nbytes


def test_gpu_part_widths_are_powers_of_two():
    with MEMORY_BYTES.replaced(80 * 2**30):  # of which 2^28 elements in bf16 are less than 1/128, and 2^29 more
        widths = {_columns(tokens, 2, on_gpu=True) for tokens in range(1, 300_000, 997)}
        assert len(widths) <= 20 and min(widths) >= 64
        sizes = {tokens: tokens * _columns(tokens, 2, on_gpu=True) for tokens in (1, 4096, 8191, 100_000)}
        assert all(80 * 2**30 / 512 < 2 * size <= 80 * 2**30 / 128 for size in sizes.values()), sizes
        assert _columns(8192, 2, on_gpu=True) == 32768 and _columns(2**28 + 1, 2, on_gpu=True) == 64
        assert _columns(8192, 2, on_gpu=False) == 128
    with MEMORY_BYTES.replaced(20 * 2**30):
        assert _columns(8192, 2, on_gpu=True) == 8192


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
        assert graphs == 6  # of two functions, for parts of two widths and for whole logits
