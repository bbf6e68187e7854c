"""A checkpoint of any optimizer continues any other: other strategies, world sizes and tensor-parallel cuts."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from core.dist_checkpointing import load, save
from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig
from core.optimizer import MegatronOptimizer
from tests.unit._quick import quick
from tests.unit.dist_checkpointing._pieces import Shapes
from tests.unit.optimizer._squares import Squares, build, on_ranks, state_of, train

STEPS = 3
SHAPES: Shapes = {
    "columns.weight": ((22, 15), 0),  # shares end inside rows of these, in whole and in tensor-parallel pieces
    "columns.bias": ((22,), 0),
    "rows.weight": ((15, 26), 1),
    "cube.weight": ((5, 7, 11), None),
    "norm.weight": ((197,), None),
    "thin.weight": ((1, 3), None),
}
CONFIGS = {
    "ddp": DistributedDataParallelConfig(),
    "zero1": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", bucket_size=500),
    "zero2": DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads", bucket_size=300, overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
    "hybrid zero1": DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=2
    ),
}  # fmt: skip


def _run(wrapper: str, tp: int, dtype: torch.dtype) -> tuple[Any, MegatronOptimizer]:
    settings = {"lr": 0.1, "bf16": dtype == torch.bfloat16}
    return build(lambda: Squares(SHAPES, 1.0, dtype), None if wrapper == "serial" else CONFIGS[wrapper], tp, settings)


def _write(wrapper: str, tp: int, dtype: torch.dtype, folder: str) -> None:
    model, optimizer = _run(wrapper, tp, dtype)
    train(model, optimizer, STEPS)
    save(state_of(model, optimizer), folder, metadata={"optimizer": optimizer.state_scalars()})


def _continue(wrapper: str, tp: int, dtype: torch.dtype, source: str, target: str) -> None:
    """Loads into a model that has gone elsewhere in the meantime, trains on, and saves."""
    model, optimizer = _run(wrapper, tp, dtype)
    train(model, optimizer, 1)
    metadata = load(state_of(model, optimizer), source)
    optimizer.load_state_scalars(metadata["optimizer"])
    train(model, optimizer, STEPS)
    save(state_of(model, optimizer), target, metadata={"optimizer": optimizer.state_scalars()})


def _as_serial_left_it(folder: Path, dtype: torch.dtype) -> None:
    model, optimizer = _run("serial", 1, dtype)
    train(model, optimizer, 2 * STEPS)
    expected = state_of(model, optimizer)
    actual = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert load(actual, folder)["optimizer"]["step"] == 2 * STEPS
    wrong = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not wrong, f"{wrong} differ from the serial run"


SHARDED = [(2, "zero1", 1), (2, "zero2", 1)]
OTHERS = [(1, "serial", 1), (2, "ddp", 1), (2, "fsdp2", 1), (2, "zero1", 2)]
LAYOUTS = [*SHARDED, *OTHERS]
ON_FOUR = [(4, "zero1", 2), (4, "zero2", 1), (4, "hybrid zero1", 1), (4, "fsdp2", 2)]
PAIRS = [*product(SHARDED, OTHERS), *product(OTHERS, SHARDED), *product(SHARDED, SHARDED)]
LONG = [*product(ON_FOUR, [*ON_FOUR, *SHARDED, *OTHERS]), *product([*SHARDED, *OTHERS], ON_FOUR)]


def _name(layout: tuple[int, str, int]) -> str:
    return f"{layout[1]} on {layout[0]}" + (" tp2" if layout[2] > 1 else "")


def _is_quick(case: tuple[torch.dtype, tuple[int, str, int], tuple[int, str, int]]) -> bool:
    """In fp32 what is sharded, among itself; in bf16 every layout writes for a sharded one, and reads from one."""
    dtype, *pair = case
    if dtype == torch.float32:
        return set(pair) <= set(SHARDED)
    return tuple(pair) in PAIRS and sum(map(LAYOUTS.index, pair)) % 2 == 0


@pytest.mark.parametrize(
    ("dtype", "writer", "reader"),
    quick(((dtype, *pair) for dtype in (torch.float32, torch.bfloat16) for pair in (*PAIRS, *LONG)), _is_quick),
    ids=lambda value: _name(value) if isinstance(value, tuple) else str(value).removeprefix("torch."),
)
def test_state_moves_between_optimizers(tmp_path: Path, writer, reader, dtype: torch.dtype):
    on_ranks(_write, *writer, dtype, str(tmp_path / "first"))
    on_ranks(_continue, *reader, dtype, str(tmp_path / "first"), str(tmp_path / "second"))
    _as_serial_left_it(tmp_path / "second", dtype)
