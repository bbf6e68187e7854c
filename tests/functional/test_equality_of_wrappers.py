"""The numbers do not change: every wrapper trains a GPT to the weights that the others, and one process, reach."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import core.optimizer.optimizer
from core.distributed import TorchFullyShardedDataParallel, finalize_model_grads
from tests.functional._runs import WRAPPERS, Curve, run_serial, run_wrapped
from tests.unit._spawn import run_distributed

ADAMW = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0}
SGD = {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.9, "weight_decay": 0.01, "clip_grad": 1.4}
STEPS = 20


def assert_bitwise(found: Curve, expected: Curve) -> None:
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    for kind in ("gradients", "weights"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        wrong = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not wrong, f"{kind} differ: {wrong}"


def assert_close(found: Curve, expected: Curve, loss: float = 1e-6, gradient: float = 1e-5) -> None:
    for step, (ours, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert abs(ours - theirs) <= loss * abs(theirs), f"loss of step {step}: {ours} against {theirs}"
    difference = sum((found.gradients[n] - g).double().square().sum() for n, g in expected.gradients.items()).sqrt()
    size = sum(g.double().square().sum() for g in expected.gradients.values()).sqrt()
    assert difference <= gradient * size, f"gradient off by {difference / size:.1e} of its norm"


def assert_worth_comparing(curve: Curve, clip_grad: float) -> None:
    """The run learned, the norm is that of every gradient once, and clipping bit in some steps and not in others."""
    norm = sum(gradient.double().square().sum() for gradient in curve.gradients.values()).sqrt()
    assert abs(curve.grad_norms[-1] - norm) < 1e-6 * norm
    assert curve.losses[-1] < 0.9 * curve.losses[0]
    assert min(curve.grad_norms) < clip_grad < max(curve.grad_norms)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_fsdp2_equals_ddp_bitwise_on_two_ranks(optimizer, tied):
    ddp = run_distributed(run_wrapped, 2, "ddp", optimizer, STEPS, tied)
    fsdp2 = run_distributed(run_wrapped, 2, "fsdp2", optimizer, STEPS, tied)
    assert_worth_comparing(ddp[0], optimizer["clip_grad"])
    assert_bitwise(ddp[1], ddp[0])
    for rank in range(2):
        assert_bitwise(fsdp2[rank], ddp[0])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_equals_the_serial_run(wrapper, tied):
    # SGD: AdamW would turn rounding noise in a tiny gradient into a step of the size of the learning rate.
    serial = run_serial(SGD, STEPS, tied)
    assert_worth_comparing(serial, SGD["clip_grad"])
    assert_close(run_distributed(run_wrapped, 2, wrapper, SGD, STEPS, tied)[0], serial)


def _run_without_no_sync() -> Curve:
    with mock.patch.object(TorchFullyShardedDataParallel, "_set_gradient_sync", lambda self, enabled: None):
        return run_wrapped("fsdp2", ADAMW, 3, True)


def _run_with_scaled_gradients() -> Curve:
    def finalize(chunks):
        finalize_model_grads(chunks)
        chunks[0].scale_gradients(1.0 + 1e-6)

    with mock.patch("tests.functional._runs.finalize_model_grads", finalize):
        return run_wrapped("fsdp2", ADAMW, 3, True)


def _run_with_a_clip_of_its_own() -> Curve:
    coefficient = core.optimizer.optimizer.clip_coefficient
    with mock.patch("core.optimizer.optimizer.clip_coefficient", lambda norm, clip: coefficient(norm * 1.0001, clip)):
        return run_wrapped("fsdp2", ADAMW, 3, True)


@pytest.mark.parametrize("faulty", [_run_without_no_sync, _run_with_scaled_gradients, _run_with_a_clip_of_its_own])
def test_the_comparison_sees_a_planted_fault(faulty):
    sound = run_distributed(run_wrapped, 2, "ddp", ADAMW, 3, True)[0]
    with pytest.raises(AssertionError):
        assert_bitwise(run_distributed(faulty, 2)[0], sound)
