"""Buffers that a forward changes by its own batch: equal on all ranks after a step, and one rank's in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.dist_checkpointing import load, model_state_dict, save
from core.distributed import finalize_model_grads
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import build, synced_last


class _Model(nn.Module):
    """Layers with running statistics in fp32 and integers, and a buffer that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6))))
        self.register_buffer("own", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _build(kind: str, **fields: Any) -> nn.Module:
    return build(kind, _Model(), unit_classes=(nn.Linear,), **fields)


def _batch(rank: int, index: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * index + rank))


def _train(model: Any, step: int) -> None:
    model.train()
    model.zero_grad_buffer()
    for index in synced_last(model, (2 * step, 2 * step + 1)):
        model(_batch(dist.get_rank(), index)).square().mean().backward()
    finalize_model_grads([model])


def _statistics(model: Any) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.module.named_buffers() if name != "own"}


def _evaluate(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(_batch(0, 9))


def _are_equal_on_ranks(tensor: Tensor) -> bool:
    ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, tensor)
    return all(torch.equal(ranks[0], other) for other in ranks)


@pytest.mark.parametrize("kind", ["ddp_overlap", "zero1", "zero2_overlap", "zero3", "fsdp2"])
@on_ranks(2)
def test_statistics_are_rank_0s_everywhere(kind: str, tmp_path: Path) -> None:
    model, alone = _build(kind), _build(kind, broadcast_buffers=False)
    model.module.own.fill_(dist.get_rank())
    for step in range(2):
        _train(model, step)
        _train(alone, step)
    found, own = _statistics(model), _statistics(alone)
    assert all(map(_are_equal_on_ranks, found.values())) and _are_equal_on_ranks(_evaluate(model))
    assert not any(_are_equal_on_ranks(tensor) for name, tensor in own.items() if "running" in name)
    if dist.get_rank() == 0:  # what a training forward returns does not depend on them
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    assert model.module.own.eq(dist.get_rank()).all()

    for name, source in (("equal", model), ("different", alone)):
        save(model_state_dict(source.module), tmp_path / name, metadata={})
        resumed = _build(kind)
        load(model_state_dict(resumed.module), tmp_path / name)
        assert all(torch.equal(found[name], tensor) for name, tensor in _statistics(resumed).items()), name
        assert torch.equal(_evaluate(resumed), _evaluate(model))
    _train(resumed, 2)
    _train(model, 2)
    assert all(torch.equal(tensor, _statistics(model)[name]) for name, tensor in _statistics(resumed).items())
    assert torch.equal(_evaluate(resumed), _evaluate(model))


@on_ranks(2)
def test_other_buffers_are_sent_where_asked() -> None:
    for asked, expected in ((None, False), (True, True), (False, False)):
        module = nn.Linear(6, 6)
        module.register_buffer("seen", torch.full((3,), float(dist.get_rank())))
        model = build("ddp", module, broadcast_buffers=asked)
        module.seen.fill_(dist.get_rank())
        model(_batch(0, 0)).sum().backward()
        finalize_model_grads([model])
        assert _are_equal_on_ranks(module.seen) is expected
