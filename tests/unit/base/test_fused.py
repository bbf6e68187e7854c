"""A function that a GPU gets compiled is called as it is where torch cannot compile, with one warning."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from core.base import fused
from core.base.fused import Fused


@pytest.fixture(autouse=True)
def compiled_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "COMPILED_ON", ["cpu"])


def test_without_a_compiler_one_warning_says_so(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor.exc import TritonMissing

    def no_compiler(function: Any, **options: Any) -> Any:
        def call(*tensors: torch.Tensor) -> Any:
            raise TritonMissing(None)

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)
    double, cpu = Fused(lambda matrix: matrix * 2), torch.device("cpu")
    assert double.compiles_on(cpu) and not double.compiles_on(torch.device("meta"))
    with pytest.warns(UserWarning, match=r"cannot compile for cpu \(Cannot find .*\): .*; install triton"):
        assert torch.equal(double(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    assert not double.compiles_on(cpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(double(torch.ones(2, 3)), torch.full((2, 3), 2.0))


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters, reason="torch.compile takes no limit"
)
def test_a_function_of_many_widths_stays_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    called_directly: list[int] = []

    def double(matrix: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            called_directly.append(matrix.shape[1])
        return matrix * 2

    function, most = Fused(double), 8  # torch's own limit
    for width in range(2, 2 + 2 * most):
        assert torch.equal(function(torch.ones(3, width)), torch.full((3, width), 2.0))
    assert called_directly == []


def test_recompile_limit_raises(monkeypatch: pytest.MonkeyPatch):
    def too_many(matrix: torch.Tensor) -> torch.Tensor:
        raise FailOnRecompileLimitHit("8 compilations")

    monkeypatch.setattr(torch, "compile", lambda function, **options: too_many)
    with pytest.raises(FailOnRecompileLimitHit):
        Fused(lambda matrix: matrix * 2)(torch.ones(2, 3))
