"""A model whose gradient is known without data, trained alone or under a wrapper: the serial run is the oracle.

The gradient of each step is the same on all ranks and of power-of-two multiples of the weights and their squares, so
that averaging it over any number of ranks changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core import parallel_state
from core.base.module_protocol import unwrap_model
from core.dist_checkpointing import load, model_state_dict, save
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit.dist_checkpointing._pieces import Shapes, Toy

FLAT, SHARDED = DistributedDataParallelConfig, FullyShardedDataParallelConfig
CONFIGS: dict[str, Any] = {
    "ddp": FLAT(),
    "zero1": FLAT(data_parallel_sharding_strategy="optim", bucket_size=500),
    "zero2": FLAT(
        data_parallel_sharding_strategy="optim_grads", bucket_size=300, overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    "zero3": SHARDED(data_parallel_sharding_strategy="optim_grads_params"),
    "zero3 tensor": SHARDED(data_parallel_sharding_strategy="optim_grads_params", shard_cut="tensor"),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
    "hybrid zero1": FLAT(data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=2),
    "hybrid fsdp2": TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=2),
}  # fmt: skip
OFFLOADED: dict[str, Any] = {
    "zero3 on the host": SHARDED(data_parallel_sharding_strategy="optim_grads_params", cpu_offload=True),
    "fsdp2 on the host": TorchFullyShardedDataParallelConfig(cpu_offload=True),
}
"""Those of `CONFIGS` whose shards are on the host."""


class Squares(Toy):
    """A loss that every parameter has a part in, and in which every element differs."""

    def __init__(self, shapes: Shapes, frequency: float, dtype: torch.dtype) -> None:
        super().__init__(shapes=shapes, filled=True, dtype=dtype)
        for child in self.children():  # a parameter is read in its own module's forward, which waits for it
            child.forward = partial(_squares, child, frequency)  # type: ignore[method-assign]

    def forward(self) -> Tensor:
        return torch.stack([child() for child in self.children()]).sum()


def _squares(module: nn.Module, frequency: float) -> Tensor:
    params = module.parameters()
    return torch.stack([(p * p * (frequency * p.detach()).cos()).sum().float() for p in params]).sum()


def build(
    make: Callable[[], nn.Module], wrapper: str, tp: int, settings: dict[str, Any]
) -> tuple[Any, MegatronOptimizer]:
    """Builds a model, wrapped unless the run is "serial", and its optimizer.

    Without clipping: the norm of a serial run knows no tensor parallelism, and would differ in its last bit.
    """
    if wrapper == "serial":
        model: Any = make()
    else:
        parallel_state.destroy_model_parallel()
        config = (CONFIGS | OFFLOADED)[wrapper]
        instances = config.num_distributed_optimizer_instances
        parallel_state.initialize_model_parallel(tp, num_distributed_optimizer_instances=instances)
        model = wrap_model(make(), None, config)
    return model, get_megatron_optimizer(OptimizerConfig(**({"clip_grad": 0.0} | settings)), [model])


def train(model: Any, optimizer: MegatronOptimizer, steps: int, micro_batches: int = 1) -> None:
    is_wrapped = hasattr(model, "zero_grad_buffer")
    for _ in range(steps):
        if is_wrapped:
            model.zero_grad_buffer()
        else:
            optimizer.zero_grad()
        for index in range(micro_batches):
            is_last = index == micro_batches - 1
            with nullcontext() if is_last or not is_wrapped else model.no_sync():
                model().backward()
        if is_wrapped:
            finalize_model_grads([model])
        optimizer.step()


def state_of(model: Any, optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    """Makes a state as a training run keeps it: masters in the place of the parameters that were rounded from them."""
    state = optimizer.state_tensors()
    masters = {name.removeprefix("master."): t for name, t in state.items() if name.startswith("master.")}
    weights = {f"model.{name}": masters.get(name, t) for name, t in model_state_dict(unwrap_model(model)).items()}
    return weights | {name: t for name, t in state.items() if not name.startswith("master.")}


def write(model: Any, optimizer: MegatronOptimizer, steps: int, folder: str) -> None:
    """Trains, and saves what a run saves."""
    train(model, optimizer, steps)
    save(state_of(model, optimizer), folder, metadata={"optimizer": optimizer.state_scalars()})


def continue_from(source: str, model: Any, optimizer: MegatronOptimizer, steps: int, target: str) -> None:
    """Loads into a model that has gone elsewhere in the meantime, trains on, and saves."""
    train(model, optimizer, 1)
    metadata = load(state_of(model, optimizer), source)
    optimizer.load_state_scalars(metadata["optimizer"])
    train(model, optimizer, 1)
    state_of(model, optimizer)  # a checkpoint between two steps, which changes nothing
    write(model, optimizer, steps - 1, target)


def assert_saved(folder: Path, model: Any, optimizer: MegatronOptimizer, steps: int) -> None:
    """Asserts that a checkpoint has what this run has after so many steps."""
    train(model, optimizer, steps)
    expected = state_of(model, optimizer)
    actual = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert load(actual, folder)["optimizer"]["step"] == steps
    wrong = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not wrong, f"{wrong} differ from the serial run"
