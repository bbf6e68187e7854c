"""Lightning's Trainer with this library's strategies does what one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning")

from core.adapters.lightning import ShardstackStrategy
from tests.unit._spawn import run_distributed
from tests.unit.adapters.lightning._module import CLIP, SHARDINGS, Module, loader, ranks_of_lightning, serial, trainer, whole


def _as_serial(sharding: str, folder: str) -> None:
    with ranks_of_lightning():
        module, strategy = Module(), ShardstackStrategy(sharding)
        trainer(strategy, folder).fit(module, loader(dist.get_rank()))
    losses, norms, weights = serial(2)
    assert max(norms) > CLIP
    found = whole(module)
    assert module.seen == losses[dist.get_rank()]
    for name in weights:
        assert torch.equal(found[name], weights[name]), name


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_training_is_that_of_one_process(sharding, tmp_path):
    run_distributed(_as_serial, 2, sharding, str(tmp_path))
