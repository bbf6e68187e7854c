"""Patches of what changed, applied by a receiver, against the full stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import ConfigError, ShardstackError
from core.weights import PatchStream, WeightStream
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.weights._models import BUCKET, CONFIGS, gpt, optimizer_of, start, train, wrapped


def _stream(model: nn.Module, **more: Any) -> WeightStream:
    return WeightStream(model, dtype=torch.bfloat16, receivers=[0], bucket_bytes=BUCKET, **more)


def _trains(kind: str, tp: int, instances: int, steps: int) -> list[str]:
    """Returns what differs on rank 0 between its copy, to which it applies patches, and the weights."""
    start(tp, instances)
    fields = {"hidden_size": 32, "ffn_hidden_size": 64} if tp == 1 else {}
    model = wrapped(kind, gpt(tensor_model_parallel_size=tp, tied=False, **fields), instances=instances)
    optimizer, problems = optimizer_of(model, lr=3e-6), []
    stream = _stream(model)
    patches = PatchStream(stream)
    patches.restart()
    copy = {name: value.clone() for name, value in stream}
    sent, full = 0, sum(value.numel() * value.element_size() for value in copy.values())
    for step in range(steps):
        train(model, optimizer, step)
        for bucket in patches.changes():
            for patch in bucket:
                patch.apply(copy[patch.name])
                sent += patch.indices.numel() * (patch.indices.element_size() + patch.values.element_size())
        patches.acknowledge()
        for name, value in stream:
            if not value.is_meta and not torch.equal(copy[name], value):
                problems.append(f"step {step}: {name}")
    if dist.get_rank() == 0 and not 0 < sent <= 0.05 * steps * full:
        problems.append(f"{sent} bytes were sent, of {steps * full}")
    return problems


_LONG = [pytest.param(kind, 20, marks=pytest.mark.long) for kind in CONFIGS if kind != "fsdp2"]


@pytest.mark.parametrize(
    ("kind", "steps"), [("fsdp2", 20), *((kind, 4) for kind in CONFIGS if kind != "fsdp2"), *_LONG]
)
def test_patches_give_the_bits_of_the_weights(kind: str, steps: int):
    assert run_distributed(_trains, 2, kind, 1, 1, steps) == [[], []]


@pytest.mark.parametrize(("kind", "tp", "instances"), [("zero3", 1, 2), ("fsdp2", 2, 1), ("ddp", 2, 1)])
def test_patches_of_hybrid_and_tensor_parallelism(kind: str, tp: int, instances: int):
    assert run_distributed(_trains, 4, kind, tp, instances, 3) == [[]] * 4


@on_ranks(2)
def test_a_patch_that_was_not_acknowledged_is_in_the_next():
    start()
    model = wrapped("zero3", gpt())
    optimizer, stream = optimizer_of(model), _stream(model)
    patches = PatchStream(stream)
    with pytest.raises(ShardstackError, match="before a full stream"):
        list(patches.changes())
    patches.restart()
    copy = {name: value.clone() for name, value in stream}
    for step in range(2):
        train(model, optimizer, step)
        lost = step == 0
        for bucket in patches.changes():
            for patch in () if lost else bucket:
                patch.apply(copy[patch.name])
    assert [name for name, value in stream if not value.is_meta and not torch.equal(copy[name], value)] == []


def test_patches_of_merged_adapters_are_refused():
    with pytest.raises(ConfigError, match="merges LoRA adapters"):
        PatchStream(WeightStream(gpt(lora=True)))
    assert PatchStream(WeightStream(gpt(lora=True), adapters="only"))


def test_bits_decide_what_changed():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.zero_()
    stream = WeightStream(model, "module")
    patches = PatchStream(stream)
    patches.restart()
    with torch.no_grad():
        model.weight[0, 1] = -0.0
        model.weight[1, 0] = float("nan")
    assert [patch.indices.tolist() for bucket in patches.changes() for patch in bucket] == [[1, 2]]
    patches.acknowledge()
    assert [bucket for bucket in patches.changes() if bucket] == []  # a NaN equals itself
