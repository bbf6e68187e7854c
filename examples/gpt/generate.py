"""Continues a prompt with a model that pretrain_gpt.py saved: `generate.py --load runs/... --prompt 'def '`.

The folder of the run describes the model. Only its weights are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from run_model import load_run_model, load_run_tokenizer
from sampling import SamplingConfig, generate_tokens, stream_text

from shardstack.base.errors import ConfigError
from shardstack.dist_checkpointing.good_checkpoints import find_checkpoint
from shardstack.training.config.arguments import parse_call
from shardstack.training.launch.entry import run_command


def main(arguments: Sequence[str]) -> None:
    parse_call(generate, arguments, name="generate.py")


def generate(
    *,
    load: Path,
    prompt: str = "",
    num_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    verify_checkpoint: bool = True,
) -> None:
    """Writes text with a trained GPT.

    Args:
        load: Folder of the run, or one of its checkpoints.
        prompt: Start of the text; an empty one starts a document.
        num_tokens: Most tokens to write; an end of document stops earlier.
        temperature: Below 1 likely tokens become likelier; 0 always takes the likeliest one.
        top_k: Draw only from the k likeliest tokens; 0 draws from all.
        top_p: Draw from the fewest tokens whose probabilities reach this sum.
        seed: Seed of the draws.
        verify_checkpoint: Compare the weights with the hashes that were saved with them.
    """
    if num_tokens < 1:
        raise ConfigError(f"--num-tokens is {num_tokens}; it takes a positive number")
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    checkpoint = find_checkpoint(load)
    tokenizer = load_run_tokenizer(checkpoint)
    config, model = load_run_model(checkpoint, verify=verify_checkpoint, report=note)
    tokens = generate_tokens(
        model,
        tokenizer.encode(prompt).tolist() or [tokenizer.eod],
        num_tokens,
        sampling,
        vocab_size=tokenizer.vocab_size,
        max_sequence_length=config.max_sequence_length,
        end=tokenizer.eod,
    )
    print(prompt, end="", flush=True)
    for piece in stream_text(tokenizer, tokens):
        print(piece, end="", flush=True)
    print()


def note(line: str) -> None:
    """Prints a line that is no text of the model to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
