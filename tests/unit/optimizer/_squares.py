"""A model whose gradient is known without data, trained alone or under a wrapper: the serial run is the oracle.

The gradient of each step is the same on all ranks and of power-of-two multiples of the weights and their squares, so
that averaging it over any number of ranks changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core import parallel_state
from core.dist_checkpointing import model_state_dict
from core.distributed import finalize_model_grads, wrap_model
from core.distributed.data_parallel_base import unwrap_model
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import run_distributed
from tests.unit.dist_checkpointing._pieces import Shapes, Toy


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
    make: Callable[[], nn.Module], ddp_config: Any, tp: int, settings: dict[str, Any]
) -> tuple[Any, MegatronOptimizer]:
    """Builds a model, wrapped if there is a `ddp_config`, and its optimizer.

    Without clipping: the norm of a serial run knows no tensor parallelism, and would differ in its last bit.
    """
    if ddp_config is None:
        model: Any = make()
    else:
        parallel_state.destroy_model_parallel()
        instances = ddp_config.num_distributed_optimizer_instances
        parallel_state.initialize_model_parallel(tp, num_distributed_optimizer_instances=instances)
        model = wrap_model(make(), None, ddp_config)
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


def on_ranks(fn: Any, world_size: int, wrapper: str, *args: Any) -> None:
    if world_size == 1:
        fn("serial", *args)
    else:
        run_distributed(fn, world_size, wrapper, *args)
