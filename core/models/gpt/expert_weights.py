"""Experts whose weights come from elsewhere: from models of Hugging Face, or from a dense model.

In files of Hugging Face every expert has tensors of its own, which `transformers` stacks when it loads them. `mixtral`
and `qwen3_moe` choose by softmax. `glm4_moe` has the router of DeepSeek-V3 (DeepSeek-AI, 2024): scores by sigmoid, a
bias for the choice, groups of experts, scaled probabilities, and shared experts.

Upcycling starts a model with experts from a dense one (Komatsuzaki et al., 2022, and He et al., 2024). Each MLP is
split into `granularity` pieces of its inner width, and an expert is a copy of one: expert e of piece e mod
granularity. With a granularity of 1 experts are whole MLPs. Routers are new. Experts that make up an MLP have equal
rows of it, so that a token takes all of them. Where the probabilities of a token's experts add up to one, the model
computes at first what the dense one does, whatever the router chooses: with `p` of each expert of a group

    sum over groups of p (sum over its pieces of granularity x piece(x))  =  sum over groups of (granularity p) MLP(x)
                                                                          =  MLP(x)

They do for a softmax over the chosen experts, and for normalized scores of two or more; not with
`moe_router_pre_softmax` or `moe_router_topk_scaling_factor`. The second matrix is multiplied by the granularity.
Megatron-LM spreads this factor over both matrices, which is equal for a homogeneous activation function alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ...base.errors import CheckpointError, warn_once
from ...dist_checkpointing.foreign_layout import Recipe, Run
from ...dist_checkpointing.gathering import TensorStream
from ...dist_checkpointing.global_view import held_boxes
from .architecture import HF_LAYOUTS, Architecture, Layout

_MLP = re.compile(r"(decoder\.layers\.(\d+)\.mlp)\.(linear_fc\d\.\w+)")
LAYOUTS_WITH_EXPERTS = tuple(layout for layout, known in HF_LAYOUTS.items() if "experts" in known)
_TOPK = "num_experts_per_tok"
_SCORED_BEST = 2
"""Experts of a group whose scores `transformers` adds up to the group's."""


def expert_fields(layout: Layout, get: Any, num_layers: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of `TransformerConfig` about experts, and the settings that none of them expresses.

    Args:
        get: reads a value of ``config.json``, or an optional size by ``get.size``.
    """
    fields: dict[str, Any] = {name: get.size(*names) for name, names in HF_LAYOUTS[layout]["experts"].items()}
    topk = fields["moe_router_topk"] = get.size(_TOPK)
    normalizes, problems = get("norm_topk_prob", layout != "qwen3_moe"), []
    if layout == "qwen3_moe":
        fields["moe_router_pre_softmax"] = not normalizes
        step, dense = get.size("decoder_sparse_step", default=1), get("mlp_only_layers", [])
        if not isinstance(dense, list):
            problems.append("mlp_only_layers without a list")
            dense = []
        fields["moe_layer_freq"] = [int((n + 1) % step == 0 and n not in dense) for n in range(num_layers)]
    elif layout == "glm4_moe":
        dense = get.size("first_k_dense_replace", default=1, least=0, most=num_layers)
        fields |= {
            "moe_layer_freq": [0] * dense + [1] * (num_layers - dense),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
            "moe_router_topk_scaling_factor": get.number("routed_scaling_factor", 1.0),
            "moe_router_num_groups": get.size("n_group", default=1),
            "moe_router_group_topk": get.size("topk_group", default=1),
            "moe_shared_expert_intermediate_size": (
                get.size("n_shared_experts", default=1) * fields["moe_ffn_hidden_size"]
            ),
        }
        if bool(normalizes) != (topk > 1):
            problems.append(f"norm_topk_prob {normalizes} with {_TOPK} {topk}")
        groups, top_groups = fields["moe_router_num_groups"], fields["moe_router_group_topk"]
        if groups != 1 and topk // top_groups != _SCORED_BEST:
            problems.append(
                f"moe_router_topk {topk} in {top_groups} of {groups} groups (a group's score is that of its "
                f"{_SCORED_BEST} best experts there, and of its {topk // top_groups} here)"
            )
    return fields, problems


def expert_settings(layout: Layout, a: Architecture) -> dict[str, Any]:
    """Returns what ``config.json`` says of experts."""
    settings = {names[0]: a[name] for name, names in HF_LAYOUTS[layout]["experts"].items()}
    settings[_TOPK] = a["moe_router_topk"]
    dense = [n for n in range(a["num_layers"]) if not a.has_experts(n)]
    if layout == "qwen3_moe":
        settings |= {"norm_topk_prob": not a["moe_router_pre_softmax"]}
        settings |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    elif layout == "glm4_moe":
        settings |= {
            "first_k_dense_replace": len(dense),
            "norm_topk_prob": a["moe_router_topk"] > 1,
            "routed_scaling_factor": a["moe_router_topk_scaling_factor"] or 1.0,
            "n_group": a["moe_router_num_groups"] or 1,
            "topk_group": a["moe_router_group_topk"] or 1,
            "n_shared_experts": (a["moe_shared_expert_intermediate_size"] or 0) // a["moe_ffn_hidden_size"],
            "num_nextn_predict_layers": 0,
        }
    return settings


def expert_recipes(layout: Layout, a: Architecture, ours: str, theirs: str) -> Iterator[Recipe]:
    """Yields the recipes of a layer's experts and router.

    Args:
        ours, theirs: name of the layer.
    """
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if layout == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    experts, hidden, ffn = range(a["num_moe_experts"]), a["hidden_size"], a["moe_ffn_hidden_size"]
    router, ours = f"{theirs}.{block}.gate", f"{ours}.mlp"
    yield Recipe(f"{ours}.router.weight", (Run(f"{router}.weight", len(experts)),))
    if a["moe_router_enable_expert_bias"]:
        yield Recipe(f"{ours}.router.expert_bias", (Run(f"{router}.e_score_correction_bias", len(experts)),))
    gate, up, down = ([f"{theirs}.{block}.experts.{e}.{name}.weight" for e in experts] for name in names)
    pairs = ((Run(gate[e], ffn, 0, 2, index=e), Run(up[e], ffn, 1, 2, index=e)) for e in experts)
    yield Recipe(f"{ours}.experts.linear_fc1.weight", tuple(run for pair in pairs for run in pair))
    yield Recipe(f"{ours}.experts.linear_fc2.weight", tuple(Run(down[e], hidden, index=e) for e in experts))
    if shared := a["moe_shared_expert_intermediate_size"]:
        source, target = f"{theirs}.{block}.shared_experts", f"{ours}.shared_experts"
        runs = Run(f"{source}.gate_proj.weight", shared, 0, 2), Run(f"{source}.up_proj.weight", shared, 1, 2)
        yield Recipe(f"{target}.linear_fc1.weight", runs)
        yield Recipe(f"{target}.linear_fc2.weight", (Run(f"{source}.down_proj.weight", hidden),))


def dense_architecture(a: Architecture, granularity: int = 1) -> Architecture:
    """Returns the architecture of the dense model whose MLPs, or pieces of them, the experts of `a` are copies of.

    Raises:
        CheckpointError: there is none.
    """
    if a["num_moe_experts"] is None:
        raise CheckpointError("moe_use_upcycling is set for a model without experts; give --num-experts, or drop it")
    shared, width, topk = a["moe_shared_expert_intermediate_size"], a["moe_ffn_hidden_size"], a["moe_router_topk"]
    if shared is not None or (a["moe_layer_freq"] != 1 and width * granularity != a["ffn_hidden_size"]):
        raise CheckpointError(
            f"moe_use_upcycling copies an MLP of width {a['ffn_hidden_size']}, in {granularity:d} piece(s), into each "
            f"expert, which has moe_ffn_hidden_size {width} and moe_shared_expert_intermediate_size {shared}; leave "
            "out the latter, and make the former ffn_hidden_size / moe_upcycling_granularity"
        )
    if a["num_moe_experts"] % granularity:
        raise CheckpointError(
            f"num_moe_experts is {a['num_moe_experts']}, which moe_upcycling_granularity {granularity} does not "
            "divide; take a divisor"
        )
    by_softmax, scale = a["moe_router_score_function"] == "softmax", a["moe_router_topk_scaling_factor"]
    if a["moe_router_pre_softmax"] or scale is not None or topk % granularity or (not by_softmax and topk == 1):
        warn_once(
            "the model starts as another one than the dense model that is upcycled: the probabilities of a token's "
            "experts do not add up to one, or moe_router_topk is no multiple of moe_upcycling_granularity; drop "
            "moe_router_pre_softmax and moe_router_topk_scaling_factor to start with its loss"
        )
    fields = {name: value for name, value in a.transformer.items() if not name.startswith("moe_")}
    return replace(a, transformer=fields | {"num_moe_experts": None, "ffn_hidden_size": width * granularity})


def upcycle_recipes(
    a: Architecture, recipes: Iterable[Recipe], targets: Mapping[str, torch.Tensor], granularity: int = 1
) -> tuple[list[Recipe], dict[str, torch.Tensor]]:
    """Returns the recipes of a model with experts, made from its dense model's recipes, and the tensors to fill.

    Args:
        targets: tensors of the model with experts; its routers are left out of the result.
    """
    recipes_of_experts = []
    for recipe in recipes:
        match = _MLP.fullmatch(recipe.name)
        if match is not None and a.has_experts(int(match[2])):
            copies = range(a["num_moe_experts"])
            runs = (run for expert in copies for run in _runs_of(a, match[3], recipe.runs, expert, granularity))
            recipe = Recipe(f"{match[1]}.experts.{match[3]}", tuple(runs))
        recipes_of_experts.append(recipe)
    return recipes_of_experts, {name: tensor for name, tensor in targets.items() if ".mlp.router." not in name}


@torch.no_grad()
def group_routers(
    targets: Mapping[str, torch.Tensor], granularity: int, process_group: ProcessGroup | None = None
) -> None:
    """Gives experts that make up an MLP equal rows of the router, in place. Every rank of the group calls it."""
    routers = {name: tensor for name, tensor in targets.items() if ".mlp.router." in name}
    if granularity < 2:
        return
    # All are gathered before one is written: a whole tensor may be the model's memory, on its way to other ranks.
    wholes = dict(TensorStream(routers, process_group=process_group))
    rows = {n: whole[: len(whole) // granularity].repeat_interleave(granularity, 0) for n, whole in wholes.items()}
    for name, router in routers.items():
        for offsets, part in held_boxes(router):
            part.copy_(rows[name][tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))])


def _runs_of(a: Architecture, name: str, runs: Iterable[Run], expert: int, granularity: int) -> Iterator[Run]:
    piece, width = expert % granularity, a["moe_ffn_hidden_size"]
    if name == "linear_fc2.bias":
        yield from (replace(run, index=expert) for run in runs)
    elif name == "linear_fc2.weight":
        place = {"source_column": piece * width, "scale": granularity}
        yield from (replace(run, index=expert, **place) for run in runs)
    else:
        rows = width * (2 if a["gated_linear_unit"] else 1)
        yield from (part for run in runs if (part := run.within(piece * rows, (piece + 1) * rows, expert)).count > 0)
