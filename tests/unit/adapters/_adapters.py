"""Every adapter with the same request: a small model, an adapter by its name, and the serial run as the oracle."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from core.adapters import ml, optimus, oumi
from core.adapters.nemo import fsdp2_strategy_parallelize, nvfsdp_strategy_parallelize
from core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    _BaseDataParallel,
    wrap_model,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit.distributed._toys import Block, full
from tests.unit.distributed._toys import gradients as reduced_gradients

STRATEGIES = ("full", "grad_op", "hybrid", "replicated")
STEPS = 4


class Net(nn.Module):
    """Tokens in, the loss of the next ones out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 7)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(7, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten().roll(-1))


class Task:
    """What `ml` calls around a model's run."""

    def on_before_forward_step(self, model: nn.Module, batch: Any, state: Any) -> None: ...

    def run_model(self, model: nn.Module, batch: Any, state: Any) -> Any:
        return model(batch)

    def on_after_forward_step(self, model: nn.Module, batch: Any, output: Any, state: Any) -> None: ...

    def compute_loss(self, model: nn.Module, batch: Any, state: Any, output: Any) -> Any:
        return output

    def on_after_compute_loss(self, model: nn.Module, batch: Any, output: Any, loss: Any, state: Any) -> None: ...


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, 11, (2, 4), generator=generator)


def mesh_for(strategy: str) -> DeviceMesh:
    """Returns a mesh of one axis, or two: as many replicas as half of the ranks in a hybrid, and as ranks when
    replicated."""
    world = dist.get_world_size()
    if strategy in ("full", "grad_op"):
        return init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    replicas = world if strategy == "replicated" else 2
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))


def _wrapper(model: nn.Module, strategy: str, bf16: bool, offload: bool) -> nn.Module:
    if strategy == "replicated":
        settings: Any = DistributedDataParallelConfig()
    else:
        settings = TorchFullyShardedDataParallelConfig(
            reshard_after_forward=strategy != "grad_op",
            param_dtype="bf16" if bf16 else None,
            reduce_dtype="fp32" if bf16 else None,
            cpu_offload=offload,
        )
    mesh = mesh_for(strategy)
    return wrap_model(model, SimpleNamespace(), settings, process_group=mesh, sub_modules_to_wrap=(Block,))


def _fsdp2(model: nn.Module, strategy: str, bf16: bool, offload: bool) -> nn.Module:
    return fsdp2_strategy_parallelize(
        model,
        mesh_for(strategy),
        None if bf16 else MixedPrecisionPolicy(),
        None,
        CPUOffloadPolicy(pin_memory=False) if offload else None,
        reshard_after_forward=strategy != "grad_op",
    )


def _nvfsdp(model: nn.Module, strategy: str, bf16: bool, offload: bool) -> nn.Module:
    strategies = {"grad_op": "optim_grads", "replicated": "no_shard"}
    return nvfsdp_strategy_parallelize(
        model.bfloat16() if bf16 else model,
        mesh_for(strategy),
        ["tests.unit.distributed._toys.Block"],
        data_parallel_sharding_strategy=strategies.get(strategy, "optim_grads_params"),
        preserve_fp32_weights=bf16,
        grad_reduce_in_fp32=bf16,
    )


def _oumi(model: nn.Module, strategy: str, bf16: bool, offload: bool) -> nn.Module:
    names = {"full": "FULL_SHARD", "grad_op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD", "replicated": "NO_SHARD"}
    block = {
        "enable_fsdp": True,
        "sharding_strategy": names[strategy],
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls": "Block",
        "mixed_precision": "bf16" if bf16 else None,
        "cpu_offload": offload,
    }
    return oumi.prepare_model(model, oumi.FSDPParams(**block))


def _optimus(model: nn.Module, strategy: str, bf16: bool, offload: bool) -> nn.Module:
    sharding = dist.get_world_size() // 2 if strategy == "hybrid" else None
    collective = optimus.MeshCollective(sharding_world_size=sharding)
    if strategy == "replicated":
        return optimus.DDPTransform(optimus.DDPTransformConfig(), collective, torch.device("cpu")).apply(model)
    config = optimus.FullyShardTransformConfig(
        reshard_after_forward=strategy != "grad_op",
        mixed_precision=optimus.MixedPrecisionConfig("bf16", "float32") if bf16 else None,
        offload=optimus.OffloadConfig(cpu_offload=offload, pin_memory=False),
        use_hybrid_sharding=strategy == "hybrid",
    )
    return optimus.FullyShardTransform(config, collective, torch.device("cpu")).apply(model)


def _ml(model: nn.Module, strategy: str, bf16: bool, offload: bool) -> nn.Module:
    names = {"full": "FULL_SHARD", "grad_op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD", "replicated": "NO_SHARD"}
    config = ml.ParallelConfig(
        strategy != "replicated", offload, names[strategy] if strategy != "replicated" else "HYBRID_SHARD"
    )
    return ml.dp(ml.TaskModel(Task(), model), config)


ADAPTERS: dict[str, Callable[[nn.Module, str, bool, bool], nn.Module]] = {
    "wrapper": _wrapper,
    "fsdp2": _fsdp2,
    "nvfsdp": _nvfsdp,
    "oumi": _oumi,
    "optimus": _optimus,
    "ml": _ml,
}
WITHOUT_BF16, WITHOUT_OFFLOAD = ("ml",), ("nvfsdp",)
"""Adapters that have no setting for it."""


def enter(adapter: str, model: nn.Module, strategy: str, bf16: bool = False, offload: bool = False) -> nn.Module:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(dist.get_world_size() // 2)):
        return ADAPTERS[adapter](model, strategy, bf16, offload)


def units_of(model: nn.Module) -> list[str]:
    """Returns the names of what is sharded, in the plain model."""
    return [_plain(name) for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("module", "model"))


def _micro_batch(model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    if hasattr(model, "accumulation_context"):
        return model.accumulation_context(is_last)
    if isinstance(model, _BaseDataParallel):
        return nullcontext() if is_last else model.no_sync()
    model.set_requires_gradient_sync(is_last)
    return nullcontext()


def train(
    model: nn.Module, adapter: str, micro_batches: int = 1
) -> tuple[list[float], list[dict[str, torch.Tensor]], Any]:
    """Trains: returns this rank's losses, whole gradients of every step, and the weights after the last."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=0.5, sgd_momentum=0.9, weight_decay=0.0, clip_grad=0.0), [model]
    )
    losses, gradients = [], []
    for step in range(STEPS):
        model.zero_grad_buffer() if isinstance(model, _BaseDataParallel) else optimizer.zero_grad()
        for micro in range(micro_batches):
            with _micro_batch(model, micro == micro_batches - 1):
                tokens = batch(step, micro, dist.get_rank())
                loss = model(tokens, None) if adapter == "ml" else model(tokens)
                (loss / micro_batches).backward()
            losses.append(loss.item())
        if isinstance(model, _BaseDataParallel):
            model.finish_grad_sync()
        gradients.append(_whole_gradients(model))
        optimizer.step()
    if hasattr(model, "finish_param_sync"):
        model.finish_param_sync()
    return losses, gradients, {_plain(name): full(p) for name, p in model.named_parameters()}


def _whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, _BaseDataParallel):
        return {_plain(name): gradient.cpu() for name, gradient in reduced_gradients(model).items()}
    return {_plain(name): full(p.grad) for name, p in model.named_parameters()}


@functools.cache
def serial(num_ranks: int, micro_batches: int = 1) -> tuple[list[list[float]], list[dict[str, torch.Tensor]], Any]:
    """Trains in one process what all ranks do: returns losses by rank, mean gradients by step, weights."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    gradients = []
    for step in range(STEPS):
        means = mean_gradients(model, step, micro_batches, losses)
        for name, p in model.named_parameters():
            p.grad = means[name].clone()
        gradients.append(means)
        optimizer.step()
    return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def mean_gradients(
    model: nn.Module, step: int, micro_batches: int, losses: list[list[float]]
) -> dict[str, torch.Tensor]:
    """Returns the mean of all ranks' gradients in a step, added in the order of ranks, by the names of parameters.

    Args:
        losses: by rank; those of the step's micro-batches are appended.
    """
    totals: dict[str, torch.Tensor] = {}
    for rank, of_rank in enumerate(losses):
        model.zero_grad()
        for micro in range(micro_batches):
            loss = model(batch(step, micro, rank))
            (loss / micro_batches).backward()
            of_rank.append(loss.item())
        for name, p in model.named_parameters():
            totals[name] = totals[name] + p.grad if rank else p.grad.clone()
    return {name: total / len(losses) for name, total in totals.items()}
