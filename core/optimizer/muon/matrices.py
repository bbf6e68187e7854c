"""The matrices of Muon's parameters, the table that shows them, and the Newton-Schulz iteration.

A parameter's whole tensor, before any sharding, is viewed as `[rows, columns]`, with all dimensions but the last as
rows. A matrix is some of these rows. Layers declare rows that they have fused by an attribute of the parameter,
`fused_rows` (:class:`~shardstack.base.module_protocol.FusedRows`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...base.errors import ConfigError
from ...base.module_protocol import fused_rows
from ...base.text import aligned
from ..main_params import MainParam
from ..muon_recipe import MuonRecipe
from ..optimizer_config import OptimizerConfig


@dataclass(frozen=True, eq=False)
class Matrix:
    """Rows of one parameter that are orthogonalized together."""

    param: int
    """Index of the matrix's parameter among the parameters that Muon updates."""
    split: str
    """Name among the matrices of the parameter. Empty for the only matrix."""
    rows: Tensor
    """`[n]`, ascending: its rows in the whole tensor."""
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.columns


def matrices_of(index: int, p: MainParam, config: OptimizerConfig, recipe: MuonRecipe) -> list[Matrix]:
    """Returns the matrices of Muon's parameter `index`.

    Raises:
        ConfigError: the parameter's rows are no multiple of those that its layout repeats.
    """
    shape = p.whole(p.main).shape
    num_rows, columns = math.prod(shape[:-1]), shape[-1]
    fused = fused_rows(p.param)
    per_batch = torch.arange(num_rows).view(-1, shape[-2])
    blocks_by_name = [("", per_batch)]
    is_split = fused is not None and (config.muon_split_qkv if fused.head_rows else recipe.split_gate_up)
    if fused is not None and is_split:
        period = sum(rows for _, rows in fused.blocks)
        if shape[-2] % period:
            raise ConfigError(
                f"parameter {p.name} has {shape[-2]} rows, and its layout {dict(fused.blocks)} repeats {period}; "
                "declare the layout of its rows, or turn the split off"
            )
        repeats, ends = per_batch.unflatten(1, (-1, period)), torch.tensor([n for _, n in fused.blocks]).cumsum(0)
        blocks = repeats.tensor_split(ends[:-1], dim=2)
        blocks_by_name = [(name, rows.flatten(1)) for (name, _), rows in zip(fused.blocks, blocks, strict=True)]
        if config.muon_split_qkv_per_head and fused.head_rows:
            blocks_by_name = [
                (f"{name}{head}", rows)
                for name, block in blocks_by_name
                for head, rows in enumerate(block.split(fused.head_rows, dim=1))
            ]
    return [
        Matrix(index, f"{name} {i}".strip() if len(per_batch) > 1 else name, rows, columns)
        for name, batch in blocks_by_name
        for i, rows in enumerate(batch)
    ]


def describe_matrices(
    reasons: Mapping[MainParam, str], scalar_optimizer: str, matrices: Sequence[Matrix], owners: Sequence[int]
) -> str:
    """Returns the table of all parameters: matrix, shape, split, owner and optimizer, layers in one row.

    Args:
        reasons: as of `MuonBuilder.choose`.
        scalar_optimizer: the optimizer of parameters with a reason.
        owners: rank of each matrix.
    """
    names = [_without_numbers(p.name) for p, reason in reasons.items() if not reason]
    owners_of: dict[tuple[str, ...], set[int]] = {}
    for matrix, owner in zip(matrices, owners, strict=True):
        split = _without_numbers(matrix.split) or "whole"
        owners_of.setdefault((names[matrix.param], _text(matrix.shape), split, "muon"), set()).add(owner)
    for p, reason in reasons.items():
        if reason:
            owners_of.setdefault((_without_numbers(p.name), _text(p.param.shape), reason, scalar_optimizer), set())
    rows: list[tuple[str, ...]] = [("matrix", "shape", "split or reason", "optimizer", "owners")]
    rows += [(*row, " ".join(map(str, sorted(ranks))) or "-") for row, ranks in owners_of.items()]
    return "\n".join((f"Muon updates {len(matrices)} matrices:", *aligned(rows, len(rows[0]))))


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<![a-zA-Z_])\d+|(?<=^[qkv])\d+", "*", name)


COEFFICIENTS: dict[str, list[list[float]]] = json.loads(
    Path(__file__).with_name("muon_coefficients.json").read_text("utf-8")
)
"""Coefficients (a, b, c) of the steps, by Megatron-LM's names.

Jordan et al., 2024; Cesista et al., 2025; Amsel et al., 2025 (Polar Express, with its safety factor of 1.01); Grishina
et al., 2025 (CANS); Boissin et al., 2025 (Turbo-Muon); DeepSeek-V4.
"""

_LAST_REPEATS = ("polar_express", "cans", "deepseekv4")
"""Types whose last coefficients serve all further steps. Other types begin again with the first."""


_CHUNKED_ON = ["cuda"]
"""Devices on which matrices are orthogonalized several at a time: a small one is over there before the next call."""
_CHUNK_ELEMENTS, _MOST_IN_CHUNK = 2**22, 64
"""A chunk has as many matrices as have these elements."""


def orthogonalize_all(updates: Mapping[int, Tensor], recipe: MuonRecipe) -> dict[int, Tensor]:
    """Returns :func:`orthogonalize` of each matrix by its index: on a GPU in chunks of one shape.

    A chunk has a number of matrices that its shape decides; the last one is filled up with zeros. So a matrix has the
    same bits in whichever chunk it is, and on whichever rank.
    """
    of_shape: dict[torch.Size, list[int]] = {}
    for index, update in updates.items():
        of_shape.setdefault(update.shape, []).append(index)
    results: dict[int, Tensor] = {}
    for shape, indices in of_shape.items():
        size = max(1, min(_MOST_IN_CHUNK, _CHUNK_ELEMENTS // shape.numel()))
        if size == 1 or updates[indices[0]].device.type not in _CHUNKED_ON:
            results |= {index: orthogonalize(updates[index], recipe) for index in indices}
            continue
        for start in range(0, len(indices), size):
            members = indices[start : start + size]
            chunk = updates[members[0]].new_zeros(size, *shape)
            torch._foreach_copy_(list(chunk[: len(members)].unbind()), [updates[index] for index in members])
            results |= zip(members, orthogonalize(chunk, recipe), strict=False)
    return results


def orthogonalize(update: Tensor, recipe: MuonRecipe) -> Tensor:
    """Returns a matrix with the singular vectors of `update` and singular values near 1, in the dtype of products.

    The operations are those of `torch.optim.Muon`, in their order.

    Args:
        update: `[rows, columns]`, contiguous, or several, `[n, rows, columns]`.
    """
    is_rounded, is_tall = recipe.fp32_matmul_prec == "medium", update.shape[-2] > update.shape[-1]
    x = update.bfloat16() if is_rounded and recipe.rounds_first else update
    x = x.mT if is_tall else x
    is_one = update.ndim == 2
    norm = x.norm() if is_one else torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    add_product = torch.addmm if is_one else torch.baddbmm
    x = x / (norm + recipe.eps if recipe.adds_eps else norm.clamp(min=recipe.eps))
    x = x.bfloat16() if is_rounded else x
    triples = COEFFICIENTS[recipe.coefficient_type]
    rest = triples[-1:] if recipe.coefficient_type in _LAST_REPEATS else triples
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(recipe.fp32_matmul_prec)
    try:
        for a, b, c in itertools.islice(itertools.chain(triples, itertools.cycle(rest)), recipe.num_ns_steps):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    finally:
        torch.set_float32_matmul_precision(before)
    return x.mT if is_tall else x


def cost(shape: Sequence[int]) -> int:
    """Returns the multiplications of one step on a matrix, up to a constant factor."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)
