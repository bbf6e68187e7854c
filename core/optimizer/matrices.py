"""Which parameters Muon updates, which matrices they are, and the table that shows both.

A parameter's whole tensor, before any sharding, is viewed as `[rows, columns]`, with all dimensions but the last as
rows. A matrix is some of these rows. Layers declare rows that they have fused by :func:`~core.tensor_parallel.\
initialization.declare_fused_rows`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..tensor_parallel.initialization import FusedRows
from .main_params import MainParam
from .newton_schulz import MuonRecipe
from .optimizer_config import OptimizerConfig

_OUTPUT_LAYERS = ("lm_head", "output_layer")
"""Names of modules of other libraries that project to the vocabulary."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Rows of one parameter that are orthogonalized together."""

    param: int
    """Index of its parameter among those that Muon updates."""
    split: str
    """Its name among the matrices of the parameter; empty if it is the only one."""
    rows: Tensor
    """`[n]`, ascending: its rows in the whole tensor."""
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.columns


@dataclass(frozen=True)
class Choice:
    """The optimizer of a parameter."""

    optimizer: str
    """``"muon"``, or `OptimizerConfig.muon_scalar_optimizer`."""
    reason: str = ""
    """Why it is not Muon's."""

    @property
    def is_muon(self) -> bool:
        return self.optimizer == "muon"


def choose(p: MainParam, config: OptimizerConfig, override: str | None) -> Choice:
    """Returns which optimizer updates a parameter: `override`, else the config's patterns, else the rule.

    The rule gives Muon all matrices, and batches of matrices `[n, rows, columns]`, but for embeddings, outputs, and
    what the model marks by Megatron-LM's attribute ``use_muon`` as False, as routers.

    Raises:
        ConfigError: Muon is requested for a parameter that is no matrix.
    """
    ndim, is_convolution = p.param.ndim, isinstance(p.owner, nn.modules.conv._ConvNd)
    is_matrix = ndim in (2, 3) and not is_convolution
    requested = override
    for optimizer, patterns in (("muon", config.muon_include), (config.muon_scalar_optimizer, config.muon_exclude)):
        if requested is None and any(fnmatchcase(p.name, pattern) for pattern in patterns):
            requested = optimizer
    if requested == "muon" and not is_matrix:
        raise ConfigError(
            f"muon is requested for parameter {p.name} of shape {list(p.param.shape)}; it takes matrices, or batches "
            "of them in three dimensions"
        )
    if requested is not None:
        return Choice(requested, "requested")
    is_first_or_last = (
        getattr(p.param, "is_embedding_or_output_parameter", False)
        or isinstance(p.owner, nn.Embedding)
        or any(part in _OUTPUT_LAYERS for part in p.name.split("."))
    )
    reasons = {
        "vector": ndim < 2 or p.attribute == "bias",  # that of experts is a batch of vectors
        "embedding or output": is_first_or_last,
        "marked use_muon=False": not getattr(p.param, "use_muon", True),
        "convolution": is_convolution,
        f"{ndim} dimensions": not is_matrix,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    return Choice("muon") if reason is None else Choice(config.muon_scalar_optimizer, reason)


def matrices_of(index: int, p: MainParam, config: OptimizerConfig, recipe: MuonRecipe) -> list[Matrix]:
    """Returns the matrices of Muon's parameter `index`.

    Raises:
        ConfigError: the parameter's rows are no multiple of those that its layout repeats.
    """
    shape = p.whole(p.main).shape
    num_rows, columns = math.prod(shape[:-1]), shape[-1]
    fused: FusedRows | None = getattr(p.param, "fused_rows", None)
    per_batch = torch.arange(num_rows).view(-1, shape[-2])
    named = [("", per_batch)]
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
        named = [(name, rows.flatten(1)) for (name, _), rows in zip(fused.blocks, blocks, strict=True)]
        if config.muon_split_qkv_per_head and fused.head_rows:
            named = [
                (f"{name}{head}", rows)
                for name, block in named
                for head, rows in enumerate(block.split(fused.head_rows, dim=1))
            ]
    return [
        Matrix(index, f"{name} {i}".strip() if len(per_batch) > 1 else name, rows, columns)
        for name, batch in named
        for i, rows in enumerate(batch)
    ]


def describe_matrices(
    params: Sequence[MainParam],
    choices: Mapping[MainParam, Choice],
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    num_ranks: int,
    scalar_optimizer: str,
) -> str:
    """Returns the table of all parameters: matrix, shape, split, owner and optimizer, equal layers in one row.

    Args:
        owners: rank of each matrix.
        num_ranks: ranks that share the matrices.
    """
    ours = [p for p in params if choices[p].is_muon]
    owners_of: dict[tuple[str, ...], list[int | None]] = {}
    for matrix, owner in zip(matrices, owners, strict=True):
        split, name = matrix.split or "whole", ours[matrix.param].name
        row = (_without_numbers(name), "x".join(map(str, matrix.shape)), _without_numbers(split), "muon")
        owners_of.setdefault(row, []).append(owner)
    for p in params:
        if not choices[p].is_muon:
            shape = "x".join(map(str, p.param.shape))
            row = (_without_numbers(p.name), shape, choices[p].reason, scalar_optimizer)
            owners_of.setdefault(row, []).append(None)
    rows = [("matrix", "number", "shape", "split or reason", "owners", "optimizer")]
    for (name, shape, split, optimizer), ranks in owners_of.items():
        known = sorted({rank for rank in ranks if rank is not None})
        shown = "-" if not known else f"{known[0]} to {known[-1]}" if len(known) > 4 else " ".join(map(str, known))
        rows.append((name, str(len(ranks)), shape, split, shown, optimizer))
    idle = num_ranks - len(set(owners))
    note = f"\n{idle} of {num_ranks} ranks own no matrix: there are {len(matrices)}" if idle else ""
    return f"Muon updates {len(matrices)} matrices on {num_ranks} ranks:\n{_aligned(rows)}{note}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<![a-zA-Z_])\d+|(?<=^[qkv])\d+", "*", name)
