"""Turns a run into a model that Hugging Face's `transformers` loads, and such a model into a checkpoint.

convert.py --load runs/a --save my-model        # then AutoModelForCausalLM.from_pretrained("my-model")
convert.py --load my-model --save runs/b        # then generate.py --load runs/b
convert.py --load runs/a --save there --layout megatron    # then Megatron-LM's pretrain_gpt.py --load there
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pretrained import NO_HASHES, is_hugging_face
from run_model import load_run_model, load_run_tokenizer

from shardstack.base.errors import CheckpointError, ConfigError
from shardstack.base.files import write_durably
from shardstack.dist_checkpointing import checkpoint_directory, model_state_dict, save
from shardstack.dist_checkpointing.good_checkpoints import find_checkpoint
from shardstack.models.gpt import GPTModel
from shardstack.models.gpt.architecture import EXPERT_FIELDS, TRANSFORMER_FIELDS, Architecture
from shardstack.models.gpt.hf_config import Layout
from shardstack.models.gpt.hugging_face import hf_architecture, load_hugging_face, save_hugging_face
from shardstack.models.gpt.megatron_layout import save_megatron
from shardstack.tensor_parallel.groups import pad_vocab_size
from shardstack.tokenizers import load_tokenizer
from shardstack.training.checkpointing import TOKENIZER_FILE, save_tokenizer
from shardstack.training.config import PretrainConfig
from shardstack.training.config.arguments import parse_call
from shardstack.training.config.build import NEGATED, OTHER_NAMES, build_config
from shardstack.training.launch.entry import run_command

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def main(arguments: Sequence[str]) -> None:
    parse_call(convert, arguments, name="convert.py")


def convert(
    *,
    load: Path,
    save: Path,
    layout: Literal["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "glm4_moe", "gpt2", "megatron"] | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    vocab_size: int | None = None,
    max_shard_gb: float = 5.0,
    verify_checkpoint: bool = True,
) -> None:
    """Converts a run to a model of Hugging Face's, or back, depending on --load; or to weights for Megatron-LM.

    Args:
        load: Folder of a run, one of its checkpoints, or a model of Hugging Face's.
        save: Folder to write, new or empty.
        layout: Hugging Face's kind of model to write; by default the one with the model's architecture. `megatron`
            writes a torch_dist checkpoint for Megatron-LM.
        dtype: Dtype of the weights to write for Hugging Face; by default float32.
        vocab_size: Rows of the vocabulary to write; by default all, with the padding.
        max_shard_gb: Largest file to write for Hugging Face, in 10^9 bytes.
        verify_checkpoint: Compare tensors of a run with the hashes that were saved with them.
    """
    if max_shard_gb <= 0:
        raise ConfigError(f"--max-shard-gb is {max_shard_gb}; it takes a positive number")
    if layout == "megatron" and not is_hugging_face(load):
        if vocab_size is not None:
            raise ConfigError("--vocab-size is about Hugging Face's models; Megatron-LM takes any padding: drop it")
        checkpoint = find_checkpoint(load)
        _, model = load_run_model(checkpoint, verify=verify_checkpoint, report=print)
        bytes_of_file = int(max_shard_gb * 1e9)
        save_megatron(model, save, dtype=dtype and getattr(torch, dtype), max_shard_bytes=bytes_of_file)
        print(f"{checkpoint} is {save} now: Megatron-LM's pretrain_gpt.py --load {save} --ckpt-format torch_dist")
        return
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
    print(f"shardstack train --pretrained-checkpoint {shlex.join([str(load), *flags_of(architecture)])}")


def run_to_hugging_face(
    root: Path,
    folder: Path,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    verify: bool = True,
    report: Callable[[str], None] | None = None,
    **details: Any,
) -> Path:
    """Writes the latest checkpoint of a run as a model that `transformers` loads, with its tokenizer if it has one.

    Weights are fp32 unless `dtype` says otherwise; `verify` and `report` are those of
    :func:`shardstack.dist_checkpointing.load`, other arguments as `save_hugging_face` takes.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or the layout cannot express its model.
    """
    checkpoint = find_checkpoint(root)
    _, model = load_run_model(checkpoint, verify=verify, report=report)
    tokenizer = load_run_tokenizer(checkpoint) if (checkpoint.parent / TOKENIZER_FILE).exists() else None
    ids = {"eos_token_id": tokenizer.eod} if tokenizer is not None else {}
    save_hugging_face(model, folder, layout=layout, dtype=dtype, vocab_size=vocab_size, config=ids, **details)
    if tokenizer is not None:
        with _unwritable_as_error(folder):
            tokenizer.save(folder / TOKENIZER_FILE)
            path = folder / TOKENIZER_CONFIG_FILE  # the class would be guessed from the model's kind
            described = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
            write_durably(path, json.dumps(described, indent=1))
    return checkpoint


def run_from_hugging_face(folder: Path, root: Path) -> tuple[Path, Architecture]:
    """Writes a model of Hugging Face's as a checkpoint with weights only, in fp32, and its tokenizer if it has one.

    Returns:
        The checkpoint, and the model's architecture.

    Raises:
        CheckpointError: the model is of an unknown kind, or the folder is in use.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise CheckpointError(f"{root} exists and is not empty; choose another folder, or move it away")
    architecture = hf_architecture(folder)
    config = build_config(settings_of(architecture))
    rows = pad_vocab_size(architecture.vocab_size, config.gpt.make_vocab_size_divisible_by)
    model = architecture.build(vocab_size=rows, perform_initialization=False)
    load_hugging_face(model, folder)
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE) if (folder / TOKENIZER_FILE).is_file() else None
    save_weights(model, config, root)
    if tokenizer is not None:
        with _unwritable_as_error(root):
            save_tokenizer(tokenizer, root)
    return checkpoint_directory(root, 0), architecture


@contextmanager
def _unwritable_as_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be written ({error.strerror}); make room") from None


def save_weights(model: GPTModel, config: PretrainConfig, root: Path) -> None:
    """Writes ``root/iter_0000000`` with only the weights of a model that is whole in this process."""
    tensors = {f"model.{name}": tensor for name, tensor in model_state_dict(model).items()}
    metadata = {
        "iteration": 0,
        "consumed_samples": 0,
        "optimizer": {},
        "scheduler": {},
        "vocab_size": model.vocab_size,
        "config": config.to_json(),
        "model_tensors": sorted(tensors),
        "rng_bytes": 0,
        "layout": {"ranks": 1, "tensor": 1, "context": 1},
    }
    save(tensors, checkpoint_directory(root, 0), metadata=metadata)


def flags_of(architecture: Architecture) -> list[str]:
    """Returns the flags of `pretrain_gpt.py` for a run of this model."""
    settings = settings_of(architecture)
    flags: list[str] = []
    names = (*TRANSFORMER_FIELDS, *EXPERT_FIELDS, "position_embedding_type", "max_position_embeddings")
    for name in names:
        value, dashed = settings.get(name), name.replace("_", "-")
        if value is None:
            continue
        flag = OTHER_NAMES.get(name, (f"--{dashed}",))[0]
        if isinstance(value, bool):
            flags.append(flag if value else NEGATED.get(name, f"--no-{dashed}"))
        else:
            flags += [flag, str(value)]
    return flags + ([] if architecture.ties_embeddings else ["--untie-embeddings-and-output-weights"])


def settings_of(architecture: Architecture) -> dict[str, Any]:
    """Returns settings of a run that could have made the model. Those about training only are arbitrary."""
    length = architecture.max_sequence_length
    return {
        **architecture.transformer,
        "position_embedding_type": architecture.position_embedding_type,
        "max_position_embeddings": length,
        "untie_embeddings_and_output_weights": not architecture.ties_embeddings,
        "seq_length": length,
        "micro_batch_size": 1,
        "train_iters": 1,
        "lr": 0.0,
    }


if __name__ == "__main__":
    run_command(main)
