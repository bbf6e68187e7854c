"""Trains a small GPT for three steps under PyTorch FSDP2.

    python -m shardstack.training.launch --nproc-per-node 2 examples/minimal.py

`wrap_model` with another config is the same training under another wrapper, with the same numbers.
"""

from contextlib import nullcontext

import torch

import shardstack.base.device
import shardstack.rendezvous.default_group
from shardstack import parallel_state
from shardstack.distributed import TorchFullyShardedDataParallelConfig, finalize_model_grads, wrap_model
from shardstack.models.gpt import GPTModel
from shardstack.optimizer import OptimizerConfig, get_megatron_optimizer
from shardstack.transformer.transformer_config import TransformerConfig

shardstack.rendezvous.default_group.init_process_group()  # one rank, or as many as a launcher started
parallel_state.initialize_model_parallel()
device = shardstack.base.device.current_device()

config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
gpt = GPTModel(config, None, vocab_size=256, max_sequence_length=32, share_embeddings_and_output_weights=True)
gpt.to(device)
data = [[torch.randint(0, 256, (4, 33), device=device) for _ in range(2)] for _ in range(3)]

model = wrap_model(gpt, config, TorchFullyShardedDataParallelConfig())  # or DistributedDataParallelConfig()
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model])
for step, micro_batches in enumerate(data):
    model.zero_grad_buffer()
    for i, tokens in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean() / len(micro_batches)
            loss.backward()
    finalize_model_grads([model])
    updated, grad_norm, _ = optimizer.step()
    if torch.distributed.get_rank() == 0:
        print(f"step {step}: loss {loss.item() * len(micro_batches):.3f}, gradient norm {grad_norm:.3f}")

torch.distributed.destroy_process_group()
