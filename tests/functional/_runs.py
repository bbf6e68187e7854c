"""Short training runs of a small GPT under any wrapper, and the serial run that is their oracle."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.transformer_config import TransformerConfig

# Odd widths: two ranks divide neither the hidden size, nor the MLP's, nor the vocabulary.
HIDDEN, FFN, VOCABULARY, SEQUENCE, MICRO_BATCHES = 15, 37, 61, 13, 4

WRAPPERS = {"ddp": DistributedDataParallelConfig, "fsdp2": TorchFullyShardedDataParallelConfig}


@dataclass
class Curve:
    """What a run did: exact per-step numbers, and the last step's gradients and weights, whole."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def build_gpt(tied: bool, *, vocab: int = VOCABULARY, **fields: Any) -> GPTModel:
    """A GPT of two layers whose weights a seed decides; ``fields`` override its config."""
    torch.manual_seed(7)
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "num_attention_heads": 3,
            "num_query_groups": 1,
            "kv_channels": 6,
            "gated_linear_unit": True,
            "activation_func": "silu",
            "normalization": "RMSNorm",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": 0.2,
            **fields,
        }
    )
    return GPTModel(config, vocab, SEQUENCE, share_embeddings_and_output_weights=tied)


def micro_batches(step: int, rank: int) -> list[torch.Tensor]:
    """Micro-batches `[2, s + 1]` of a sequence that can be learned: each token follows from the one before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = [torch.randint(0, VOCABULARY, (MICRO_BATCHES, 2), generator=generator)]
    for _ in range(SEQUENCE):
        tokens.append((5 * tokens[-1] + 1) % VOCABULARY)
    return list(torch.stack(tokens, dim=-1))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())  # [b, s]
    return losses.mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = getattr(parameter, "main_grad", None)
    return whole(parameter.grad if gradient is None else gradient)


def run_wrapped(wrapper: str, optimizer_fields: dict[str, Any], steps: int, tied: bool, **fields: Any) -> Curve:
    """Trains on this rank's micro-batches under a wrapper; every rank calls it."""
    module = build_gpt(tied, **fields)
    model = wrap_model(module, module.config, WRAPPERS[wrapper](), process_group=dist.group.WORLD)
    optimizer = get_megatron_optimizer(OptimizerConfig(**optimizer_fields), [model])
    curve = Curve()
    for step in range(steps):
        model.zero_grad_buffer()
        mean = torch.zeros(())
        batches = micro_batches(step, dist.get_rank())
        for index, tokens in enumerate(batches):
            with nullcontext() if index == MICRO_BATCHES - 1 else model.no_sync():
                loss = loss_of(model, tokens) / MICRO_BATCHES
                loss.backward()
            mean += loss.detach()
        finalize_model_grads([model])
        if step == steps - 1:
            curve.gradients = {name: _gradient(p) for name, p in module.named_parameters()}
        succeeded, grad_norm, _ = optimizer.step()
        assert succeeded
        dist.all_reduce(mean)
        curve.losses.append((mean / dist.get_world_size()).item())
        curve.grad_norms.append(grad_norm)
    curve.weights = {name: whole(p) for name, p in module.named_parameters()}
    return curve


def run_serial(optimizer_fields: dict[str, Any], steps: int, tied: bool, ranks: int = 2, **fields: Any) -> Curve:
    """The same training without a wrapper: one process goes through the micro-batches of all ranks."""
    model = build_gpt(tied, **fields)
    optimizer = get_megatron_optimizer(OptimizerConfig(**optimizer_fields), [model])
    curve = Curve()
    for step in range(steps):
        optimizer.zero_grad()
        mean = 0.0
        for rank in range(ranks):
            for tokens in micro_batches(step, rank):
                loss = loss_of(model, tokens) / (MICRO_BATCHES * ranks)
                loss.backward()
                mean += loss.item()
        if step == steps - 1:
            curve.gradients = {name: _gradient(p) for name, p in model.named_parameters()}
        _, grad_norm, _ = optimizer.step()
        curve.losses.append(mean)
        curve.grad_norms.append(grad_norm)
    curve.weights = {name: whole(p) for name, p in model.named_parameters()}
    return curve
