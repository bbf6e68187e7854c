"""Reads the weights of GPTs in Megatron-LM's checkpoints into any layout, running no pickle, and writes them there.

A ``torch_dist`` checkpoint is one of `torch.distributed.checkpoint`: an index (``.metadata``, read by an allow-list)
and files of tensors (``weights_only``). Layers of one kind are stacked, ``decoder.layers.mlp.linear_fc1.weight`` of
shape `[layers, rows, columns]`, or numbered. Experts are likewise stacked, ``mlp.experts.experts.linear_fc1.weight``
of shape `[layers, experts, rows, columns]`, or each has tensors of its own. Queries, keys and values are fused as
here, group by group; gate and up are two blocks. The norms before attention and MLP have the names of Transformer
Engine's fused layers, or their own.

An optimizer's moments have the names of their parameters after ``optimizer.state.<kind>.``, unless they follow
Megatron-LM's buffers. Everything else is ignored: pickles (``common.pt`` with the arguments, random streams) are never
opened here. The model is therefore known only by the shapes of its
tensors: the caller has to know activation, epsilon and rotation.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...base.errors import CheckpointError
from ...base.files import sync_folder, write_durably
from ...dist_checkpointing.agreement import Ranks
from ...dist_checkpointing.foreign_layout import Recipe, Run, foreign_tensors, load_foreign
from ...dist_checkpointing.format.index import INDEX_FILE, TORCH_INDEX_FILE, CheckpointIndex
from ...dist_checkpointing.format.reader import read_index
from ...dist_checkpointing.gathering import TensorStream
from ...dist_checkpointing.safetensors_io import DEFAULT_SHARD_BYTES, save_folder
from .architecture import Architecture, architecture_of, base_state_dict, gpt_of, tensors_to_write
from .expert_weights import dense_architecture, group_routers, upcycle_recipes
from .megatron_legacy import LEGACY_FILES, read_legacy_index

POINTER_FILE = "latest_checkpointed_iteration.txt"

_WORDS = "embedding.word_embeddings.weight"
_MODEL_PARTS = ("embedding.", "decoder.", "output_layer.")


def find_megatron(folder: Path) -> Path | None:
    """Returns the checkpoint in a folder of Megatron-LM's, or the folder itself if it is one, else None."""
    pointer = folder / POINTER_FILE
    if pointer.is_file():
        with pointer.open("rb") as file:
            target = file.read(64).decode("utf-8", errors="replace").strip()  # more is no name of its checkpoints
        folder = folder / (f"iter_{int(target):07d}" if target.isdecimal() else target)
        if target != Path(target).name or not _holds_one(folder):
            raise CheckpointError(
                f"{pointer} names {target!r}, and {folder} is no checkpoint of the formats torch_dist and torch; save "
                "one with --ckpt-format torch_dist"
            )
        return folder
    return folder if _holds_one(folder) and not (folder / INDEX_FILE).is_file() else None


def _holds_one(folder: Path) -> bool:
    return (folder / TORCH_INDEX_FILE).is_file() or any(folder.glob(LEGACY_FILES))


def load_megatron(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    targets: Mapping[str, torch.Tensor] | None = None,
    optimizer: Mapping[str, torch.Tensor] | None = None,
    process_group: ProcessGroup | None = None,
    upcycle: int = 0,
) -> None:
    """Fills a GPT in place with the weights of Megatron-LM's checkpoint. Other arguments as for `load_hugging_face`.

    Args:
        optimizer: `state_tensors` of an optimizer, whose moments are filled too; `targets` are then filled with the
            checkpoint's fp32 masters, where it has them.

    Raises:
        CheckpointError: on all ranks, before anything is written: there is no such checkpoint, it is of another model,
            its index has entries that no description of tensors needs, or it has no moments by parameter.
    """
    gpt, ranks = gpt_of(model), Ranks(process_group)
    if (checkpoint := ranks.on_all(lambda: find_megatron(Path(folder)))) is None:
        raise CheckpointError(
            f"{folder} holds no torch_dist checkpoint of Megatron-LM's, and none of its format torch"
        )
    is_legacy = not (checkpoint / TORCH_INDEX_FILE).is_file()
    index = ranks.on_all(
        lambda: read_legacy_index(checkpoint, architecture_of(gpt)) if is_legacy else read_index(checkpoint)
    )
    names = sorted((name for name in index.tensors if name.endswith(_WORDS)), key=len)  # before those of an optimizer
    if not names:
        raise CheckpointError(f"{checkpoint} has no {_WORDS}: it holds no GPT of Megatron-LM's")
    prefix = names[0].removesuffix(_WORDS)
    ours, targets = architecture_of(gpt), targets or base_state_dict(gpt)
    recipes, everything = [*_recipes(dense_architecture(ours, upcycle) if upcycle else ours, index, prefix)], targets
    weights = {run.source for recipe in recipes for run in recipe.runs}  # masters may take their place
    if optimizer is not None:
        moments = {name: tensor for name, tensor in optimizer.items() if not name.startswith("master.")}
        recipes, targets = [*_with_moments(ours, index, prefix, recipes, moments)], {**targets, **moments}
    if upcycle:
        recipes, targets = upcycle_recipes(ours, recipes, targets, upcycle)
    others = weights | {
        name for name in index.tensors if not name.startswith(tuple(prefix + part for part in _MODEL_PARTS))
    }
    others |= {name for name in index.tensors if (own := name.replace(*_NORM_OF_MLP)) != name and own in index.tensors}
    load_foreign(targets, recipes, index, checkpoint, ignored_names=others, process_group=process_group)
    group_routers(everything, upcycle, process_group)


def _with_moments(
    a: Architecture, index: CheckpointIndex, prefix: str, weights: list[Recipe], moments: Mapping[str, torch.Tensor]
) -> Iterator[Recipe]:
    """Yields the recipes of an optimizer's moments, and of masters where the checkpoint has some, else of weights."""
    masters = _recipes(a, index, f"{_STATE}fp32_param.{prefix}")
    for weight, master in zip(weights, masters, strict=True):
        yield master if all(run.source in index.tensors for run in master.runs) else weight
    for kind in dict.fromkeys(name.partition(".")[0] for name in moments):
        if not any(name.startswith(f"{_STATE}{kind}.") for name in index.tensors):
            raise CheckpointError(
                f"the checkpoint has no {_STATE}{kind} by parameter, as those of the format torch and of a "
                "distributed optimizer; save with --dist-ckpt-optim-fully-reshardable, or take the weights alone by "
                "--no-load-optim"
            )
        for recipe in _recipes(a, index, f"{_STATE}{kind}.{prefix}"):
            if (name := f"{kind}.{recipe.name}") in moments:
                yield replace(recipe, name=name)


_STATE = "optimizer.state."


def save_megatron(
    model: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    process_group: ProcessGroup | None = None,
) -> None:
    """Writes a GPT's weights as a ``torch_dist`` checkpoint for Megatron-LM's ``--load``, in a folder that appears
    atomically.

    It is a `release` there: training starts at iteration 0, with a new optimizer. Arguments, who writes, and errors
    are those of `save_hugging_face`.
    """
    from torch.distributed.checkpoint import metadata as theirs
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    architecture, ours = architecture_of(gpt_of(model)), tensors_to_write(model, "checkpoint of Megatron-LM's")
    places, recipes = dict[str, tuple[str, tuple[int, ...]]](), list[Recipe]()
    for recipe in _recipes(architecture, CheckpointIndex({}, {}), ""):
        for twin in _under_all_names(architecture, recipe):
            named = [(".".join([run.source, *map(str, run.source_index)]), run) for run in twin.runs]
            places |= {name: (run.source, run.source_index) for name, run in named}
            pieces = [replace(run, source=name, source_index=()) for name, run in named]
            recipes.append(replace(twin, runs=tuple(pieces)))
    stream = TensorStream(ours, foreign_tensors(recipes, ours), process_group, dtype=dtype, receivers=[0])
    plan = {meta.name: (meta.dtype, meta.shape) for meta in stream.metadata()}
    stacks = {source: tuple(place + 1 for place in index) for source, index in places.values()}  # the last one's
    tensors, stored = dict[str, Any](), dict[theirs.MetadataIndex, _StorageInfo]()

    def write(path: Path, pieces: Mapping[str, torch.Tensor]) -> None:
        with path.open("wb") as file:
            for name, piece in pieces.items():
                source, index = places[name]
                inner, at, start = (0,) * piece.dim(), (1,) * len(index), file.tell()
                torch.save(piece.reshape(*at, *piece.shape).clone(), file)  # a view would bring its whole storage
                whole = theirs.TensorProperties(dtype=piece.dtype), torch.Size((*stacks[source], *piece.shape))
                entry = tensors.setdefault(source, theirs.TensorStorageMetadata(*whole, []))
                chunk = theirs.ChunkStorageMetadata(torch.Size((*index, *inner)), torch.Size((*at, *piece.shape)))
                entry.chunks.append(chunk)
                of = path.with_suffix(_SUFFIX).name, start, file.tell() - start
                stored[theirs.MetadataIndex(source, chunk.offsets)] = _StorageInfo(*of)

    def describe(into: Path) -> None:
        files = [*into.iterdir()]
        (checkpoint := into / "release").mkdir()
        for path in files:
            path.rename(checkpoint / path.with_suffix(_SUFFIX).name)
        torch.save([None], checkpoint / _NO_STATE)
        for source, index in places.values():
            if (layer := _WITH_STATE.fullmatch(source)) is None:
                continue
            shard = ".".join(map(str, index or (0,))) + "_" + ".".join(map(str, stacks[source] or (1,)))
            for linear in (layer[1], layer[1].replace("linear_qkv", "core_attention")):
                tensors[name := f"{linear}._extra_state/shard_{shard}"] = theirs.BytesStorageMetadata()
                stored[theirs.MetadataIndex(name)] = _StorageInfo(
                    _NO_STATE, 0, (checkpoint / _NO_STATE).stat().st_size
                )
        torch.save(_COMMON, checkpoint / "common.pt")
        (checkpoint / TORCH_INDEX_FILE).write_bytes(pickle.dumps(theirs.Metadata(tensors, storage_data=stored)))
        write_durably(checkpoint / "metadata.json", '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        write_durably(into / POINTER_FILE, "release")
        for path in checkpoint.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(checkpoint)

    ranks, limit = Ranks(process_group), max_shard_bytes
    save_folder(Path(folder), plan, iter(stream), describe, ranks, max_shard_bytes=limit, write=write)


_SUFFIX = ".distcp"
_NO_STATE = "__0_extra.distcp"
_WITH_STATE = re.compile(r"(.*\.linear_(?:qkv|proj|fc1|fc2))\.weight")
"""Layers of Transformer Engine's that have a state in addition to their weights, which Megatron-LM looks for."""
_COMMON = {
    "checkpoint_version": 3.0,
    "iteration": 0,
    "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
}


def _under_all_names(a: Architecture, recipe: Recipe) -> list[Recipe]:
    """Returns a recipe, twice for the norm before experts: its own name, and that of a layer fused with it."""
    if ".pre_mlp_layernorm." not in recipe.name or not a.has_experts(int(recipe.name.split(".")[2])):
        return [recipe]
    (run,) = recipe.runs
    own = replace(run, source=run.source.replace(*_NORM_OF_MLP))
    return [recipe, replace(recipe, runs=(own,))]


_NORM_OF_MLP = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def _recipes(a: Architecture, index: CheckpointIndex, prefix: str) -> Iterator[Recipe]:
    hidden, channels = a["hidden_size"], a["kv_channels"]
    rows_of_qkv = (a["num_attention_heads"] + 2 * a["num_query_groups"]) * channels
    norm = ("weight", "bias") if a["normalization"] == "LayerNorm" else ("weight",)
    linear = ("weight", "bias") if a["add_bias_linear"] else ("weight",)
    qkv = ("weight", "bias") if a["add_bias_linear"] or a["add_qkv_bias"] else ("weight",)

    is_numbered = isinstance(a.transformer.get("moe_layer_freq"), list)
    yield _vocabulary(_WORDS, a, index, prefix)
    if a.position_embedding_type == "learned_absolute":
        name = "embedding.position_embeddings.weight"
        yield Recipe(name, (Run(prefix + name, a.max_sequence_length),))
    for layer in range(a["num_layers"]):
        source = _Layer(layer, index, prefix, is_numbered)
        for kind in norm:
            yield source.plain(f"input_layernorm.{kind}", hidden, f"self_attention.linear_qkv.layer_norm_{kind}")
            yield source.plain(f"pre_mlp_layernorm.{kind}", hidden, f"mlp.linear_fc1.layer_norm_{kind}")
            if a["qk_layernorm"]:
                yield source.plain(f"self_attention.q_layernorm.{kind}", channels)
                yield source.plain(f"self_attention.k_layernorm.{kind}", channels)
        for kind in qkv:
            yield source.plain(f"self_attention.linear_qkv.{kind}", rows_of_qkv)
        for kind in linear:
            yield source.plain(f"self_attention.linear_proj.{kind}", hidden)
            block, ffn = "mlp", a["ffn_hidden_size"]
            if a.has_experts(layer):
                experts, width = a["num_moe_experts"], a["moe_ffn_hidden_size"]
                yield source.plain(f"mlp.router.{kind}", experts)
                yield source.experts(f"linear_fc1.{kind}", width, experts, is_gated=a["gated_linear_unit"])
                yield source.experts(f"linear_fc2.{kind}", hidden, experts)
                if kind == "weight" and a["moe_router_enable_expert_bias"]:
                    yield source.plain("mlp.router.expert_bias", experts)
                if kind == "weight" and a["moe_shared_expert_gate"]:
                    yield source.plain("mlp.shared_experts.gate_weight", 1)
                block, ffn = "mlp.shared_experts", a["moe_shared_expert_intermediate_size"]
            if ffn:
                yield source.plain(f"{block}.linear_fc2.{kind}", hidden)
                name = f"{block}.linear_fc1.{kind}"
                yield source.gated(name, ffn) if a["gated_linear_unit"] else source.plain(name, ffn)
    for kind in norm:
        name = f"decoder.final_layernorm.{kind}"
        yield Recipe(name, (Run(prefix + name, hidden),))
    if not a.ties_embeddings:
        yield _vocabulary("output_layer.weight", a, index, prefix)


def _vocabulary(name: str, a: Architecture, index: CheckpointIndex, prefix: str) -> Recipe:
    """Returns the recipe of a table padded to another multiple than ours: rows beyond theirs have no token."""
    entry = index.tensors.get(prefix + name)
    return Recipe(name, (Run(prefix + name, entry.shape[0] if entry and entry.shape else a.vocab_size),), padded=True)


class _Layer:
    """Finds a layer's tensors, stacked with other layers' tensors or, as Megatron-LM writes unequal ones, numbered."""

    def __init__(self, number: int, index: CheckpointIndex, prefix: str, is_numbered: bool) -> None:
        self.number, self.index, self.prefix, self.is_numbered = number, index, prefix, is_numbered

    def plain(self, name: str, rows: int, *others: str) -> Recipe:
        """Returns the recipe of this layer's tensor `name`, which Megatron-LM stores as `name` or one of `others`. It
        writes the last."""
        return Recipe(f"decoder.layers.{self.number}.{name}", self._runs([name, *others], rows))

    def gated(self, name: str, rows: int) -> Recipe:
        """Returns the recipe of gate and up: ours alternate by row, theirs are halves of one tensor, or two
        tensors."""
        return Recipe(f"decoder.layers.{self.number}.{name}", self._runs([name], rows, pairs=True))

    def experts(self, name: str, rows: int, num_experts: int, *, is_gated: bool = False) -> Recipe:
        """Returns the recipe of a matrix of all experts, or of their biases. Megatron-LM stores one tensor for each
        expert, under three names, or all in one with an axis of experts."""
        runs: list[Run] = []
        for expert in range(num_experts):
            forms = (
                f"experts.{expert}.{name}",
                f"local_experts.{expert}.{name}",
                f"{name}{expert}",
                f"experts.{name}",
            )
            runs += self._runs([f"mlp.experts.{form}" for form in forms], rows, pairs=is_gated, expert=expert)
        return Recipe(f"decoder.layers.{self.number}.mlp.experts.{name}", tuple(runs))

    def _runs(self, names: list[str], rows: int, *, pairs: bool = False, expert: int | None = None) -> tuple[Run, ...]:
        """Returns the runs of a tensor that has one of these names, the last of which has an axis of experts."""
        first, place = self._find(*(f"{name}_w" for name in names if pairs), *names)
        if expert is not None and first.removesuffix("_w").endswith(names[-1]):
            place = (*place, expert)
        if not pairs:
            return (Run(first, rows, source_index=place, index=expert),)
        apart = first.endswith("_w")
        second = f"{first.removesuffix('_w')}_v" if apart else first
        return (
            Run(first, rows, 0, 2, source_index=place, index=expert),
            Run(second, rows, 1, 2, 0 if apart else rows, source_index=place, index=expert),
        )

    def _find(self, *names: str) -> tuple[str, tuple[int, ...]]:
        """Returns the name of a tensor that is there, and the index of this layer in it."""
        places: list[tuple[str, tuple[int, ...]]] = [
            *((f"{self.prefix}decoder.layers.{self.number}.{name}", ()) for name in names),
            *((f"{self.prefix}decoder.layers.{name}", (self.number,)) for name in names),
        ]
        # One that is not there is written, or reported as missing.
        default = places[len(names) - 1 if self.is_numbered else -1]
        return next((place for place in places if place[0] in self.index.tensors), default)
