"""GRPO in one group of ranks: a mixture of experts under any wrapper, and a toy server on the first rank.

    python -m shardstack.training.launch --nproc-per-node 2 examples/post_training/grpo.py [STRATEGY] [ROUNDS]

STRATEGY is no_shard, optim, optim_grads, optim_grads_params or fsdp2. In each round

1. the server gets the weights that changed,
2. the trainer frees its memory, and the server samples, noting which experts each token had,
3. the trainer takes its memory back, and makes a step in which each token has the same experts.

A sample is rewarded for counting upwards from its prompt, which is one number.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shardstack.rendezvous.default_group
from shardstack import parallel_state
from shardstack.base.device import current_device
from shardstack.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from shardstack.models.gpt import GPTModel
from shardstack.optimizer import OptimizerConfig, get_megatron_optimizer
from shardstack.transformer.moe.router_replay import record, replay
from shardstack.transformer.transformer_config import TransformerConfig
from shardstack.weights import PatchStream, WeightStream

VOCABULARY, LENGTH, PROMPTS, SAMPLES = 12, 6, 12, 16
CLIP = 0.2
WRAPPERS = {"optim_grads_params": FullyShardedDataParallelConfig, "fsdp2": TorchFullyShardedDataParallelConfig}


def build() -> GPTModel:
    """Returns the model that the trainer and the server have."""
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, attention_dropout=0.0, hidden_dropout=0.0, **experts
    )
    return GPTModel(config, None, VOCABULARY, LENGTH, parallel_output=False)


def log_probabilities(model, tokens):
    """Returns the log probability of each token but the first, `[b, s - 1]`."""
    logits = model(tokens[:, :-1]).float()
    return -F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


class Server:
    """What vLLM or SGLang is in practice: it takes weights and patches, and samples."""

    def __init__(self, device):
        self.model = build().to(device).eval()

    def take(self, name, tensor):
        self.model.state_dict()[name].copy_(tensor)  # it shares the model's memory

    def patch(self, patches):
        tensors = self.model.state_dict()
        for patch in patches:
            patch.check(tensors[patch.name])
            patch.apply(tensors[patch.name])

    @torch.no_grad()
    def sample(self, number):
        """Returns tokens `[samples, s]`, their log probabilities, and experts `[samples, s - 1, layers, k]`."""
        torch.manual_seed(number)
        tokens = torch.arange(PROMPTS, device=current_device()).repeat_interleave(SAMPLES)[:, None]
        while tokens.shape[1] <= LENGTH:
            probabilities = self.model(tokens)[:, -1].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], 1)
        with record(self.model) as experts:
            old_log_probs = log_probabilities(self.model, tokens)
        return tokens, old_log_probs, experts[0]


def sampled(server, number):
    """Returns what the first rank's server samples, on all ranks."""
    shape = (PROMPTS * SAMPLES, LENGTH)
    if server is not None:
        tokens, old_log_probs, experts = server.sample(number)
    else:
        device = current_device()
        tokens = torch.empty(shape[0], LENGTH + 1, dtype=torch.int64, device=device)
        old_log_probs = torch.empty(shape, device=device)
        experts = torch.empty(*shape, 2, 2, dtype=torch.int32, device=device)
    for tensor in (tokens, old_log_probs, experts.contiguous()):
        dist.broadcast(tensor, 0)
    return tokens, old_log_probs, experts


def advantages(tokens):
    """Returns the mean reward, and of each sample how far it is above those of its prompt, in deviations."""
    rewards = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY).float().mean(1)
    by_prompt = rewards.view(PROMPTS, SAMPLES)
    above = by_prompt - by_prompt.mean(1, keepdim=True)
    return rewards.mean().item(), (above / (by_prompt.std(1, keepdim=True) + 1e-4)).flatten()


def main(strategy="optim_grads_params", rounds="20"):
    shardstack.rendezvous.default_group.init_process_group()
    parallel_state.initialize_model_parallel()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    gpt = build().to(current_device())
    settings = WRAPPERS.get(strategy) or DistributedDataParallelConfig
    options = {} if strategy in WRAPPERS else {"data_parallel_sharding_strategy": strategy}
    model = wrap_model(gpt, gpt.config, settings(**options))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, clip_grad=1.0), [model])

    server = Server(current_device()) if rank == 0 else None
    stream = WeightStream(model, "module", receivers=[0])
    patches = PatchStream(stream)
    patches.restart()
    for name, tensor in stream:
        if server is not None:
            server.take(name, tensor)
    patches.acknowledge()

    for number in range(int(rounds)):
        for changed in patches.changes():
            if server is not None:
                server.patch(changed)
        patches.acknowledge()

        freed = model.release()
        tokens, old_log_probs, experts = sampled(server, number)
        model.restore()

        reward, above = advantages(tokens)
        own = slice(rank * len(tokens) // ranks, (rank + 1) * len(tokens) // ranks)
        model.zero_grad_buffer()
        with replay(model, experts[own]):
            log_probs = log_probabilities(model, tokens[own])
        ratio = (log_probs - old_log_probs[own]).exp()
        gain = torch.minimum(ratio * above[own, None], ratio.clamp(1 - CLIP, 1 + CLIP) * above[own, None])
        (-gain.mean()).backward()
        finalize_model_grads([model])
        optimizer.step()
        difference = (log_probs - old_log_probs[own]).abs().max().item()
        if rank == 0:
            print(f"round {number}: reward {reward:.3f}, freed {freed} bytes, off by {difference:.0e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
