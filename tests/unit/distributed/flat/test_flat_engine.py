"""Gradients on flat buffers: they are the serial ones however they arrive, and no gather holds them up."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from core.base.errors import ShardstackError, WrapError
from core.comm.lane import comm_lane
from core.distributed import finalize_model_grads
from core.distributed.flat.bucket import Bucket
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import BUFFERED, Stack, accumulate, batches, build, gradients, loss_of, oracle, toy

LONGEST_S = 60.0
"""A reduction that is held up fails the test after this time; one that is not takes milliseconds."""


@on_ranks(2)
def test_a_gather_that_is_under_way_holds_up_no_reduction() -> None:
    model = build("zero3", Stack(layers=4), unit_classes=(nn.Linear,), reshard_after_forward=False)
    loss = model(torch.ones(2, 6)).sum()
    gate, was_opened = threading.Event(), list[bool]()
    gather = comm_lane(torch.device("cpu")).submit(lambda: was_opened.append(gate.wait(LONGEST_S)))
    loss.backward()
    model.finish_grad_sync()
    gate.set()
    gather.wait()
    assert was_opened == [True]


OVERLAPPING = [kind for kind in BUFFERED if kind.endswith("overlap")]


@on_ranks(2)
def test_a_bucket_sent_before_its_gradients_would_be_noticed() -> None:
    model = build("ddp_overlap", toy())
    with (
        mock.patch.object(Bucket, "is_complete", True),
        pytest.raises(ShardstackError, match="a backward added gradients after"),
    ):
        accumulate(model)
        model.finish_grad_sync()


def _add_here(weight: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    weight.main_grad.add_(gradient)
    weight.grad_added_to_main_grad = True
    return torch.full_like(gradient, float("nan"))  # what the wrapper must not add


@pytest.mark.parametrize("kind", [*BUFFERED, "zero3"])
@on_ranks(2)
def test_a_gradient_that_a_layer_has_added_itself_is_respected(kind: str) -> None:
    config = SimpleNamespace(gradient_accumulation_fusion=True)
    model = build(kind, toy(tied=False), config=config)
    weight = model.module.head.weight
    for _ in range(2):
        model.zero_grad_buffer()
        assert kind == "zero3" or not weight.main_grad.any()  # which has the memory once the unit is gathered
        hook = weight.register_hook(lambda gradient: _add_here(weight, gradient))
        accumulate(model)
        hook.remove()
        finalize_model_grads([model])
        assert_same(gradients(model), oracle(tied=False))
        assert not weight.grad_added_to_main_grad


@pytest.mark.parametrize("kind", OVERLAPPING)
@on_ranks(2)
def test_a_gradient_after_its_bucket_is_an_error_naming_no_sync(kind: str) -> None:
    model = build(kind, toy())
    accumulate(model)
    loss_of(model, batches(0)[0]).backward()
    with pytest.raises(ShardstackError, match=r"a backward added gradients after.*, the first of parameter .*no_sync"):
        model.finish_grad_sync()
    model.zero_grad_buffer()
    accumulate(model)
    model.finish_grad_sync()
    assert_same(gradients(model), oracle())


@on_ranks(1)
def test_an_unreferenced_wrapper_is_freed_with_its_model() -> None:
    for kind in BUFFERED:
        model = build(kind, toy())
        accumulate(model)
        model.finish_grad_sync()
        left = [weakref.ref(model), *(weakref.ref(parameter) for parameter in model.parameters())]
        del model
        gc.collect()
        assert not any(reference() is not None for reference in left), kind


@on_ranks(1)
def test_a_backward_after_the_wrapper_has_gone_is_an_error() -> None:
    inner = build("ddp", toy(), config=SimpleNamespace(gradient_accumulation_fusion=False)).module
    gc.collect()
    with pytest.raises(WrapError, match="no longer exists"):
        loss_of(inner, batches(0)[0]).backward()
