"""A training as a user writes it, with an optimizer of torch or an own one: plain in one process, or wrapped.

Every rank gets the same batch, so that a mean of gradients over ranks has the bits of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import MegatronOptimizer, shard_optimizer
from core.optimizer.run_state import RunState, Scheduler
from tests.unit._whole import whole_weights

CONFIGS: dict[str, Any] = {
    "ddp": DistributedDataParallelConfig(),
    "zero1": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", bucket_size=100),
    "zero2": DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads",
        bucket_size=150,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    "zero3": FullyShardedDataParallelConfig(shard_cut="flat"),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
}
Groups = list[dict[str, Any]]


class Lion(optim.Optimizer):
    """As users write it."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                one, two = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["m"] * one + p.grad * (1 - one)).sign(), alpha=-group["lr"])
                state["m"].lerp_(p.grad, 1 - two)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2),
    "Adam": lambda params: optim.Adam(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: optim.SGD(params, lr=1e-1, momentum=0.9, nesterov=True),
    "RMSprop": lambda params: optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": lambda params: optim.NAdam(params, lr=1e-2),
    "RAdam": lambda params: optim.RAdam(params, lr=1e-2),
    "Adagrad": lambda params: optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "Rprop": lambda params: optim.Rprop([{**group, "weight_decay": 0.0} for group in params], lr=1e-3),
    "ASGD": lambda params: optim.ASGD(params, lr=1e-2),
    "Lion": Lion,
}


class Net(nn.Module):
    """Tied weights, and sizes that no number of ranks divides. Buffers are cut inside the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(61, 7)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7), nn.Identity()) for _ in range(2)
        )
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 61, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def decayed(model: nn.Module) -> Groups:
    """Returns nanoGPT's groups."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def batch(step: int) -> Tensor:
    return torch.randint(0, 61, (4, 6), generator=torch.Generator().manual_seed(step))


def wrapped(kind: str, model: nn.Module | None = None, **changes: Any) -> Any:
    return wrap_model(model or Net(), None, CONFIGS[kind], process_group=dist.group.WORLD, **changes)


def train(model: Any, steps: range, *optimizers: Any, scheduler: Any = None) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(step)).backward()
        if hasattr(model, "zero_grad_buffer"):
            finalize_model_grads([model])
        for optimizer in optimizers:
            optimizer.step()
        if scheduler is not None:
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def plain(make: Callable[[Any], optim.Optimizer], steps: int, schedule: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Returns the weights of torch alone."""
    model = Net()
    optimizer = make(decayed(model))
    train(model, range(steps), optimizer, scheduler=schedule(optimizer))
    return whole_weights(model)


def halving(optimizer: Any) -> Scheduler:
    return lr_scheduler.StepLR(optimizer, 2, 0.5)


class Own:
    """A wrapped model with an optimizer over its shards."""

    def __init__(
        self,
        kind: str,
        make: Callable[[Any], optim.Optimizer],
        schedule: Callable[[Any], Any] = halving,
        **settings: Any,
    ) -> None:
        self.model = wrapped(kind)
        self.optimizer: MegatronOptimizer = shard_optimizer(make(decayed(self.model)), self.model, **settings)
        self.scheduler = schedule(self.optimizer)
        self.state = RunState(self.model, self.optimizer, self.scheduler)

    def train(self, steps: range) -> None:
        train(self.model, steps, self.optimizer, scheduler=self.scheduler)


def assert_weights(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Asserts that a model has these bits. All ranks call it."""
    found = whole_weights(model)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
