"""A Megatron-style `get_model` and `train_step`, in which the class of the wrapper is all that changes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer import TransformerConfig
from core.transformer.module import Float16Module
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import full

STEPS, MICRO_BATCHES, VOCAB, SEQUENCE = 3, 2, 16, 8


def model_provider(config: TransformerConfig) -> nn.Module:
    return GPTModel(config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, position_embedding_type="rope")


def get_model(config: TransformerConfig, ddp_config: DistributedDataParallelConfig, DP: Any) -> list[nn.Module]:
    """Builds a model as Megatron-LM's ``get_model``, with the class as an argument: the script's whole difference."""
    model = [model_provider(config)]
    if config.fp16 or config.bf16:
        model = [Float16Module(config, module) for module in model]
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        model = [
            DP(
                config=config,
                ddp_config=ddp_config,
                module=module,
                # Buckets of later chunks would leave too late to overlap.
                disable_bucketing=index > 0,
            )
            for index, module in enumerate(model)
        ]
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    for module in model:
        module.broadcast_params()
    return model


def train_step(model: list[nn.Module], optimizer: Any, batches: list[torch.Tensor]) -> tuple[list[float], float, Any]:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = []
    for index, tokens in enumerate(batches):
        is_last = index == len(batches) - 1
        with nullcontext() if is_last else model[0].no_sync():
            loss = model[0](tokens, torch.arange(SEQUENCE).expand_as(tokens), None, labels=tokens.roll(-1, 1)).mean()
            optimizer.scale_loss(loss / len(batches)).backward()
        losses.append(loss.item())
    finalize_model_grads(model)
    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()
    assert update_successful
    return losses, grad_norm, num_zeros_in_grad


def _train(DP: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    parallel_state.initialize_model_parallel()
    torch.manual_seed(7 + dist.get_rank())  # broadcast_params, or the wrapper, makes replicas equal
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    model = get_model(config, DistributedDataParallelConfig(), DP)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=1.0), model)
    history = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batches = [torch.randint(0, VOCAB, (2, SEQUENCE), generator=generator) for _ in range(MICRO_BATCHES)]
        history.append(train_step(model, optimizer, batches))
    return history, {name: full(p) for name, p in model[0].module.named_parameters()}


@on_ranks(2)
def test_a_script_that_swaps_the_class_trains_to_the_same_bits():
    replicated, expected = _train(DistributedDataParallel)
    parallel_state.destroy_model_parallel()
    sharded, found = _train(TorchFullyShardedDataParallel)
    assert sharded == replicated
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
