"""A checkpoint of any optimizer continues any other: other strategies, world sizes and tensor-parallel cuts."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import parallel_state
from core.dist_checkpointing import load, model_state_dict, save
from core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.distributed.data_parallel_base import unwrap_model
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed
from tests.unit.dist_checkpointing._pieces import Shapes, Toy

# The gradient of each step is the same on all ranks and of power-of-two multiples of the weights and their squares,
# so that averaging it over any number of ranks changes no bit: the serial run is the oracle everywhere.
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


class _Squares(Toy):
    """A loss that every parameter has a part in, and in which every element differs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(shapes=SHAPES, **kwargs)
        for child in self.children():  # a parameter is read in its own module's forward, which waits for it
            child.forward = partial(_squares, child)  # type: ignore[method-assign]

    def forward(self) -> Tensor:
        return torch.stack([child() for child in self.children()]).sum()


def _squares(module: nn.Module) -> Tensor:
    return torch.stack([(p * p * p.detach().cos()).sum().float() for p in module.parameters()]).sum()


def _run(wrapper: str, tp: int, dtype: torch.dtype) -> tuple[Any, MegatronOptimizer]:
    features = wrapper.split()
    if wrapper == "serial":
        model: Any = _Squares(filled=True, dtype=dtype)
    else:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tp, num_distributed_optimizer_instances=2 if "hybrid" in features else 1
        )
        model = wrap_model(_Squares(filled=True, dtype=dtype), None, CONFIGS[wrapper])
    # no clipping: the norm of a serial run knows no tensor parallelism, and would differ in its last bit
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, bf16=dtype == torch.bfloat16)
    return model, get_megatron_optimizer(config, [model])


def _train(model: Any, optimizer: MegatronOptimizer, steps: int) -> None:
    for _ in range(steps):
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
            model().backward()
            finalize_model_grads([model])
        else:
            optimizer.zero_grad()
            model().backward()
        optimizer.step()


def _state(model: Any, optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    """Makes a state as a training run keeps it: masters in the place of the parameters that were rounded from them."""
    state = optimizer.state_tensors()
    masters = {name.removeprefix("master."): t for name, t in state.items() if name.startswith("master.")}
    weights = {f"model.{name}": masters.get(name, t) for name, t in model_state_dict(unwrap_model(model)).items()}
    return weights | {name: t for name, t in state.items() if not name.startswith("master.")}


def _write(wrapper: str, tp: int, dtype: torch.dtype, folder: str) -> None:
    model, optimizer = _run(wrapper, tp, dtype)
    _train(model, optimizer, STEPS)
    save(_state(model, optimizer), folder, metadata={"optimizer": optimizer.state_scalars()})


def _continue(wrapper: str, tp: int, dtype: torch.dtype, source: str, target: str) -> None:
    """Loads into a model that has gone elsewhere in the meantime, trains on, and saves."""
    model, optimizer = _run(wrapper, tp, dtype)
    _train(model, optimizer, 1)
    metadata = load(_state(model, optimizer), source)
    optimizer.load_state_scalars(metadata["optimizer"])
    _train(model, optimizer, STEPS)
    save(_state(model, optimizer), target, metadata={"optimizer": optimizer.state_scalars()})


def _on_ranks(fn: Any, world_size: int, wrapper: str, *args: Any) -> None:
    if world_size == 1:
        fn("serial", *args)
    else:
        run_distributed(fn, world_size, wrapper, *args)


def _as_serial_left_it(folder: Path, dtype: torch.dtype) -> None:
    model, optimizer = _run("serial", 1, dtype)
    _train(model, optimizer, 2 * STEPS)
    expected = _state(model, optimizer)
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
    _on_ranks(_write, *writer, dtype, str(tmp_path / "first"))
    _on_ranks(_continue, *reader, dtype, str(tmp_path / "first"), str(tmp_path / "second"))
    _as_serial_left_it(tmp_path / "second", dtype)
