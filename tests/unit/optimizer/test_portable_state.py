"""A checkpoint of any optimizer continues any other: other strategies, world sizes and tensor-parallel cuts."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from core.optimizer import MegatronOptimizer
from tests.unit._quick import quick
from tests.unit._spawn import run_anywhere
from tests.unit.dist_checkpointing._pieces import Shapes
from tests.unit.optimizer._squares import Squares, assert_saved, build, continue_from, write

STEPS = 3
SHAPES: Shapes = {
    "columns.weight": ((22, 15), 0),  # shares end inside rows of these, in whole and in tensor-parallel pieces
    "columns.bias": ((22,), 0),
    "rows.weight": ((15, 26), 1),
    "cube.weight": ((5, 7, 11), None),
    "norm.weight": ((197,), None),
    "thin.weight": ((1, 3), None),
}


def _run(wrapper: str, tp: int, dtype: torch.dtype) -> tuple[Any, MegatronOptimizer]:
    settings = {"lr": 0.1, "bf16": dtype == torch.bfloat16}
    return build(lambda: Squares(SHAPES, 1.0, dtype), wrapper, tp, settings)


def _write(wrapper: str, tp: int, dtype: torch.dtype, folder: str) -> None:
    write(*_run(wrapper, tp, dtype), STEPS, folder)


def _continue(wrapper: str, tp: int, dtype: torch.dtype, source: str, target: str) -> None:
    continue_from(source, *_run(wrapper, tp, dtype), STEPS, target)


SHARDED = [(2, "zero1", 1), (2, "zero2", 1)]
OTHERS = [(1, "serial", 1), (2, "ddp", 1), (2, "fsdp2", 1), (2, "zero1", 2)]
LAYOUTS = [*SHARDED, *OTHERS]
ON_FOUR = [(4, "zero1", 2), (4, "zero2", 1), (4, "hybrid zero1", 1), (4, "fsdp2", 2)]
PAIRS = [*product(SHARDED, OTHERS), *product(OTHERS, SHARDED), *product(SHARDED, SHARDED)]
LONG = [*product(ON_FOUR, [*ON_FOUR, *SHARDED, *OTHERS]), *product([*SHARDED, *OTHERS], ON_FOUR)]


def _name(layout: tuple[int, str, int]) -> str:
    return f"{layout[1]} on {layout[0]}" + (" tp2" if layout[2] > 1 else "")


def _is_quick(case: tuple[torch.dtype, tuple[int, str, int], tuple[int, str, int]]) -> bool:
    """In fp32 what is sharded, for the other; in bf16 every layout writes for a sharded one, and reads from one."""
    dtype, *pair = case
    if dtype == torch.float32:
        return set(pair) == set(SHARDED)
    return tuple(pair) in PAIRS and sum(map(LAYOUTS.index, pair)) % 2 == 0


@pytest.mark.parametrize(
    ("dtype", "writer", "reader"),
    quick(((dtype, *pair) for dtype in (torch.float32, torch.bfloat16) for pair in (*PAIRS, *LONG)), _is_quick),
    ids=lambda value: _name(value) if isinstance(value, tuple) else str(value).removeprefix("torch."),
)
def test_state_moves_between_optimizers(tmp_path: Path, writer, reader, dtype: torch.dtype):
    run_anywhere(_write, *writer, dtype, str(tmp_path / "first"))
    run_anywhere(_continue, *reader, dtype, str(tmp_path / "first"), str(tmp_path / "second"))
    assert_saved(tmp_path / "second", *_run("serial", 1, dtype), 2 * STEPS)
