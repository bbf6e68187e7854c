"""Turns a run into a model that Hugging Face's `transformers` loads, and such a model into a checkpoint.

convert.py --load runs/a --save my-model        # then AutoModelForCausalLM.from_pretrained("my-model")
convert.py --load my-model --save runs/b        # then generate.py --load runs/b
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from core.errors import ConfigError
from core.training.config.arguments import parse_call
from core.training.launch.entry import run_command
from core.training.pretrained import NO_HASHES, flags_of, is_hugging_face, run_from_hugging_face, run_to_hugging_face


def main(arguments: Sequence[str]) -> None:
    parse_call(convert, arguments, name="convert.py")


def convert(
    *,
    load: Path,
    save: Path,
    layout: Literal["llama", "qwen2", "qwen3", "gpt2"] | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    vocab_size: int | None = None,
    max_shard_gb: float = 5.0,
    verify_checkpoint: bool = True,
) -> None:
    """Converts a run to a model of Hugging Face's, or back, depending on --load.

    Args:
        load: Folder of a run, one of its checkpoints, or a model of Hugging Face's.
        save: Folder to write, new or empty.
        layout: Hugging Face's kind of model to write; by default the one with the model's architecture.
        dtype: Dtype of the weights to write for Hugging Face; by default float32.
        vocab_size: Rows of the vocabulary to write; by default all, with the padding.
        max_shard_gb: Largest file to write for Hugging Face, in 10^9 bytes.
        verify_checkpoint: Compare tensors of a run with the hashes that were saved with them.
    """
    if max_shard_gb <= 0:
        raise ConfigError(f"--max-shard-gb is {max_shard_gb}; it takes a positive number")
    if not is_hugging_face(load):
        checkpoint = run_to_hugging_face(
            load,
            save,
            layout=layout,
            dtype=None if dtype is None else getattr(torch, dtype),
            vocab_size=vocab_size,
            max_shard_bytes=int(max_shard_gb * 1e9),
            verify=verify_checkpoint,
            report=print,
        )
        print(f"{checkpoint} is {save} now: AutoModelForCausalLM.from_pretrained({str(save)!r})")
        return
    given = {"--layout": layout, "--dtype": dtype, "--vocab-size": vocab_size}
    stray = [flag for flag, value in given.items() if value is not None]
    if stray:
        raise ConfigError(
            f"{stray[0]} is about what is written for Hugging Face, and {load} comes from there; drop it"
        )
    checkpoint, architecture = run_from_hugging_face(load, save)
    print(NO_HASHES.format(load))
    print(f"{load} is {checkpoint} now; to train on from its weights:")
    print(f"pretrain_gpt.py --pretrained-checkpoint {load} {shlex.join(flags_of(architecture))}")


if __name__ == "__main__":
    run_command(main)
