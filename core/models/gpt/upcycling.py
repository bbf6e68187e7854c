"""Starts a model with experts from the weights of a dense one (Komatsuzaki et al., 2022, and He et al., 2024).

Each MLP is split into `granularity` pieces of its inner width, and an expert is a copy of one: expert e of piece
e mod granularity. With a granularity of 1 experts are whole MLPs. Routers are new. Experts that make up an MLP have
equal rows of it, so that a token takes all of them. Where the probabilities of a token's experts add up to one, the
model computes at first what the dense one does, whatever the router chooses: with `p` of each expert of a group

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

import torch
from torch.distributed import ProcessGroup

from ...base.errors import CheckpointError, warn_once
from ...dist_checkpointing.foreign_layout import Recipe, Run
from ...dist_checkpointing.gathering import TensorStream
from ...dist_checkpointing.global_view import held_boxes
from .architecture import Architecture

_MLP = re.compile(r"(decoder\.layers\.(\d+)\.mlp)\.(linear_fc\d\.\w+)")


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


def upcycled(
    a: Architecture, recipes: Iterable[Recipe], targets: Mapping[str, torch.Tensor], granularity: int = 1
) -> tuple[list[Recipe], dict[str, torch.Tensor]]:
    """Returns the recipes of a model with experts from those of its dense model, and the tensors that they fill.

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
        for offsets, held in held_boxes(router):
            held.copy_(
                rows[name][tuple(slice(start, start + n) for start, n in zip(offsets, held.shape, strict=True))]
            )
