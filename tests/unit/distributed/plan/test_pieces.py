"""The dtypes of a model, and where parameters of a unit are in flat buffers."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from core.base.errors import ParallelConfigError
from core.distributed import TorchFullyShardedDataParallelConfig
from core.distributed.fully_sharded_data_parallel_config import ShardCut, parse_cut
from core.distributed.plan.layout import PARAM_ALIGNMENT, BucketLayout, lay_out_unit
from core.distributed.plan.pieces import mixed_precision_policy
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import build, toy

LAYER = [(1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048), (512,), (512,), (512,)]
"""Of a GPT of width 512."""
ODD = [(7, 5), (5, 7), (5,), (1,), (3, 2, 3), ()]
CUTS = ["flat", "rows", "tensor", "block:32", "block:3"]


def _grains(cut: str, shape: tuple[int, ...]) -> int:
    if cut == "tensor":
        return max(1, math.prod(shape))
    return int(cut[6:]) if cut.startswith("block") else math.prod(shape[1:]) if cut == "rows" else 1


def _crossed(layout: BucketLayout, num_shards: int) -> list[tuple[int, int]]:
    """Returns each end of a shard that is inside a parameter: the parameter, and how far into it."""
    length = layout.end // num_shards
    return [
        (member, end - start)
        for member, (start, stop) in zip(layout.members, layout.ranges, strict=True)
        for end in range(length, layout.end, length)
        if start < end < stop
    ]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("num_shards", [2, 3, 8])
@pytest.mark.parametrize("shapes", [LAYER, ODD], ids=["layer", "odd"])
def test_no_shard_ends_inside_what_belongs_together(shapes, num_shards, cut):
    layout = lay_out_unit(shapes, num_shards, parse_cut(cut))
    assert layout.end % num_shards == 0
    assert sorted(layout.members) == list(range(len(shapes)))
    for member, (start, end) in zip(layout.members, layout.ranges, strict=True):
        assert end - start == math.prod(shapes[member]) and start % PARAM_ALIGNMENT == 0
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(layout.ranges))
    assert layout.ranges[-1][1] <= layout.end
    for member, inside in _crossed(layout, num_shards):
        assert inside % _grains(cut, shapes[member]) == 0


def test_a_flat_cut_does_go_through_rows():
    layout = lay_out_unit(ODD, 2, ShardCut("flat"))
    big = lay_out_unit([(3, 100), (3, 100)], 3, ShardCut("flat"))
    assert layout.end == 6 * PARAM_ALIGNMENT  # a multiple of it for each parameter, as many for each rank
    assert [inside % 100 != 0 for _, inside in _crossed(big, 3)] == [True, True]


@pytest.mark.parametrize(
    ("shapes", "num_shards", "expected"), [(LAYER, 8, "rows"), (ODD, 2, "flat"), (LAYER, 1, "flat")]
)
def test_rows_are_the_default_where_they_pad_little(shapes, num_shards, expected):
    layout = lay_out_unit(shapes, num_shards, ShardCut("auto"))
    assert layout == lay_out_unit(shapes, num_shards, ShardCut(expected))
    if expected == "rows":
        assert layout.end < 1.01 * sum(map(math.prod, shapes))


def test_tensors_are_balanced():
    layout = lay_out_unit(LAYER, 4, ShardCut("tensor"))
    assert layout.end // 4 == 2048 * 512  # the two large matrices by themselves, and a third; the rest fits in one
    assert not _crossed(layout, 4)


def test_the_page_has_the_padding_of_a_layer():
    shapes = [*LAYER, (512,), (512,)]
    page = (Path(__file__).parents[4] / "docs" / "fully-sharded.md").read_text()
    for cut in ("flat", "rows", "block:128", "tensor"):
        ends = [lay_out_unit(shapes, ranks, parse_cut(cut)).end for ranks in (2, 8, 64)]
        padding = ", ".join(f"{100 * (end / sum(map(math.prod, shapes)) - 1):.2f}" for end in ends)
        assert re.search(rf"\| `{cut}` \|.*\| {padding} % \|", page), (cut, padding)


def _bounds_by_unit(**settings: object) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    plan = build("zero3", toy(tied=False), **settings).plan
    return {unit.names[0]: [(p.shape, p.bounds) for p in unit.params] for unit in plan.units}


@on_ranks(2)
def test_units_may_be_cut_differently() -> None:
    found = _bounds_by_unit(shard_cut="block:4,blocks.*=rows,blocks.1=tensor")
    cuts = {"embedding": "block:4", "blocks.0": "rows", "blocks.1": "tensor", "head": "block:4", "": "block:4"}
    assert found == {name: _bounds_by_unit(shard_cut=cut)[name] for name, cut in cuts.items()}
    assert all(len(set(bounds)) == 2 for _, bounds in found["blocks.1"])
    for shape, bounds in found["blocks.0"]:
        assert all(bound % math.prod(shape[1:]) == 0 for bound in bounds)


@on_ranks(1)
def test_fsdp2_cuts_by_rows() -> None:
    for settings in ({"shard_cut": "tensor"}, {"shard_cut": "rows,blocks.*=flat"}):
        TorchFullyShardedDataParallelConfig(**settings)
        with pytest.raises(ParallelConfigError, match="FSDP2 always cuts by rows"):
            build("fsdp2", toy(), **settings)
    build("fsdp2", toy(), shard_cut="rows")


# ---- the policy that a model's parameters and the settings make together

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize(
    ("arrived", "compute", "settings", "expected"),
    [
        # (param_dtype, reduce_dtype, output_dtype, cast_forward_inputs)
        ([FP32], FP32, {}, (None, None, None, False)),
        ([FP32], BF16, {}, (BF16, BF16, FP32, True)),
        ([FP32], BF16, {"grad_reduce_in_fp32": True}, (BF16, FP32, FP32, True)),
        ([FP32], FP32, {"param_dtype": "bf16"}, (BF16, BF16, FP32, True)),
        ([FP32], FP16, {"param_dtype": FP16, "reduce_dtype": "bf16"}, (FP16, BF16, FP32, True)),
        ([BF16], FP32, {"param_dtype": "bf16"}, (BF16, BF16, FP32, True)),
        ([BF16, FP32], FP32, {"param_dtype": "bf16", "reduce_dtype": FP32}, (BF16, FP32, FP32, True)),
        ([BF16], BF16, {}, (None, None, None, False)),
        ([BF16], BF16, {"grad_reduce_in_fp32": True}, (None, FP32, None, False)),
        ([BF16, FP32], BF16, {}, (None, None, None, False)),  # fp32 norms stay fp32
        ([FP64], FP32, {}, (None, None, None, False)),
    ],
)
def test_only_what_arrives_in_fp32_is_cast(arrived, compute, settings, expected):
    config = TorchFullyShardedDataParallelConfig(**settings)
    of_model = SimpleNamespace(bf16=compute is BF16, fp16=compute is FP16)
    policy = mixed_precision_policy([torch.zeros(1, dtype=dtype) for dtype in arrived], of_model, config)
    assert policy == MixedPrecisionPolicy(*expected)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype"])
def test_fp16_needs_a_loss_scale(field):
    config = TorchFullyShardedDataParallelConfig(**{field: "fp16"})
    with pytest.raises(ParallelConfigError, match=rf"{field} (is )?fp16.*fp16=False"):
        mixed_precision_policy([torch.zeros(1)], SimpleNamespace(bf16=True), config)
