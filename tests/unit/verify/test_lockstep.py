"""Every wrapper is equal on what it should be equal on, and a difference is named by its step and parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ConfigError, WrapError
from core.base.module_protocol import unwrap_model
from core.distributed import _BaseDataParallel
from core.distributed.flat.flat_engine import FlatGradients
from core.distributed.fsdp2.fsdp2_engine import TorchGradients
from core.optimizer.distrib_optimizer import DistributedOptimizer
from core.verify import WRAPPERS, FirstDifference, Options, Verdict, load_model_under_test, names_of_wrappers, verify
from tests.unit._spawn import RankFailure, run_distributed

MODELS = "tests.unit.verify._models"


def _verified(function: str, options: Options, wrappers: list[str] | None = None, fault: str = "") -> list[Verdict]:
    tested = load_model_under_test(f"{MODELS}:{function}")
    with PLANTED[fault]() if fault else mock.MagicMock():
        return list(verify(tested, options, wrappers))


# ---- what is planted


@contextmanager
def _one_gradient_doubled_in_the_third_step() -> Iterator[None]:
    """Doubles one gradient of FSDP2, on every rank."""
    finish, calls = TorchGradients.finish, itertools.count()

    def planted(self: TorchGradients) -> None:
        finish(self)
        if next(calls) == 2:
            dict(self.model.named_parameters())["layers.0.0.bias"].grad *= 2  # type: ignore[operator]

    with mock.patch.object(TorchGradients, "finish", planted):
        yield


@contextmanager
def _one_weight_stale_on_the_second_rank() -> Iterator[None]:
    """Undoes the second update of one weight of ZeRO-1, on rank 1."""
    publish, calls = DistributedOptimizer._publish_parameters, itertools.count()

    def planted(self: DistributedOptimizer, *weights: Any) -> None:
        weight = dict(unwrap_model(self._wrappers[0]).named_parameters())["last.bias"]
        before = weight.detach().clone()
        publish(self, *weights)
        if next(calls) == 1 and dist.get_rank() == 1:
            with torch.no_grad():
                weight.copy_(before)

    with mock.patch.object(DistributedOptimizer, "_publish_parameters", planted):
        yield


@contextmanager
def _a_sum_in_place_of_a_mean() -> Iterator[None]:
    """Doubles gradients in every wrapper, so that only one process shows it."""
    finish = _BaseDataParallel.finish_grad_sync

    def planted(self: _BaseDataParallel, force_all_reduce: bool = False) -> None:
        finish(self, force_all_reduce)
        self.scale_gradients(2.0)

    with mock.patch.object(_BaseDataParallel, "finish_grad_sync", planted):
        yield


@contextmanager
def _a_gradient_that_is_not_finite() -> Iterator[None]:
    finish = FlatGradients.finish

    def planted(self: FlatGradients) -> None:
        finish(self)
        if self.plan.strategy == "optim":
            for gradient in self.tensors():
                gradient.mul_(math.nan)

    with mock.patch.object(FlatGradients, "finish", planted):
        yield


@contextmanager
def _a_wrapper_that_refuses() -> Iterator[None]:
    with mock.patch("core.verify.model_under_test.wrap_model", side_effect=WrapError("not\nthis model")):
        yield


PLANTED: dict[str, Callable] = {
    "doubled": _one_gradient_doubled_in_the_third_step,
    "stale": _one_weight_stale_on_the_second_rank,
    "sum": _a_sum_in_place_of_a_mean,
    "refused": _a_wrapper_that_refuses,
    "nan": _a_gradient_that_is_not_finite,
}


# ---- equal


def test_every_wrapper_is_equal_on_two_ranks():
    first, second = run_distributed(_verified, 2, "build", Options(steps=2))
    assert first == second
    assert names_of_wrappers(2) == [name for name in WRAPPERS if not name.startswith("hybrid")]
    assert [verdict.wrapper for verdict in first] == names_of_wrappers(2)
    assert [str(verdict) for verdict in first if not verdict.is_equal or verdict.inapplicable] == []
    exact = {verdict.wrapper for verdict in first if verdict.tolerance == 0.0}
    assert exact == {n for n in names_of_wrappers(2) if n != "ddp" and "every micro-batch" not in n}
    assert {verdict.reference for verdict in first} == {"one process", "ddp"}


@pytest.mark.parametrize("function", ["Tokens", "build_in_bf16"])
def test_other_models_are_equal(function: str):
    wrappers = ["ddp", "zero2, overlapped", "fsdp2"]
    (verdicts, _) = run_distributed(_verified, 2, function, Options(steps=2, optimizer="adam", lr=0.01), wrappers)
    assert [str(verdict) for verdict in verdicts if not verdict.is_equal] == []


@pytest.mark.long
def test_every_wrapper_is_equal_on_four_ranks():
    verdicts = run_distributed(_verified, 4, "build", Options(steps=4))[0]
    assert [verdict.wrapper for verdict in verdicts] == list(WRAPPERS)
    assert [str(verdict) for verdict in verdicts if not verdict.is_equal] == []


# ---- not equal


@pytest.mark.parametrize(
    ("fault", "wrappers", "expected"),
    [
        ("doubled", ["zero1", "fsdp2"], [None, FirstDifference(2, "gradient", "layers.0.0.bias", 1.0, 0)]),
        ("stale", ["zero1", "fsdp2"], [FirstDifference(1, "weight", "last.bias", math.inf, 1), None]),
        ("sum", ["ddp", "fsdp2"], [FirstDifference(0, "gradient", "first.weight", 1.0, 0), None]),
        ("nan", ["zero1"], [FirstDifference(0, "gradient", "first.weight", math.nan, 0)]),
    ],
)
def test_a_planted_difference_is_named(fault: str, wrappers: list[str], expected: list[FirstDifference | None]):
    ranks = run_distributed(_verified, 2, "build", Options(steps=3), wrappers, fault)
    for verdicts in ranks:
        for verdict, parting in zip(verdicts, expected, strict=True):
            assert verdict.is_equal == (parting is None), verdict
            if parting is not None:
                found = verdict.parting
                names = (found.step, found.what, found.parameter, found.rank)
                assert names == (parting.step, parting.what, parting.parameter, parting.rank)
                if math.isnan(parting.off):
                    assert str(found) == "parts at step 0: the gradient of first.weight is not finite (rank 0)"
                elif math.isfinite(parting.off):
                    assert found.off == pytest.approx(parting.off, rel=0.05)


def test_inapplicable_settings_and_refusals_are_distinguished():
    (verdicts, _) = run_distributed(_verified, 2, "Tokens", Options(steps=1), ["fsdp2, recomputed"])
    assert verdicts[0].is_equal and "no unit has more than one layer" in verdicts[0].inapplicable
    assert str(verdicts[0]).startswith("fsdp2, recomputed         not run: ")
    (verdicts, _) = run_distributed(_verified, 2, "build", Options(steps=1), ["zero2"], "refused")
    assert not verdicts[0].is_equal and str(verdicts[0]) == "zero2                     cannot run: not this model"


def test_a_hook_of_the_user_acts_under_every_wrapper():
    for verdicts in run_distributed(_verified, 2, "build_with_a_hook", Options(steps=2), ["zero1", "fsdp2"]):
        assert [str(verdict) for verdict in verdicts if not verdict.is_equal] == []


def test_running_statistics_of_a_batch_are_compared():
    ranks = run_distributed(_verified, 2, "build_with_statistics", Options(steps=2), ["ddp", "zero1", "fsdp2"])
    ddp, zero1, fsdp2 = ranks[0]
    assert (ddp.parting.step, ddp.parting.what, ddp.parting.parameter) == (0, "buffer", "1.running_mean")
    assert zero1.is_equal and fsdp2.is_equal, (zero1, fsdp2)


def test_an_unknown_wrapper_and_a_length_of_nothing_are_refused():
    with pytest.raises(RankFailure, match=r"'zero4' is unknown on 2 ranks; did you mean 'zero.'. it takes one of ddp"):
        run_distributed(_verified, 2, "build", Options(), ["zero4"])
    with pytest.raises(ConfigError, match="steps is 0; it takes a positive number"):
        Options(steps=0)
