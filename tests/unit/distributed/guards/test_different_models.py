"""Every rank names the first difference between the ranks' models, and each rank's value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import WrapError
from tests.unit._ranks import fake_world
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import UNITS, Block, build, toy


def _message(kind: str, module: nn.Module, **kwargs: Any) -> str:
    with pytest.raises(WrapError) as caught:
        build(kind, module, **kwargs)
    return str(caught.value)


def _wraps_different_models(kind: str) -> list[str]:
    is_second = dist.get_rank() == 1
    build(kind, toy())  # the same on both
    messages = []

    wider = toy()
    if is_second:
        wider.blocks[1] = Block(7, inner=6)
    messages.append(_message(kind, wider))

    thawed = toy()
    thawed.frozen.requires_grad_(is_second)
    messages.append(_message(kind, thawed))

    shorter = toy()
    if is_second:
        del shorter.blocks[1]
    messages.append(_message(kind, shorter))

    messages.append(_message(kind, toy(tied=not is_second)))
    messages.append(_message(kind, toy().double() if is_second else toy()))
    messages.append(_message(kind, toy(), grad_reduce_in_fp32=is_second))
    messages.append(_message(kind, toy(), config=SimpleNamespace(calculate_per_token_loss=is_second)))
    return messages


@pytest.mark.parametrize("kind", ["ddp", "zero1", "fsdp2"])
def test_the_first_difference_is_named_on_every_rank(kind):
    first, second = run_distributed(_wraps_different_models, 2, kind)
    assert first == second
    unit = ", unit blocks.1" if kind == "fsdp2" else ""
    for message, parts in zip(
        first,
        [
            (f"first in parameter blocks.1.up.weight: rank 0: [5, 7] float32{unit}; rank 1: [6, 7]", "Build"),
            ("first in parameter frozen: rank 0: [3] float32, frozen", "rank 1: [3] float32"),
            ("first in parameter blocks.1.gain: rank 0: [1] float32", "rank 1: absent"),
            ("wrap different models, first in parameter ",),
            ("first in parameter frozen: rank 0: [3] float32", "rank 1: [3] float64"),
            ("first in the setting grad_reduce_in_fp32: rank 0: False; rank 1: True.",),
            ("first in the model's setting calculate_per_token_loss: rank 0: False; rank 1: True.",),
        ],
        strict=True,
    ):
        for part in parts:
            assert part in message, message


@on_ranks(2)
def test_units_must_agree() -> None:
    message = _message("fsdp2", toy(tied=False), unit_classes=UNITS if dist.get_rank() else (Block,))
    assert "parameter embedding.weight: rank 0: [11, 7] float32, unit root; rank 1:" in message
    assert "unit embedding" in message


def test_a_simulated_group_always_agrees():
    with fake_world(rank=3, world_size=8):
        build("ddp", toy())


@on_ranks(2)
def test_values_and_checks_of_a_rank_may_differ() -> None:
    build("fsdp2", toy(), check_for_nan_in_grad=dist.get_rank() == 1)
    torch.manual_seed(dist.get_rank())
    build("fsdp2", toy(seed=dist.get_rank()))  # values are made equal
