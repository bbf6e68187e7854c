"""Saves GPTs into folders that `transformers` loads, and loads them from such folders, under any layout.

    save_hugging_face(model, "my-model")                          # all ranks call it
    AutoModelForCausalLM.from_pretrained("my-model")              # elsewhere

    load_hugging_face(model, "my-model")                          # each rank reads its part of each tensor

Both need `safetensors` (extra `hf`), not `transformers`.

Translates names and layouts of tensors of Llama, Qwen2, Qwen3 and GPT-2, and of models with experts
(`expert_weights.py`). In `transformers` a Llama has separate projections of queries, keys and values, heads in order,
and separate gate and up; ours are fused, by query group and by alternating rows. Both rotate channel i together with
channel i + d / 2, so that no head is permuted. A GPT-2 fuses queries, keys and values as three blocks, and its weights
are transposed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...base.dtypes import dtype_name
from ...base.errors import CheckpointError
from ...base.files import BoundsError, read_json, write_durably
from ...dist_checkpointing.agreement import Ranks
from ...dist_checkpointing.foreign_layout import Recipe, Run, foreign_tensors, load_foreign
from ...dist_checkpointing.gathering import TensorStream
from ...dist_checkpointing.safetensors_io import DEFAULT_SHARD_BYTES, read_safetensors_index, save_folder
from .architecture import Architecture, Layout, architecture_of, base_state_dict, gpt_of, tensors_to_write
from .expert_weights import dense_architecture, expert_recipes, group_routers, upcycle_recipes
from .hf_config import architecture_from_hf, check_fits, check_layout, choose_layout, hf_config, layout_of


def hf_recipes(layout: Layout, architecture: Architecture, *, prefix: str | None = None) -> list[Recipe]:
    """Returns the recipes of our parameters for a Hugging Face model of `architecture`.

    Args:
        prefix: prefix of all names except the output projection's; None means that of a text model.
    """
    if prefix is None:
        prefix = "transformer." if layout == "gpt2" else "model."
    if layout == "gpt2":
        return [*_gpt2_recipes(architecture, prefix)]
    return [*_llama_recipes(layout, architecture, prefix)]


def names_without_meaning(
    layout: Layout, architecture: Architecture, prefix: str, names: Iterable[str] = ()
) -> set[str]:
    """Returns tensors that files of this kind may also have: masks and angles of old versions, a tied output
    weight.

    Args:
        names: those of the files, for layers after the last one that predict further tokens.
    """
    layers = range(architecture["num_layers"])
    names_there = {"lm_head.weight"} if architecture.ties_embeddings else set()
    if layout == "glm4_moe":
        names_there |= {name for name in names if name.startswith(f"{prefix}layers.{len(layers)}.")}
    if layout == "gpt2":
        return names_there | {f"{prefix}h.{n}.attn.{name}" for n in layers for name in ("bias", "masked_bias")}
    return names_there | {f"{prefix}layers.{n}.self_attn.rotary_emb.inv_freq" for n in layers}


def _llama_recipes(layout: Layout, a: Architecture, prefix: str) -> Iterator[Recipe]:
    hidden, ffn = a["hidden_size"], a["ffn_hidden_size"]
    linear = ("weight", "bias") if a["add_bias_linear"] else ("weight",)
    yield _plain("embedding.word_embeddings.weight", f"{prefix}embed_tokens.weight", a.vocab_size, padded=True)
    for layer in range(a["num_layers"]):
        ours, theirs = f"decoder.layers.{layer}", f"{prefix}layers.{layer}"
        yield _plain(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", hidden)
        for kind in ("weight", "bias") if a["add_qkv_bias"] else linear:
            sources = [(f"{theirs}.self_attn.{name}_proj.{kind}", 0) for name in "qkv"]
            yield Recipe(f"{ours}.self_attention.linear_qkv.{kind}", _qkv_runs(a, sources, transposed=False))
        if a["qk_layernorm"]:
            for name in "qk":
                norm = f"{ours}.self_attention.{name}_layernorm.weight"
                yield _plain(norm, f"{theirs}.self_attn.{name}_norm.weight", a["kv_channels"])
        for kind in linear:
            yield _plain(f"{ours}.self_attention.linear_proj.{kind}", f"{theirs}.self_attn.o_proj.{kind}", hidden)
        yield _plain(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", hidden)
        if a.has_experts(layer):
            yield from expert_recipes(layout, a, ours, theirs)
            continue
        for kind in linear:
            gate, up = (f"{theirs}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))
            yield Recipe(f"{ours}.mlp.linear_fc1.{kind}", (Run(gate, ffn, 0, 2), Run(up, ffn, 1, 2)))
            yield _plain(f"{ours}.mlp.linear_fc2.{kind}", f"{theirs}.mlp.down_proj.{kind}", hidden)
    yield _plain("decoder.final_layernorm.weight", f"{prefix}norm.weight", hidden)
    if not a.ties_embeddings:
        yield _plain("output_layer.weight", "lm_head.weight", a.vocab_size, padded=True)


def _gpt2_recipes(a: Architecture, prefix: str) -> Iterator[Recipe]:
    hidden, ffn = a["hidden_size"], a["ffn_hidden_size"]
    yield _plain("embedding.word_embeddings.weight", f"{prefix}wte.weight", a.vocab_size, padded=True)
    yield _plain("embedding.position_embeddings.weight", f"{prefix}wpe.weight", a.max_sequence_length)
    for layer in range(a["num_layers"]):
        ours, theirs = f"decoder.layers.{layer}", f"{prefix}h.{layer}"
        for kind in ("weight", "bias"):
            by_columns = kind == "weight"
            yield _plain(f"{ours}.input_layernorm.{kind}", f"{theirs}.ln_1.{kind}", hidden)
            sources = [(f"{theirs}.attn.c_attn.{kind}", block * hidden) for block in range(3)]
            yield Recipe(f"{ours}.self_attention.linear_qkv.{kind}", _qkv_runs(a, sources, transposed=by_columns))
            for name, other, rows in (
                ("self_attention.linear_proj", "attn.c_proj", hidden),
                ("mlp.linear_fc1", "mlp.c_fc", ffn),
                ("mlp.linear_fc2", "mlp.c_proj", hidden),
            ):
                yield Recipe(f"{ours}.{name}.{kind}", (Run(f"{theirs}.{other}.{kind}", rows, transposed=by_columns),))
            yield _plain(f"{ours}.pre_mlp_layernorm.{kind}", f"{theirs}.ln_2.{kind}", hidden)
    for kind in ("weight", "bias"):
        yield _plain(f"decoder.final_layernorm.{kind}", f"{prefix}ln_f.{kind}", hidden)
    if not a.ties_embeddings:
        yield _plain("output_layer.weight", "lm_head.weight", a.vocab_size, padded=True)


def _plain(name: str, source: str, rows: int, *, padded: bool = False) -> Recipe:
    return Recipe(name, (Run(source, rows),), padded)


def _qkv_runs(a: Architecture, sources: list[tuple[str, int]], *, transposed: bool) -> tuple[Run, ...]:
    """Returns the runs of rows of a fused qkv tensor, by query group, from queries, keys and values stored apart."""
    channels, groups = a["kv_channels"], a["num_query_groups"]
    queries = a["num_attention_heads"] // groups * channels
    runs = []
    for group in range(groups):
        start = group * (queries + 2 * channels)
        for (source, first), rows in zip(sources, (queries, channels, channels), strict=True):
            runs.append(Run(source, rows, start, 1, first + group * rows, transposed))
            start += rows
    return tuple(runs)


CONFIG_FILE = "config.json"


def save_hugging_face(
    model: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike[str],
    *,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    process_group: ProcessGroup | None = None,
) -> None:
    """Writes a GPT as sharded safetensors with ``config.json``, in a folder that appears atomically.

    Collective over `process_group`. Its first rank writes, with the tensors of one file at a time in host memory;
    other ranks hold no whole parameter.

    Args:
        model: a `GPTModel`, or a wrapper of one, or all of this rank's pipeline stages.
        folder: a new or empty folder.
        layout: None chooses the kind with the model's architecture.
        dtype: None keeps each tensor's dtype.
        vocab_size: rows of the vocabulary to write, without the model's padding; None writes all.
        config: further entries for ``config.json``, such as the ids of special tokens.
        max_shard_bytes: bytes of the tensors in one file.

    Raises:
        CheckpointError: on all ranks: the layout cannot express the model, or the folder is in use.
        MissingExtraError: `safetensors` is not installed; with several ranks, a CheckpointError that says so.
    """
    folder, ranks, gpt = Path(folder), Ranks(process_group), gpt_of(model)
    architecture = architecture_of(gpt)
    layout = choose_layout(architecture) if layout is None else layout
    check_layout(layout, architecture)
    if vocab_size is not None and not 0 < vocab_size <= architecture.vocab_size:
        raise CheckpointError(f"vocab_size is {vocab_size}; the model has {architecture.vocab_size} rows")
    architecture = replace(architecture, vocab_size=vocab_size or architecture.vocab_size)
    recipes = hf_recipes(layout, architecture)
    ours = tensors_to_write(model, layout)
    stream = TensorStream(ours, foreign_tensors(recipes, ours), process_group, dtype=dtype, receivers=[0])
    plan = {meta.name: (meta.dtype, meta.shape) for meta in stream.metadata()}

    def describe(into: Path) -> None:
        kinds = [plan[tensor.name][0] for tensor in stream.outgoing if not tensor.sources[0].endswith("expert_bias")]
        largest = max(kinds, key=lambda kind: kind.itemsize)
        settings = hf_config(layout, architecture, dtype=dtype_name(largest)) | dict(config or {})
        write_durably(into / CONFIG_FILE, json.dumps(settings, indent=2) + "\n")

    save_folder(folder, plan, iter(stream), describe, ranks, max_shard_bytes=max_shard_bytes)


def load_hugging_face(
    model: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike[str],
    *,
    targets: Mapping[str, torch.Tensor] | None = None,
    process_group: ProcessGroup | None = None,
    upcycle: int = 0,
) -> None:
    """Fills a GPT in place from a folder of Hugging Face's, under any layout.

    Each rank reads its part of each tensor; rows of the vocabulary that the folder does not have become zeros. An
    optimizer built before has fp32 masters of low-precision weights: call its `reload_model_params`.

    Args:
        model: a `GPTModel`, or a wrapper of one, or all of this rank's pipeline stages.
        targets: tensors of the whole model to fill instead of the model's own, by name: an optimizer's masters.
        process_group: the ranks that call together; each reads by itself.
        upcycle: the folder is of a dense model; fill each expert with a copy of the layer's MLP (1, or True), or of
            one of so many pieces of it, by Megatron-LM's granularity (`expert_weights.py`).

    Raises:
        CheckpointError: on all ranks, before anything is written: it is another model, or files are damaged.
        MissingExtraError: see :func:`save_hugging_face`.
    """
    folder, ranks, gpt = Path(folder), Ranks(process_group), gpt_of(model)
    config = ranks.on_all(lambda: read_hf_config(folder))
    layout, theirs, whole = layout_of(config), architecture_from_hf(config), architecture_of(gpt)
    ours = dense_architecture(whole, upcycle) if upcycle else whole
    if differing := ours.differences(theirs):
        raise CheckpointError(
            f"{folder} is of another model: {', '.join(differing)} (here and there); build the model that it describes"
        )
    if theirs.vocab_size > ours.vocab_size:
        raise CheckpointError(
            f"{folder} has a vocabulary of {theirs.vocab_size}, and the model's has {ours.vocab_size} rows; build it "
            "with at least as many"
        )
    index = ranks.on_all(lambda: read_safetensors_index(folder))
    prefix = "transformer." if layout == "gpt2" else "model."
    if not any(name.startswith(prefix) for name in index.tensors):
        prefix = ""  # saved without its head
    recipes, targets = hf_recipes(layout, theirs, prefix=prefix), targets or base_state_dict(model)
    everything = targets
    if upcycle:
        recipes, targets = upcycle_recipes(whole, recipes, targets, upcycle)
    load_foreign(
        targets,
        recipes,
        index,
        folder,
        ignored_names=names_without_meaning(layout, theirs, prefix, index.tensors),
        process_group=process_group,
    )
    group_routers(everything, upcycle, process_group)


def read_hf_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads ``config.json``.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        config = read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); give the folder of a model") from error
    except BoundsError as error:
        raise CheckpointError(f"{path} is no JSON that describes a model ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} does not describe a model")
    return config


def hf_architecture(folder: str | os.PathLike[str]) -> Architecture:
    """Returns the architecture of a model in Hugging Face's format, once it is checked to be no larger than its files.

    Raises:
        CheckpointError: no model here can express the one in the folder.
    """
    try:
        architecture = architecture_from_hf(read_hf_config(folder))
        tensors = read_safetensors_index(Path(folder)).tensors
        check_fits(architecture, sum(math.prod(entry.shape) for entry in tensors.values()), len(tensors))
        return architecture
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
