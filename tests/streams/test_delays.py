"""Delays in lanes, or before computation, change no bit: on a GPU real streams take the place of simulated ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from core.base.parameters import local_part
from core.comm import collectives
from core.comm.lane import CommLane, Handle
from core.distributed.engine.gradients import BucketReduction
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._lane import lanes_that
from tests.unit._on_gpu import ON_GPU, one_rank_on_a_gpu
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import Block, batches, build, loss_of, toy

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
STEPS = 4
MORE_THAN_THERE_IS = 2**50
"""Bytes."""


@dataclass(frozen=True)
class Delayed:
    """A wrapper, what is delayed, and a step that fails."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    place: str = ""
    fails_in: int | None = None
    exceeds: str = ""
    """What fails in that step: ``reduction``, the third, as if it had no memory; ``backward``, which asks the device's
    allocator for more than there is."""


def _delay(device: str) -> None:
    if device == "cuda":
        torch.cuda._sleep(5_000_000)
    else:
        time.sleep(0.002)


@contextmanager
def _delayed(device: str, place: str) -> Iterator[None]:
    """Delays each task of a lane, or each product of the model."""
    if place == "computation":
        linear = nn.functional.linear
        with mock.patch.object(nn.functional, "linear", lambda *args: (_delay(device), linear(*args))[1]):
            yield
        return

    def submit_late(lane: CommLane, run: Callable[[], None]) -> Handle:
        return lane.submit(lambda: (_delay(device), run())[1])

    with lanes_that(submit_late) if place else nullcontext():
        yield


@contextmanager
def _failing_once(model: nn.Module, device: str, exceeds: str) -> Iterator[None]:
    reduce, calls = BucketReduction.reduce, list[int]()

    def fail_third(*args: Any) -> None:
        calls.append(1)
        reduce(*args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("planted")

    def exceed_memory(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8, device=device))

    if exceeds == "reduction":
        with mock.patch.object(BucketReduction, "reduce", fail_third):
            yield
        return
    hook = next(module for module in model.modules() if isinstance(module, Block)).register_forward_hook(exceed_memory)
    try:
        yield
    finally:
        hook.remove()


def _trained(device: str, case: Delayed) -> list[torch.Tensor]:
    with collectives.SKIPS_GROUPS_OF_ONE.replaced(False), _delayed(device, case.place):
        model = build(case.kind, toy(tied=False).to(device), **case.fields)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, clip_grad=0.1), [model])
        for step in range(STEPS):
            if step == case.fails_in:
                # The allocator of a CPU raises a RuntimeError, of which the GPU's is a kind.
                planned = torch.OutOfMemoryError if case.exceeds == "reduction" or device == "cuda" else RuntimeError
                with _failing_once(model, device, case.exceeds), pytest.raises(planned, match=r"planted|memory"):
                    _backward(model, device, step)
            _backward(model, device, step)
            optimizer.step()
        model.engine.parameters.settle()
    return [local_part(p).cpu().clone() for group in optimizer.param_groups for p in group["params"]]


def _backward(model: Any, device: str, step: int) -> None:
    model.zero_grad_buffer()
    loss_of(model, batches(step)[0].to(device)).backward()
    model.finish_grad_sync()


def _has_the_same_bits(device: str, case: Delayed) -> None:
    expected, found = _trained(device, Delayed(case.kind, case.fields)), _trained(device, case)
    assert all(map(torch.equal, expected, found))


def _on(device: str, case: Delayed) -> None:
    if device == "cpu":
        run_distributed(_has_the_same_bits, 2, device, case)
        return
    with one_rank_on_a_gpu():
        _has_the_same_bits(device, case)


LOW = {"param_dtype": torch.bfloat16}  # in one dtype a rank that is alone gathers nothing
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("zero1_overlap", {}),
    ("zero2_overlap", {}),
    ("zero3", LOW),
    ("zero3", LOW | {"cpu_offload": True}),
]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), DEVICES[1]])
@pytest.mark.parametrize("place", ["lanes", "computation"])
@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_delays_change_no_bit(device: str, place: str, kind: str, fields: dict[str, Any]) -> None:
    _on(device, Delayed(kind, fields, place))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exceeds", ["reduction", "backward"])
@pytest.mark.parametrize(("kind", "fields"), KINDS[1:3])
def test_a_step_that_runs_out_of_memory_is_dropped(
    device: str, exceeds: str, kind: str, fields: dict[str, Any]
) -> None:
    _on(device, Delayed(kind, fields, fails_in=1, exceeds=exceeds))
