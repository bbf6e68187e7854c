"""A model is wrapped once; the message says which module is wrapped already, by whom, and what to do instead."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from core.base.errors import WrapError
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import build, toy


@on_ranks(1)
def test_a_wrapper_refuses_what_is_wrapped() -> None:
    for first in ("ddp", "zero1", "fsdp2"):
        for second in ("ddp", "fsdp2"):
            wrapped = build(first, toy())
            kind = type(wrapped).__name__
            with pytest.raises(WrapError, match=rf"again: it \({kind}\) is a data-parallel wrapper .* its \.module"):
                build(second, wrapped)
    with pytest.raises(WrapError, match=r"it \(DistributedDataParallel\) is a data-parallel wrapper"):
        build("fsdp2", TorchDistributedDataParallel(toy(tied=False)))
    for second in ("ddp", "fsdp2"):
        with pytest.raises(
            WrapError, match=r"it \(Toy\) is sharded already, by another wrapper .* wrap_model returned"
        ):
            build(second, build("fsdp2", toy()).module)
        with pytest.raises(WrapError, match=r"parameter \S+ is in the buffers of a wrapper already"):
            build(second, build("zero1", toy()).module)


@on_ranks(1)
def test_a_child_sharded_by_hand_is_named_with_what_to_do() -> None:
    for kind in ("ddp", "fsdp2"):
        module = toy()
        fully_shard(module.blocks[1])
        with pytest.raises(
            WrapError,
            match=r"its module 'blocks\.1' \(Block\) is sharded already, by a call of torch's fully_shard; drop that "
            r"call: .* Name the class Block in sub_modules_to_wrap",
        ):
            build(kind, module)
    assert dist.get_world_size() == 1
