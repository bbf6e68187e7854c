"""Translates names and layouts of tensors of Hugging Face's GPTs: Llama, Qwen2, Qwen3 and GPT-2.

In `transformers` a Llama has separate projections of queries, keys and values, heads in order, and separate gate and
up; ours are fused, by query group and by alternating rows. Both rotate channel i together with channel i + d / 2, so
that no head is permuted. A GPT-2 fuses queries, keys and values as three blocks, and its weights are transposed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...dist_checkpointing.foreign_layout import Recipe, Run
from .architecture import Architecture
from .hf_config import Layout


def hf_recipes(layout: Layout, architecture: Architecture, *, prefix: str | None = None) -> list[Recipe]:
    """Returns the recipes of our parameters for a Hugging Face model of `architecture`.

    Args:
        prefix: prefix of all names except the output projection's; None means that of a text model.
    """
    if prefix is None:
        prefix = "transformer." if layout == "gpt2" else "model."
    return [*(_gpt2_recipes if layout == "gpt2" else _llama_recipes)(architecture, prefix)]


def names_without_meaning(layout: Layout, architecture: Architecture, prefix: str) -> set[str]:
    """Returns tensors that files of this kind may also have: masks and angles of old versions, a tied output
    weight."""
    layers = range(architecture["num_layers"])
    ignored = {"lm_head.weight"} if architecture.tied else set()
    if layout == "gpt2":
        return ignored | {f"{prefix}h.{n}.attn.{name}" for n in layers for name in ("bias", "masked_bias")}
    return ignored | {f"{prefix}layers.{n}.self_attn.rotary_emb.inv_freq" for n in layers}


def _llama_recipes(a: Architecture, prefix: str) -> Iterator[Recipe]:
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
        for kind in linear:
            gate, up = (f"{theirs}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))
            yield Recipe(f"{ours}.mlp.linear_fc1.{kind}", (Run(gate, ffn, 0, 2), Run(up, ffn, 1, 2)))
            yield _plain(f"{ours}.mlp.linear_fc2.{kind}", f"{theirs}.mlp.down_proj.{kind}", hidden)
    yield _plain("decoder.final_layernorm.weight", f"{prefix}norm.weight", hidden)
    if not a.tied:
        yield _plain("output_layer.weight", "lm_head.weight", a.vocab_size, padded=True)


def _gpt2_recipes(a: Architecture, prefix: str) -> Iterator[Recipe]:
    hidden, ffn = a["hidden_size"], a["ffn_hidden_size"]
    yield _plain("embedding.word_embeddings.weight", f"{prefix}wte.weight", a.vocab_size, padded=True)
    yield _plain("embedding.position_embeddings.weight", f"{prefix}wpe.weight", a.max_sequence_length)
    for layer in range(a["num_layers"]):
        ours, theirs = f"decoder.layers.{layer}", f"{prefix}h.{layer}"
        for kind in ("weight", "bias"):
            turned = kind == "weight"
            yield _plain(f"{ours}.input_layernorm.{kind}", f"{theirs}.ln_1.{kind}", hidden)
            sources = [(f"{theirs}.attn.c_attn.{kind}", block * hidden) for block in range(3)]
            yield Recipe(f"{ours}.self_attention.linear_qkv.{kind}", _qkv_runs(a, sources, transposed=turned))
            for name, other, rows in (
                ("self_attention.linear_proj", "attn.c_proj", hidden),
                ("mlp.linear_fc1", "mlp.c_fc", ffn),
                ("mlp.linear_fc2", "mlp.c_proj", hidden),
            ):
                yield Recipe(f"{ours}.{name}.{kind}", (Run(f"{theirs}.{other}.{kind}", rows, transposed=turned),))
            yield _plain(f"{ours}.pre_mlp_layernorm.{kind}", f"{theirs}.ln_2.{kind}", hidden)
    for kind in ("weight", "bias"):
        yield _plain(f"decoder.final_layernorm.{kind}", f"{prefix}ln_f.{kind}", hidden)
    if not a.tied:
        yield _plain("output_layer.weight", "lm_head.weight", a.vocab_size, padded=True)


def _plain(name: str, source: str, rows: int, *, padded: bool = False) -> Recipe:
    return Recipe(name, (Run(source, rows),), padded)


def _qkv_runs(a: Architecture, sources: list[tuple[str, int]], *, transposed: bool) -> tuple[Run, ...]:
    """Returns the runs of our rows, query group by query group; theirs are all queries, all keys, all values."""
    channels, groups = a["kv_channels"], a["num_query_groups"]
    queries = a["num_attention_heads"] // groups * channels
    runs = []
    for group in range(groups):
        start = group * (queries + 2 * channels)
        for (source, first), rows in zip(sources, (queries, channels, channels), strict=True):
            runs.append(Run(source, rows, start, 1, first + group * rows, transposed))
            start += rows
    return tuple(runs)
