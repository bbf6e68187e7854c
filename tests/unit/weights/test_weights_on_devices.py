"""Weights of a model on a CPU or a GPU arrive bit for bit: from a stream, and over gloo at receivers on either."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.weights import WeightReceiver, WeightSender, WeightStream
from tests.unit._on_gpu import ON_GPU, run_on_one_rank
from tests.unit._rounding import assert_same
from tests.unit.weights._models import BUCKET, fill, gpt, start, wrapped

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
EXPERTS = {"num_moe_experts": 3, "moe_router_topk": 2}
LIMIT_S = 60.0


def _filled(model: nn.Module, seed: int) -> None:
    """Draws values on the CPU, so that they are the same on each device."""
    for index, parameter in enumerate(model.parameters()):
        values = nn.Parameter(torch.empty(parameter.shape))
        fill(values, 100 * seed + index)
        with torch.no_grad():
            parameter.copy_(values)


def _on_the_cpu(tensors: Iterable[tuple[str, Tensor]], device: str) -> dict[str, Tensor]:
    """Returns copies of tensors of a device."""
    found = dict(tensors)
    assert {tensor.device.type for tensor in found.values()} == {device}
    return {name: tensor.cpu().clone() for name, tensor in found.items()}


def _streams(device: str, kind: str) -> None:
    model = gpt(tied=kind != "zero3", **EXPERTS).cpu()
    _filled(model, 1)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    renamed = {name: tensor.clone() for name, tensor in WeightStream(model)}
    assert renamed.keys() != whole.keys()
    start()
    model = wrapped(kind, model.to(device))
    for names, expected in (("module", whole), ("hugging_face", renamed)):
        for dtype in (torch.float32, torch.bfloat16):
            stream = WeightStream(model, names, dtype=dtype, bucket_bytes=BUCKET)
            rounded = {name: tensor.to(dtype) for name, tensor in expected.items()}
            for _ in range(2):
                assert_same(_on_the_cpu(stream, device), rounded)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["ddp", "zero3", "fsdp2"])
def test_a_stream_has_the_bits_of_the_cpu(device: str, kind: str) -> None:
    run_on_one_rank(device, _streams, kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_receivers_have_the_bits_that_were_sent(device: str, dtype: torch.dtype | None) -> None:
    """One receives into memory of the model's device, the other one on the CPU: all weights, then what changed."""
    model, store = gpt(**EXPERTS).to(device), dist.HashStore()
    stream = WeightStream(model, dtype=dtype, bucket_bytes=BUCKET)
    into = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype, device=device) for meta in stream.metadata()}
    with ThreadPoolExecutor(2) as pool:
        joining = [
            pool.submit(WeightReceiver, store, index, 2, limit_s=LIMIT_S, **options)
            for index, options in enumerate(({"into": into}, {"device": "cpu"}))
        ]
        sender = WeightSender(stream, store, 2, patches=True, limit_s=LIMIT_S)
        receivers = [receiver.result() for receiver in joining]
        for version in range(3):
            if version == 1:
                with torch.no_grad():
                    model.decoder.layers[1].self_attention.linear_qkv.weight[3:5] += 1.0
            if version == 2:
                _filled(model, 2)
            receiving = [pool.submit(receiver.receive) for receiver in receivers]
            sender.send_patch(version)
            assert [result.result() for result in receiving] == [version, version]
            expected = _on_the_cpu(stream, device)
            for receiver, place in zip(receivers, (device, "cpu"), strict=True):
                assert_same(_on_the_cpu(receiver.weights.items(), place), expected)
    assert all(receivers[0].weights[name] is tensor for name, tensor in into.items())
