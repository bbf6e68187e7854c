"""Runs torchtitan's own trainer on the CPU: its constructor and its `train_step`, with tokens of the test's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

STEPS, MICRO_BATCHES, SAMPLES, SEQUENCE, VOCAB, LR = 3, 3, 2, 16, 2048, 8e-4


@contextmanager
def cpu_is_the_device() -> Iterator[None]:
    """torchtitan chooses its device when it is imported, and takes CUDA where there is no accelerator."""
    memory = SimpleNamespace(device_name="cpu", get_peak_stats=mock.MagicMock(), reset_peak_stats=lambda: None)
    memory.get_peak_stats.return_value = SimpleNamespace(
        max_reserved_gib=0.0,
        max_reserved_pct=0.0,
        max_active_gib=0.0,
        max_active_pct=0.0,
        num_alloc_retries=0,
        num_ooms=0,
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch._utils._get_available_device_type", lambda: "cpu"))
        import_models()
        from torchtitan.components import metrics
        from torchtitan.tools import utils

        assert utils.device_type == "cpu", "torchtitan was imported before"
        stack.enter_context(mock.patch.object(metrics, "build_device_memory_monitor", lambda: memory))
        stack.enter_context(mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}))
        yield


def import_models() -> None:
    """torchtitan's models import its kernels for experts, which need triton: that comes with torch for CUDA alone."""
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", mock.MagicMock())
    importlib.import_module("torchtitan.models.llama3")


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCAB, (SAMPLES, SEQUENCE + 1), generator=generator)


def labels_of(text: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns the next tokens; each rank ignores another number of them."""
    labels = text[:, 1:].clone()
    labels[:, : 2 + 3 * rank] = -100
    return labels


def _batches(rank: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            text = tokens(step, micro, rank)
            yield {"input": text[:, :-1]}, labels_of(text, rank)


def config_of(dump_folder: str, *, chunked: bool = False, tied: bool = False) -> Any:
    """Returns torchtitan's config of its smallest Llama, with two layers, in fp32."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others are compiled, for GPUs
    if not chunked:
        config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    config.activation_checkpoint = None
    config.dump_folder = dump_folder
    config.training.local_batch_size = SAMPLES
    config.training.global_batch_size = SAMPLES * MICRO_BATCHES * dist.get_world_size()
    config.training.seq_len = SEQUENCE
    config.training.mixed_precision_param = "float32"
    config.lr_scheduler.warmup_steps = 0
    config.validator.enable = False
    config.checkpoint.enable = False
    config.model_spec.model.enable_weight_tying = tied
    config.tokenizer = SimpleNamespace(build=lambda **_: None)
    config.dataloader = SimpleNamespace(build=lambda **_: None)
    return config


def train(
    config: Any, before: Callable[[nn.Module], None] = lambda model: None
) -> tuple[list[float], list[float], Any]:
    """Trains; returns the mean loss over all tokens and the norm of each step, as the trainer logs them, and the
    trainer."""
    from torchtitan.trainer import Trainer

    trainer = Trainer(config)
    model = trainer.model_parts[0]
    fill(model)
    before(model)
    losses: list[float] = []
    norms: list[float] = []

    def log(step: int, mean: float, largest: float, norm: float, **_: Any) -> None:
        losses.append(float(mean))
        norms.append(norm)

    trainer.metrics_processor.log = log
    data = trainer.batch_generator(_batches(dist.get_rank()))
    for step in range(STEPS):
        trainer.step = step + 1
        trainer.train_step(data)
    return losses, norms, trainer


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Gives a model, sharded or whole, the same weights on any number of ranks: on the CPU its DTensors would not."""
    from core.base.parameters import copy_shard

    for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
        generator = torch.Generator().manual_seed(index)
        whole = torch.randn(parameter.shape, generator=generator) * 0.05
        copy_shard(whole if parameter.ndim > 1 else whole + 1.0, parameter)


def serial(config: Any, ranks: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Trains in one process what all ranks do: torchtitan's model, and plain torch around it."""
    model = config.model_spec.model.build()
    model.init_weights(buffer_device=None)
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [(tokens(step, micro, rank), rank) for micro in range(MICRO_BATCHES) for rank in range(ranks)]
        count = sum(int((labels_of(text, rank) != -100).sum()) for text, rank in batches)
        total = 0.0
        for text, rank in batches:
            logits = model(text[:, :-1]).float()
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels_of(text, rank).flatten(), reduction="sum", ignore_index=-100
            )
            (loss / count).backward()
            total += loss.item() / count
        losses.append(total)
        norms.append(_clip(model, config.training.max_norm))
        optimizer.step()
    return losses, norms, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _clip(model: nn.Module, largest: float) -> float:
    """Clips as torchtitan does, with a norm in fp64: in fp32 the sum of an embedding's squares is off by 1e-5."""
    norm = sum(p.grad.double().square().sum() for p in model.parameters()) ** 0.5
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, largest / (norm.item() + 1e-6)))
    return norm.item()
