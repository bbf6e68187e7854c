"""Continues a prompt with a model that pretrain_gpt.py saved: `generate.py --load runs/... --prompt 'def '`.

The folder of the run says everything about the model. Only its weights are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from core.datasets.tokenizer import Tokenizer, load_tokenizer
from core.device import current_device
from core.dist_checkpointing import load_metadata
from core.errors import DataError
from core.models.gpt import GPTModel
from core.training.arguments import parse_call
from core.training.checkpointing import TOKENIZER_FILE, check_is_run, find_checkpoint, load_weights
from core.training.config import PretrainConfig
from core.training.entry import run_command
from core.training.generation import SamplingConfig, generate_tokens, stream_text


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
) -> None:
    """Writes text with a trained GPT.

    Args:
        load: Folder of the run, or one of its checkpoints.
        prompt: What the text starts with; empty, it starts like a document.
        num_tokens: Most tokens to write; an end of document ends it earlier.
        temperature: Below 1 the likely becomes likelier; 0 always takes the likeliest token.
        top_k: Draw from the k likeliest tokens alone; 0 from all.
        top_p: Draw from the fewest tokens whose probabilities reach this sum.
        seed: Seed of the draws.
    """
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    checkpoint = find_checkpoint(load)
    config, model = load_model(checkpoint)
    tokenizer = load_run_tokenizer(checkpoint)
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


def load_model(checkpoint: Path) -> tuple[PretrainConfig, nn.Module]:
    """The model of a checkpoint, whole in this process however many ranks trained it, and its run's settings."""
    metadata = load_metadata(checkpoint)
    check_is_run(metadata, checkpoint)
    config = PretrainConfig.from_json(metadata["config"])
    alone = replace(
        config.model,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        sequence_parallel=False,
        perform_initialization=False,  # the checkpoint fills every parameter
    )
    model = GPTModel(
        alone,
        metadata["vocab_size"],
        config.max_sequence_length,
        share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
        position_embedding_type=config.gpt.position_embedding_type,
    )
    load_weights(model, checkpoint)
    if (config.model.fp16 or config.model.bf16) and current_device().type == "cuda":
        model = model.to(torch.float16 if config.model.fp16 else torch.bfloat16)
    return config, model.to(current_device())


def load_run_tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer that the run kept beside its checkpoints."""
    path = checkpoint.parent / TOKENIZER_FILE
    if not path.exists():
        raise DataError(f"{path} does not exist: the run had no tokenizer; put the corpus's tokenizer.json there")
    return load_tokenizer(path)


if __name__ == "__main__":
    run_command(main)
