"""Weights from trainers into the shards of receivers. Trainers are the first ranks of a test, receivers the rest."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from core.base.errors import ConfigError, WeightsError
from core.dist_checkpointing import model_state_dict
from core.dist_checkpointing.gathering import move
from core.distributed import wrap_model
from core.weights import WeightStream, receive_shards, send_shards
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.weights._live_bytes import LiveBytes
from tests.unit.weights._models import BUCKET, CONFIGS, gpt, optimizer_of, start, train, wrapped

RECEIVERS = 2


def _targets(stream: WeightStream, placement: Any, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Returns tensors of the stream's shapes over the receivers, with wrong values."""
    targets: dict[str, torch.Tensor] = {}
    for meta in stream.metadata():
        whole = torch.full(meta.shape, -1.0, dtype=meta.dtype)
        targets[meta.name] = (
            whole if placement is None or not meta.shape else distribute_tensor(whole, mesh, placement)
        )
    return targets


def _moves(kind: str, tp: int, trainers: int, placement: Any, dtype: torch.dtype) -> list[str]:
    """Returns the names of tensors whose part on this rank is not that of the whole tensor."""
    start(tp)
    groups = [dist.new_group(list(range(trainers))), dist.new_group(list(range(trainers, trainers + RECEIVERS)))]
    receives = dist.get_rank() >= trainers
    # A model of one rank's group on receivers gives names and shapes alone.
    model = wrapped(kind, gpt(tensor_model_parallel_size=tp), group=groups[receives] if tp == 1 else None)
    stream = WeightStream(model, "module", dtype=dtype, bucket_bytes=BUCKET, process_group=groups[receives])
    if not receives:
        train(model, optimizer_of(model), 0)
        with mock.patch.object(WeightStream, "_gather", side_effect=AssertionError("a gather")):
            send_shards(stream, dist.group.WORLD)
        expected = dict(stream)
    else:
        expected = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in stream.metadata()}
        targets = _targets(stream, placement, DeviceMesh.from_group(groups[1], "cpu"))
        receive_shards(targets, dist.group.WORLD)
    wrong = []
    for name, whole in expected.items():
        whole = whole.contiguous()
        dist.broadcast(whole, 0)
        if receives:
            target = targets[name]
            full = target.full_tensor() if hasattr(target, "full_tensor") else target
            wrong += [] if torch.equal(full, whole) else [name]
    return wrong


PLACEMENTS = {"rows": [Shard(0)], "columns": [Shard(-1)], "replicas": [Replicate()], "whole": None}
CASES = [(kind, 1, 2, placement) for kind in CONFIGS for placement in PLACEMENTS]


@pytest.mark.parametrize(
    ("kind", "tp", "trainers", "placement"),
    quick(CASES, lambda case: case[::3] in (("zero3", "rows"), ("fsdp2", "columns"), ("ddp", "whole"))),
)
def test_receivers_have_their_parts_of_the_weights(kind, tp, trainers, placement):
    dtype = torch.bfloat16
    results = run_distributed(_moves, trainers + RECEIVERS, kind, tp, trainers, PLACEMENTS[placement], dtype)
    assert results == [[]] * (trainers + RECEIVERS)


def _fails() -> list[str]:
    start()
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = wrapped("ddp", gpt(), group=groups[dist.get_rank()])
    messages = []
    if dist.get_rank() == 0:
        with pytest.raises(ConfigError) as made:
            send_shards(WeightStream(model, process_group=groups[0]), dist.group.WORLD)
        messages.append(str(made.value))
    stream = WeightStream(model, "module", process_group=groups[dist.get_rank()])
    name = stream.metadata()[0].name
    for targets in ({name: torch.zeros(3)}, {"nothing": torch.zeros(3)}):
        with pytest.raises(WeightsError) as wanted:
            if dist.get_rank() == 0:
                send_shards(stream, dist.group.WORLD)
            else:
                receive_shards(targets, dist.group.WORLD)
        messages.append(str(wanted.value))
    return messages


def test_other_shapes_and_made_tensors_are_refused():
    sender, receiver = run_distributed(_fails, 2)
    assert "is made out of other tensors" in sender[0] and sender[1:] == receiver
    assert "rank 1 wants" in receiver[0] and "[" not in receiver[0] and "sent as None" in receiver[1]
    assert all("\n" not in message for message in sender)


@on_ranks(4)
def test_a_rank_holds_a_bucket_of_copies():
    placement = [Shard(0)]
    start()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    receives = dist.get_rank() >= 2
    model = wrapped("fsdp2", gpt(num_layers=4), group=groups[receives])
    stream = WeightStream(model, "module", bucket_bytes=10000, process_group=groups[receives])
    largest = max(view.numel() * view.element_size() for view in stream.views.values())
    targets = _targets(stream, placement, DeviceMesh.from_group(groups[1], "cpu")) if receives else {}
    live = LiveBytes()

    def measured(*args: Any) -> None:  # without the messages in which ranks agree
        with live:
            move(*args)

    with mock.patch("core.weights.stream.move", measured):
        receive_shards(targets, dist.group.WORLD) if receives else send_shards(stream, dist.group.WORLD)
    peak, bound = live.peak, 10000 + largest
    assert peak <= bound


def _receives_into_a_wrapper(kind: str) -> bool:
    """Returns whether a wrapped model computes with what it has received since its last forward."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    torch.manual_seed(dist.get_rank() > 0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.ones(2, 6)
    expected = torch.empty(2, 6)
    if dist.get_rank() == 0:
        send_shards(WeightStream(model, "module", process_group=groups[0]), dist.group.WORLD)
        expected = model(x).detach()
    else:
        wrapper = wrap_model(model, None, CONFIGS[kind](), process_group=groups[1], sub_modules_to_wrap=(nn.Linear,))
        with torch.no_grad():
            before = wrapper(x)
        receive_shards(model_state_dict(model), dist.group.WORLD)
    dist.broadcast(expected, 0)
    if dist.get_rank() == 0:
        return True
    with torch.no_grad():
        return torch.equal(wrapper(x), expected) and not torch.equal(before, expected)


@pytest.mark.parametrize("kind", ["zero2", "zero3", "fsdp2"])
def test_a_forward_reads_what_was_received_since_the_last_one(kind: str):
    assert run_distributed(_receives_into_a_wrapper, 3, kind) == [True] * 3
