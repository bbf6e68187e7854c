"""Starts a model with experts from the weights of a dense one (Komatsuzaki et al., 2022, and He et al., 2024).

Every expert is a copy of the layer's MLP, and the router is new. Where the probabilities `p` of a token's experts add
up to one, the model computes at first what the dense one does, whatever the router chooses:

    sum over its experts e of p_e MLP_e(x)  =  (sum over e of p_e) MLP(x)  =  MLP(x)

They do for a softmax over the chosen experts, and for normalized scores of two or more; not with
`moe_router_pre_softmax` or `moe_router_topk_scaling_factor`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ...base.errors import CheckpointError, warn_once
from ...dist_checkpointing.foreign_layout import Recipe
from .architecture import Architecture

_MLP = re.compile(r"(decoder\.layers\.(\d+)\.mlp)\.(linear_fc\d\.\w+)")


def dense_architecture(a: Architecture) -> Architecture:
    """Returns the architecture of the dense model whose MLPs the experts of `a` are copies of.

    Raises:
        CheckpointError: there is none.
    """
    if a["num_moe_experts"] is None:
        raise CheckpointError("moe_use_upcycling is set for a model without experts; give --num-experts, or drop it")
    shared, width = a["moe_shared_expert_intermediate_size"], a["moe_ffn_hidden_size"]
    if shared is not None or width != a["ffn_hidden_size"]:
        raise CheckpointError(
            f"moe_use_upcycling copies an MLP of width {a['ffn_hidden_size']} into each expert, which has "
            f"moe_ffn_hidden_size {width} and moe_shared_expert_intermediate_size {shared}; leave out both"
        )
    by_softmax, scale = a["moe_router_score_function"] == "softmax", a["moe_router_topk_scaling_factor"]
    if a["moe_router_pre_softmax"] or scale is not None or (not by_softmax and a["moe_router_topk"] == 1):
        warn_once(
            "the model starts as another one than the dense model that is upcycled: the probabilities of a token's "
            "experts do not add up to one; drop moe_router_pre_softmax and moe_router_topk_scaling_factor to start "
            "with its loss"
        )
    fields = {name: value for name, value in a.transformer.items() if not name.startswith("moe_")}
    return replace(a, transformer=fields | {"num_moe_experts": None})


def upcycled(
    a: Architecture, recipes: Iterable[Recipe], targets: Mapping[str, torch.Tensor]
) -> tuple[list[Recipe], dict[str, torch.Tensor]]:
    """Returns the recipes of a model with experts from those of its dense model, and the tensors that they fill.

    Args:
        targets: tensors of the model with experts; its routers are left out of the result.
    """
    recipes_of_experts = []
    for recipe in recipes:
        match = _MLP.fullmatch(recipe.name)
        if match is not None and a.has_experts(int(match[2])):
            runs = tuple(replace(run, index=expert) for expert in range(a["num_moe_experts"]) for run in recipe.runs)
            recipe = Recipe(f"{match[1]}.experts.{match[3]}", runs)
        recipes_of_experts.append(recipe)
    return recipes_of_experts, {name: tensor for name, tensor in targets.items() if ".mlp.router." not in name}
