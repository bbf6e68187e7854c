"""Experts in models of Hugging Face: their settings in ``config.json``, and the names of their tensors.

In files every expert has tensors of its own, which `transformers` stacks when it loads them. `mixtral` and
`qwen3_moe` choose by softmax. `glm4_moe` has the router of DeepSeek-V3 (DeepSeek-AI, 2024): scores by sigmoid, a bias
for the choice, groups of experts, scaled probabilities, and shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...dist_checkpointing.foreign_layout import Recipe, Run
from .architecture import Architecture

_KEYS: Mapping[str, Mapping[str, tuple[str, ...]]] = {  # by layout; the first name is written, each is read
    "mixtral": {"num_moe_experts": ("num_local_experts",), "moe_ffn_hidden_size": ("intermediate_size",)},
    "qwen3_moe": {
        "num_moe_experts": ("num_experts", "num_local_experts"),  # transformers 5 saves the second
        "moe_ffn_hidden_size": ("moe_intermediate_size",),
    },
    "glm4_moe": {"num_moe_experts": ("n_routed_experts",), "moe_ffn_hidden_size": ("moe_intermediate_size",)},
}
LAYOUTS_WITH_EXPERTS = tuple(_KEYS)
_TOPK = "num_experts_per_tok"
_SCORED_BEST = 2
"""Experts of a group whose scores `transformers` adds up to the group's."""


def expert_fields(layout: str, get: Any, num_layers: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of `TransformerConfig` about experts, and the settings that none of them expresses.

    Args:
        get: reads a value of ``config.json``, or an optional size by ``get.size``.
    """
    fields: dict[str, Any] = {name: get.size(*names) for name, names in _KEYS[layout].items()}
    topk = fields["moe_router_topk"] = get.size(_TOPK)
    normalized, problems = get("norm_topk_prob", layout != "qwen3_moe"), []
    if layout == "qwen3_moe":
        fields["moe_router_pre_softmax"] = not normalized
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
        if bool(normalized) != (topk > 1):
            problems.append(f"norm_topk_prob {normalized} with {_TOPK} {topk}")
        groups, chosen = fields["moe_router_num_groups"], fields["moe_router_group_topk"]
        problems += _group_problems(groups, chosen, topk)
    return fields, problems


def expert_settings(layout: str, a: Architecture) -> dict[str, Any]:
    """Returns what ``config.json`` says of experts."""
    settings = {names[0]: a[name] for name, names in _KEYS[layout].items()} | {_TOPK: a["moe_router_topk"]}
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


def _group_problems(groups: int | None, chosen: int | None, topk: int) -> list[str]:
    if groups is None or chosen is None or groups == 1 or topk // chosen == _SCORED_BEST:
        return []
    return [
        f"moe_router_topk {topk} in {chosen} of {groups} groups (a group's score is that of its {_SCORED_BEST} best "
        f"experts there, and of its {topk // chosen} here)"
    ]


def expert_recipes(layout: str, a: Architecture, ours: str, theirs: str) -> Iterator[Recipe]:
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
