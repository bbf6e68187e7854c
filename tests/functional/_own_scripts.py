"""Three scripts that know nothing of this library, as plain torch writes them, and the same under a wrapper.

A GPT with tied weights, an encoder with batch normalisation whose body and head have optimizers of their own, and a
student that learns from a frozen teacher. A step has four micro-batches on any number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler

from core.dist_checkpointing import load_training, save_training
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from core.optimizer import shard_optimizer
from tests.unit.distributed._toys import full

MICRO_BATCHES = 4
_EXACT = {"reproducible_across_ranks": True}
WRAPPERS: dict[str, Callable[[], DistributedDataParallelConfig]] = {
    "ddp": lambda: DistributedDataParallelConfig(**_EXACT),
    "zero1": lambda: DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", **_EXACT),
    "zero2": lambda: DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads", **_EXACT),
    "zero3": lambda: FullyShardedDataParallelConfig(**_EXACT),
    "fsdp2": lambda: TorchFullyShardedDataParallelConfig(**_EXACT),
}


class Lion(Optimizer):
    """Lion (Chen et al., 2023), as a user writes it."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(torch.sign(momentum * 0.9 + param.grad * 0.1), alpha=group["lr"])
                momentum.mul_(0.99).add_(param.grad, alpha=0.01)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "Lion": lambda groups: Lion(groups, lr=1e-3),
}


def decay_groups(named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Returns nanoGPT's groups: matrices decay, and nothing else."""
    params = [p for _, p in named if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class GPT(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h, src_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]), is_causal=True)
        out: Tensor = self.head(h)
        return out


class Encoder(nn.Module):
    """A convolutional encoder with batch normalisation, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 3), nn.BatchNorm1d(4)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean(-1))
        return out


class Classifier(nn.Module):
    """A classifier of rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _random(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def _gpt_loss(models: dict[str, Any], index: int) -> Tensor:
    rows = torch.randint(0, 17, (2, 7), generator=_random(index))
    return F.cross_entropy(models["gpt"](rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def _encoder_loss(models: dict[str, Any], index: int) -> Tensor:
    x = torch.randn(4, 3, 9, generator=_random(index))
    return F.cross_entropy(models["encoder"](x), (x.mean((1, 2)) * 9).long().clamp(0, 4))


def _student_loss(models: dict[str, Any], index: int) -> Tensor:
    x = torch.randn(4, 6, generator=_random(index))
    with torch.no_grad():
        target = models["teacher"](x).softmax(-1)
    return F.kl_div(models["student"](x).log_softmax(-1), target, reduction="batchmean")


@dataclass(frozen=True)
class Script:
    """What a script trains."""

    models: Callable[[], dict[str, nn.Module]]
    loss: Callable[[dict[str, Any], int], Tensor]
    """Of the micro-batch with an index, over all steps."""
    optimized: tuple[tuple[str, str], ...]
    """The model of each optimizer, and what the names of its parameters begin with."""


SCRIPTS = {
    "gpt": Script(lambda: {"gpt": GPT()}, _gpt_loss, (("gpt", ""),)),
    "encoder": Script(lambda: {"encoder": Encoder()}, _encoder_loss, (("encoder", "body"), ("encoder", "head"))),
    "student": Script(
        lambda: {"teacher": Classifier(12).requires_grad_(False), "student": Classifier(8)},
        _student_loss,
        (("student", ""),),
    ),
}


class Plain:
    """A script in one process of plain torch. Gradients of micro-batches are added as a tree adds them."""

    def __init__(self, script: str, optimizer: str) -> None:
        self.script, torch_optimizer = SCRIPTS[script], OPTIMIZERS[optimizer]
        torch.manual_seed(7)
        self.models: dict[str, Any] = self.script.models()
        self.optimizers: list[Any] = []
        for name, begins in self.script.optimized:
            self.optimizers.append(self._optimizer(torch_optimizer, name, begins))
        self.schedules = [lr_scheduler.StepLR(one, 2, gamma=0.5) for one in self.optimizers]

    def _optimizer(self, build: Callable[[Any], Optimizer], name: str, begins: str) -> Any:
        return build(decay_groups([(n, p) for n, p in self.models[name].named_parameters() if n.startswith(begins)]))

    def train(self, steps: range) -> None:
        for step in steps:
            self._add_gradients(step)
            for one, schedule in zip(self.optimizers, self.schedules, strict=True):
                one.step()
                schedule.step()
            for one in self.optimizers:  # afterwards: under a wrapper each zeroes the gradients of the whole model
                one.zero_grad()

    def _add_gradients(self, step: int) -> None:
        params = [p for model in self.models.values() for p in model.parameters() if p.requires_grad]
        parts = []
        for index in range(MICRO_BATCHES):
            loss = self.script.loss(self.models, step * MICRO_BATCHES + index) / MICRO_BATCHES
            parts.append(torch.autograd.grad(loss, params))
        while len(parts) > 1:  # neighbours first
            parts = [[a + b for a, b in zip(*two, strict=True)] for two in zip(parts[::2], parts[1::2], strict=True)]
        for param, grad in zip(params, parts[0], strict=True):
            param.grad = grad

    def weights(self) -> dict[str, Tensor]:
        """Returns all parameters of all models, whole."""
        return {
            f"{key}.{name}": full(param)
            for key, model in self.models.items()
            for name, param in model.named_parameters()
        }


class Wrapped(Plain):
    """The script under a wrapper, on the ranks of the default group."""

    def __init__(self, script: str, optimizer: str, wrapper: str) -> None:
        self.wrapper = wrapper
        super().__init__(script, optimizer)

    def _optimizer(self, build: Callable[[Any], Optimizer], name: str, begins: str) -> Any:
        if not hasattr(self.models[name], "plan"):
            self.models = {key: wrap_model(model, WRAPPERS[self.wrapper]()) for key, model in self.models.items()}
            for model in self.models.values():
                model.expect_micro_batches(MICRO_BATCHES // dist.get_world_size())
        named = [(n, p) for n, p in self.models[name].module.named_parameters() if n.startswith(begins)]
        return shard_optimizer(build(decay_groups(named)), self.models[name])

    def _add_gradients(self, step: int) -> None:
        count = MICRO_BATCHES // dist.get_world_size()
        trained = self.models[self.script.optimized[0][0]]
        for number in range(count):
            with trained.no_sync() if number < count - 1 else nullcontext():
                index = trained.micro_batch_index(number)
                (self.script.loss(self.models, step * MICRO_BATCHES + index) / count).backward()

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for key, model in self.models.items():
            with model.whole_parameters():
                found |= {f"{key}.{name}": full(param).clone() for name, param in model.module.named_parameters()}
        return found

    def _parts(self) -> tuple[Any, Any, Any]:
        if len(self.models) == 1:
            return next(iter(self.models.values())), self.optimizers, self.schedules
        name = self.script.optimized[0][0]
        return self.models, {name: self.optimizers}, {name: self.schedules}

    def save(self, folder: Path, step: int) -> None:
        save_training(folder, *self._parts(), step, extra={"note": "of any size", "order": torch.arange(3)})

    def load(self, folder: Path) -> int:
        step, extra = load_training(folder, *self._parts())
        assert extra["note"] == "of any size" and torch.equal(extra["order"], torch.arange(3))
        return step


def plain_weights(script: str, optimizer: str, steps: int) -> dict[str, Tensor]:
    """Returns the weights that one process of plain torch trains."""
    plain = Plain(script, optimizer)
    plain.train(range(steps))
    return copy.deepcopy(plain.weights())
