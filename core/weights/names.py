"""Translates a model's tensors to the names and layouts of other systems, and says what each one is made of.

Names and rows are those of the files that `shardstack.models.gpt.hugging_face` writes, by the same recipes. The update
of a LoRA adapter is added to its layer's weight on the way, or goes out alone under PEFT's names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.parameters import is_packed
from ..dist_checkpointing.agreement import pipeline_ranks
from ..dist_checkpointing.foreign_layout import Recipe, Run, foreign_tensors
from ..dist_checkpointing.gathering import Outgoing
from ..models.gpt.architecture import architecture_of
from ..models.gpt.gpt_model import GPTModel
from ..models.gpt.hf_config import choose_layout
from ..models.gpt.hugging_face import hf_recipes
from ..transformer.lora import Adapter, is_adapter
from .peft_layers import Merge, added_names, merges_of

Names = Literal["hugging_face", "megatron", "module"]
Adapters = Literal["merge", "only"]

_PEFT = "base_model.model."
_LOW_IN, _LOW_OUT = ".adapter.linear_in.weight", ".adapter.linear_out.weight"
_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3"), ("mlp", ("gate_proj", "up_proj", "down_proj"))
    ),
}
"""For transformers' models that stack their experts: the block and the weights of an expert in files. The experts of
gpt-oss are stacked in files too."""

_Update = tuple[float, str, str]
"""Scale of a LoRA adapter, and the names of its factors: the one next to the input, and the other."""


def outgoing(
    stages: Sequence[nn.Module], views: Mapping[str, Tensor], names: Names, adapters: Adapters = "merge"
) -> list[Outgoing]:
    """Returns what goes out of a model, in a fixed order. Collective over the pipeline if it has several stages.

    Args:
        stages: this rank's, without wrappers: of most models one. Other models than `GPTModel` have their own names in
            any case.
        views: tensors of the whole model, by name; equal names on every rank.
        adapters: add the updates of LoRA adapters to the weights, or send these alone.

    Raises:
        ConfigError: adapters alone of a model without any, or names that this model's layout does not have.
        CheckpointError: no model of Hugging Face's computes what this one does.
    """
    recipes = list(recipes_of(stages[0], views, names))
    if adapters == "only":
        sent = list(_adapters_only(views, recipes, names))
        if not sent:
            raise ConfigError("adapters='only' was given for a model without adapters; call add_lora first")
        return sent
    updates = dict(update for stage in stages for update in _updates(stage))
    updates = dict(update for of_rank in pipeline_ranks().all_gather(updates) for update in of_rank.items())
    merges: dict[str, Merge] = {
        name: ((name, low_in, low_out), partial(_updated, name, (scale, low_in, low_out)))
        for name, (scale, low_in, low_out) in updates.items()
    } | dict(merges_of(stages[0], views))
    if packed := [name for name in merges if is_packed(views[name])]:
        raise ConfigError(
            f"{packed[0]} holds packed codes, which the update of an adapter cannot be added to; use adapters='only'"
        )
    return [
        replace(tensor, sources=merges[name][0], make=partial(_merged, tensor.make, name, merges[name]))
        if (name := tensor.sources[0]) in merges
        else tensor
        for tensor in foreign_tensors(recipes, views)
    ]


def recipes_of(model: nn.Module, views: Mapping[str, Tensor], names: Names) -> Iterator[Recipe]:
    """Yields what each tensor is made of, in other systems' names. Arguments and errors as for `outgoing`.

    Leaves out LoRA adapters.
    """
    if names == "hugging_face" and isinstance(model, GPTModel):
        architecture = architecture_of(model)
        yield from hf_recipes(choose_layout(architecture), architecture)
        return
    added = added_names(model, views)
    if names == "hugging_face" and hasattr(model, "get_base_model") and not added:
        raise ConfigError("of PEFT's adapters only those of layers go out here; give the base model")
    in_base = added and names == "hugging_face"
    own = [name for name in views if not (is_adapter(name) or name in added)]
    sources = {name: name_without_adapters(name) if in_base else name for name in own}
    kind = getattr(getattr(model, "config", None), "model_type", "")
    stacks = names == "hugging_face" and kind != "gpt_oss" and any(map(_is_stacked, sources.values()))
    if stacks and kind not in _EXPERTS:
        raise ConfigError(
            f"a model of type {kind!r} keeps its experts as 3-D tensors, and whether its files do is not known here; "
            "use names='module', and split them on the receivers' side"
        )
    block, weights = _EXPERTS[kind] if stacks else ("mlp", ())
    gated = isinstance(model, GPTModel) and model.config.gated_linear_unit and names == "megatron"
    for name, source in sources.items():
        view, source = views[name], source.replace(".mlp.", f".{block}.")
        rows = view.shape[0] if view.dim() else 1
        if gated and ".linear_fc1." in name and view.dim() < 3:
            half = rows // 2
            yield Recipe(name, (Run(name, half, 0, 2), Run(name, half, 1, 2, half)))
        elif stacks and _is_stacked(source):
            stem, _, last = source.rpartition(".")
            parts = weights[:2] if last == "gate_up_proj" else weights[2:]
            rows = view.shape[1] // len(parts)
            places = itertools.product(range(view.shape[0]), enumerate(parts))
            runs = (Run(f"{stem}.{e}.{part}.weight", rows, n * rows, index=e) for e, (n, part) in places)
            yield Recipe(name, tuple(runs))
        else:
            yield Recipe(name, (Run(source, rows),))


def _is_stacked(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def _updates(model: nn.Module) -> Iterator[tuple[str, _Update]]:
    """Yields the names of weights that our own LoRA adapters change."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            layer = name.removesuffix(".adapter")
            yield f"{layer}.weight", (module.scale, layer + _LOW_IN, layer + _LOW_OUT)


def _updated(name: str, update: _Update, wholes: Mapping[str, Tensor]) -> Tensor:
    scale, low_in, low_out = update
    return torch.add(wholes[name], wholes[low_out] @ wholes[low_in], alpha=scale)


def _merged(
    make: Callable[[Mapping[str, Tensor]], Tensor], name: str, merge: Merge, wholes: Mapping[str, Tensor]
) -> Tensor:
    return make({name: merge[1](wholes)})


def _adapters_only(views: Mapping[str, Tensor], recipes: Sequence[Recipe], names: Names) -> Iterator[Outgoing]:
    """Yields LoRA's matrices: of ours under PEFT's names of the layers that they adapt, of peft's under its own."""
    recipe_of = {recipe.name: recipe for recipe in recipes}
    for name, view in views.items():
        as_it_is = Outgoing(name, tuple(view.shape), (name,), itemgetter(name))
        if ".lora_" in name or ".modules_to_save." in name:
            yield replace(as_it_is, name=_without_adapter_name(name))
        elif is_adapter(name) and names == "module":
            yield as_it_is
        elif name.endswith((_LOW_IN, _LOW_OUT)):
            is_out = name.endswith(_LOW_OUT)
            layer = name.removesuffix(_LOW_OUT if is_out else _LOW_IN)
            runs = (replace(run, transposed=False) for run in recipe_of[layer + ".weight"].runs)
            for tensor in foreign_tensors([Recipe(name, tuple(runs))], views):
                stem = _PEFT + tensor.name.removesuffix(".weight")
                # Queries, keys and values share the factor next to the input; so do gate and up.
                yield replace(tensor if is_out else as_it_is, name=f"{stem}.lora_{'B' if is_out else 'A'}.weight")


def name_without_adapters(name: str) -> str:
    """Returns the name in the base model of a tensor of one with adapters of PEFT. Returns any other name as it is."""
    return _without_adapter_name(name.removeprefix(_PEFT).replace(".base_layer", ""))


def _without_adapter_name(name: str) -> str:
    """Returns the name in PEFT's files: ``x.lora_A.default.weight`` is ``x.lora_A.weight`` there."""
    stem, _, kind = name.rpartition(".")
    if ".modules_to_save." in name:
        before, _, after = name.partition(".modules_to_save.")
        return f"{before}.{after.partition('.')[2]}"
    return f"{stem.rpartition('.')[0]}.{kind}" if ".lora_" in stem and not stem.endswith(("_A", "_B")) else name
