"""A small LightningModule, its Trainer on ranks that exist, and the same training in one process."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from core.dist_checkpointing import FlatRange, model_state_dict
from core.distributed import _BaseDataParallel
from core.distributed.engine.engine import owner_of
from tests.unit.adapters._adapters import Net, batch, mean_gradients

SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")
STEPS, MICRO_BATCHES, CLIP = 4, 3, 0.05


class Module(L.LightningModule):
    """`Net` in a LightningModule; its step calls itself, as Lightning's examples do."""

    def __init__(self, optimizer: str = "sgd", seed: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: list[float] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = Net()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = self(tokens)
        self.seen.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, tokens: torch.Tensor, index: int) -> None:
        self.log("val_loss", self(tokens), sync_dist=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        norm = getattr(self.trainer.strategy, "grad_norm", None)
        if norm is not None:
            self.norms.append(norm.item())

    def configure_optimizers(self) -> Any:
        if self.hparams["optimizer"] == "sgd":
            return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.1)


def loader(rank: int, steps: int = STEPS, micro_batches: int = MICRO_BATCHES, first: int = 0) -> DataLoader[Any]:
    """Loads the micro-batches of one rank, in order."""
    batches = [batch(first + step, micro, rank) for step in range(steps) for micro in range(micro_batches)]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@contextmanager
def ranks_of_lightning() -> Iterator[None]:
    """Lets Lightning find this process's place, as a launcher's variables do."""
    with mock.patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank()), NODE_RANK="0"):
        yield


def trainer(strategy: Any, folder: Any, **settings: Any) -> L.Trainer:
    defaults = {
        "max_epochs": 1,
        "accumulate_grad_batches": MICRO_BATCHES,
        "gradient_clip_val": CLIP,
        "logger": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        barebones=False,
        **{**defaults, **settings},
    )


@functools.cache
def serial(
    num_ranks: int, optimizer: str = "sgd", steps: int = STEPS, micro_batches: int = MICRO_BATCHES
) -> tuple[list[list[float]], list[float], dict[str, torch.Tensor]]:
    """Trains in one process what all ranks do: returns losses by rank, norms before clipping, weights."""
    model = Net()
    if optimizer == "sgd":
        update: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    else:
        update = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    norms: list[float] = []
    for step in range(steps):
        gradients = mean_gradients(model, step, micro_batches, losses).values()
        norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().float()
        norms.append(norm.item())
        factor = (CLIP / (norm.double() + 1e-6)).clamp(max=1.0).float()
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient * factor
        update.step()
    return losses, norms, {f"net.{name}": p.detach().clone() for name, p in model.named_parameters()}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors of the whole model, on every rank; of the model inside, where a wrapper is given."""
    wrapper: Any = model if isinstance(model, _BaseDataParallel) else owner_of(next(model.parameters()))
    with wrapper.whole_parameters():
        state = model_state_dict(wrapper.module)
        assert not any(isinstance(value, FlatRange) for value in state.values())
        return {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
            for name, value in state.items()
        }


def bounds(num_steps: int) -> dict[str, float]:
    """How far AdamW's weights may be apart where gradients are equal bits: kernels of torch and ours round otherwise.

    Each operation of a step, about ten, rounds by 2^-24 of its operands at most, and an element moves by lr at most.
    """
    return {"rtol": num_steps * 10 * 2.0**-24, "atol": num_steps * 10 * 2.0**-24}
