"""Trains a GPT on two ranks, and after each step sends its weights to a server in a process of its own.

    python -m shardstack.training.launch --nproc-per-node 2 examples/weights/train_and_generate.py

The server generates with the weights that it has received. Here the first rank starts it; in practice it runs
elsewhere, and is given the address. If that is not of this machine alone, both need the secret of the job:
SHARDSTACK_JOB_SECRET_FILE, as docs/weights-out.md shows.
"""

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shardstack.rendezvous.default_group
from shardstack import parallel_state
from shardstack.distributed import FullyShardedDataParallelConfig, finalize_model_grads, wrap_model
from shardstack.models.gpt import GPTModel
from shardstack.optimizer import OptimizerConfig, get_megatron_optimizer
from shardstack.transformer.transformer_config import TransformerConfig
from shardstack.weights import WeightReceiver, WeightSender, WeightStream

STEPS, VOCABULARY, LENGTH = 3, 64, 16


def build() -> GPTModel:
    """Returns the model that the trainer and the server have."""
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, attention_dropout=0.0)
    return GPTModel(config, None, VOCABULARY, LENGTH, share_embeddings_and_output_weights=True, parallel_output=False)


def serve(address: str) -> None:
    """Receives each version, and generates four tokens with it."""
    receiver, model = WeightReceiver(address, 0, 1), build().eval()
    for _ in range(STEPS + 1):
        version = receiver.receive()
        model.load_state_dict(receiver.weights)
        tokens = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            for _ in range(4):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
        print(f"server: version {version} continues with {tokens[0, 3:].tolist()}", flush=True)


def train(address: str) -> None:
    """Trains, and sends what a step has changed."""
    shardstack.rendezvous.default_group.init_process_group()
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    gpt = build()
    model = wrap_model(gpt, gpt.config, FullyShardedDataParallelConfig())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-6), [model])  # at which few of bf16's bits change
    is_first = dist.get_rank() == 0
    server = subprocess.Popen([sys.executable, Path(__file__), "serve", address]) if is_first else None

    stream = WeightStream(model, "module", dtype=torch.bfloat16, receivers=[0])
    sender = WeightSender(stream, address, 1, patches=True)
    sender.send(0)
    all_bytes = sender.sent_bytes
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1))
        model.zero_grad_buffer()
        model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
        finalize_model_grads([model])
        optimizer.step()
        sender.send_patch(step)
        if is_first:
            print(f"trainer: step {step} sent {sender.sent_bytes} bytes of {all_bytes}", flush=True)
    if server is not None:
        server.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        train(sys.argv[1] if len(sys.argv) > 1 else "localhost:29655")
