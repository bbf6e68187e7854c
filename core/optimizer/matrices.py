"""Which parameters Muon updates, which matrices they are, the table that shows both, and the Newton-Schulz iteration.

A parameter's whole tensor, before any sharding, is viewed as `[rows, columns]`, with all dimensions but the last as
rows. A matrix is some of these rows. Layers declare rows that they have fused by an attribute of the parameter,
`fused_rows` (:class:`~core.base.module_protocol.FusedRows`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.module_protocol import fused_rows
from ..base.text import aligned
from .main_params import MainParam
from .optimizer_config import CoefficientType, MuonRecipe, OptimizerConfig
from .param_groups import ConfigOverrides, override_of

_OUTPUT_LAYERS = ("lm_head", "output_layer")
"""Names of modules of other libraries that project to the vocabulary."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Rows of one parameter that are orthogonalized together."""

    param: int
    """Index of its parameter among those that Muon updates."""
    split: str
    """Its name among the matrices of the parameter. Empty if it is the only one."""
    rows: Tensor
    """`[n]`, ascending: its rows in the whole tensor."""
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.columns


def choose_optimizers(
    params: Sequence[MainParam], config: OptimizerConfig, overrides: ConfigOverrides | None
) -> dict[MainParam, str]:
    """Returns why each parameter is the scalar optimizer's, or empty text for those that Muon updates.

    An override decides, else the config's patterns, else the rule. The rule gives Muon all matrices, and batches of
    matrices `[n, rows, columns]`, but for embeddings, outputs, and what the model marks by Megatron-LM's attribute
    ``use_muon`` as False, as routers.

    Raises:
        ConfigError: an override names an unknown optimizer, or Muon is requested for a parameter that is no matrix.
    """
    return {p: _reason(p, config, overrides) for p in params}


def check_choice(whole_model: Mapping[str, str], config: OptimizerConfig) -> None:
    """Checks what `choose_optimizers` has chosen for the parameters of all pipeline stages.

    Raises:
        ConfigError: no parameter is trained, a pattern of Muon's matches none, or it gets none.
    """
    if not whole_model:
        raise ConfigError("the model has no trainable parameter; nothing is left for an optimizer to do")
    if config.optimizer != "muon":
        return
    if all(whole_model.values()):
        raise ConfigError(
            f"optimizer is muon, and none of the {len(whole_model)} trained parameters is a matrix of a hidden layer; "
            "set optimizer to adam, or name parameters in muon_include"
        )
    for pattern in (*config.muon_include, *config.muon_exclude):
        if not any(fnmatchcase(name, pattern) for name in whole_model):
            first, *_, last = [*whole_model] * 2
            raise ConfigError(
                f"muon_include or muon_exclude {pattern!r} matches no parameter that is trained; names are as "
                f"{first} and {last}"
            )


def _reason(p: MainParam, config: OptimizerConfig, overrides: ConfigOverrides | None) -> str:
    patterns = {"muon": config.muon_include, config.muon_scalar_optimizer: config.muon_exclude}
    matching = [name for name, of in patterns.items() if any(fnmatchcase(p.name, pattern) for pattern in of)]
    rule = override_of(overrides or {}, p.name, p.param).get("optimizer", next(iter(matching), None))
    if rule not in (None, *patterns):
        raise ConfigError(
            f"config_overrides gives parameter {p.name} the optimizer {rule!r}; it takes "
            f"{' or '.join(map(repr, patterns))}"
        )
    if rule == "muon" and not _is_matrix(p):
        raise ConfigError(
            f"muon is requested for parameter {p.name} of shape {list(p.param.shape)}; it takes matrices, or "
            "batches of them in three dimensions"
        )
    return _reason_against(p) if rule is None else "" if rule == "muon" else "requested"


def _is_matrix(p: MainParam) -> bool:
    return p.param.ndim in (2, 3) and not isinstance(p.owner, nn.modules.conv._ConvNd)


def _reason_against(p: MainParam) -> str:
    """Returns why the rule does not give a parameter to Muon. Empty if it does."""
    if p.param.ndim < 2 or p.attribute == "bias":  # that of experts is a batch of vectors
        return "vector"
    if (
        getattr(p.param, "is_embedding_or_output_parameter", False)
        or isinstance(p.owner, nn.Embedding)
        or any(part in _OUTPUT_LAYERS for part in p.name.split("."))
    ):
        return "embedding or output"
    if not getattr(p.param, "use_muon", True):
        return "marked use_muon=False"
    return "" if _is_matrix(p) else "convolution"


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
        reasons: as of `choose_optimizers`.
        scalar_optimizer: that of parameters with a reason.
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


COEFFICIENTS: dict[CoefficientType, list[list[float]]] = json.loads(
    Path(__file__).with_name("muon_coefficients.json").read_text("utf-8")
)
"""Coefficients (a, b, c) of the steps, by Megatron-LM's names.

Jordan et al., 2024; Cesista et al., 2025; Amsel et al., 2025 (Polar Express, with its safety factor of 1.01); Grishina
et al., 2025 (CANS); Boissin et al., 2025 (Turbo-Muon); DeepSeek-V4.
"""

_LAST_REPEATS = ("polar_express", "cans", "deepseekv4")
"""Types whose last coefficients are those of all further steps. Of the others the first come again."""


def orthogonalize(update: Tensor, recipe: MuonRecipe) -> Tensor:
    """Returns a matrix with the singular vectors of `update` and singular values near 1, in the dtype of products.

    The bits depend on nothing but the matrix: one call for each, with operations in the order of `torch.optim.Muon`.

    Args:
        update: `[rows, columns]`, contiguous.
    """
    is_rounded, is_tall = recipe.fp32_matmul_prec == "medium", update.shape[0] > update.shape[1]
    x = update.bfloat16() if is_rounded and recipe.rounds_first else update
    x = x.T if is_tall else x
    norm = x.norm()
    x = x / (norm + recipe.eps if recipe.adds_eps else norm.clamp(min=recipe.eps))
    x = x.bfloat16() if is_rounded else x
    triples = COEFFICIENTS[recipe.coefficient_type]
    rest = triples[-1:] if recipe.coefficient_type in _LAST_REPEATS else triples
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(recipe.fp32_matmul_prec)
    try:
        for a, b, c in itertools.islice(itertools.chain(triples, itertools.cycle(rest)), recipe.num_ns_steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    finally:
        torch.set_float32_matmul_precision(before)
    return x.T if is_tall else x


def cost(shape: Sequence[int]) -> int:
    """Returns the multiplications of one step on a matrix, up to a constant factor."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)
