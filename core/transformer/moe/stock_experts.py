"""Cuts the experts of stock models of transformers over ranks.

Transformers 5 has one module for all experts of a layer, with `num_experts` and parameters `[experts, ...]`. It maps
tokens, the experts of each and their weights to outputs (Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and others).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ... import parallel_state
from ...base.errors import ParallelConfigError, WrapError
from ...tensor_parallel.groups import expert_tensor_group, group_rank, group_size, resolve_group
from ..moe_config import MoEConfig
from .dispatch import Permutation, dispatch


def cut_experts(model: nn.Module) -> nn.Module:
    """Leaves each expert-parallel rank its part of a model's experts, in place. Call it before `wrap_model`.

    Parameters keep their names. Dispatches tokens by ``alltoall``, so that ranks may have micro-batches of any shapes.
    Outputs and gradients equal those of all experts on each rank up to rounding. With one expert-parallel rank nothing
    changes.

    Args:
        model: a model of transformers 5, not wrapped yet, with equal values on all ranks.

    Returns:
        the model.

    Raises:
        WrapError: no module has experts as 3-D parameters.
        ParallelConfigError: ranks do not divide the experts, or the ranks that share experts' matrices are not the
            tensor-parallel ones.
    """
    group = parallel_state.get_expert_model_parallel_group(check_initialized=False)
    modules = {name: module for name, module in model.named_modules() if _has_stacked_experts(module)}
    if not modules:
        raise WrapError(
            f"{type(model).__name__} has no module with num_experts and 3-D parameters of experts, as transformers 5 "
            "builds them; call cut_experts on such a model, before it is wrapped"
        )
    if expert_tensor_group() is not resolve_group(None):
        raise ParallelConfigError(
            "experts of a stock model are not split over tensor-parallel ranks of their own; leave out "
            "expert_tensor_parallel_size"
        )
    ranks, rank = group_size(group), group_rank(group)
    for name, module in modules.items():
        if module.num_experts % ranks:
            raise ParallelConfigError(
                f"{name} has {module.num_experts} experts, which expert_model_parallel_size {ranks} does not divide; "
                "take a divisor"
            )
    for module in modules.values() if ranks > 1 else ():
        _cut(module, ranks, rank)
    return model


def _has_stacked_experts(module: nn.Module) -> bool:
    experts = getattr(module, "num_experts", None)
    own = [*module.parameters(recurse=False)]
    return (
        any(p.ndim == 3 for p in own) and all(len(p) == experts for p in own) and not isinstance(module, _CutExperts)
    )


def _cut(module: Any, ranks: int, rank: int) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        part = parameter.detach().chunk(ranks)[rank].clone()  # a copy, so that the rest is freed
        replacement = nn.Parameter(part, parameter.requires_grad)
        replacement.__dict__.update(parameter.__dict__, allreduce=False, expert_model_parallel=True)
        setattr(module, name, replacement)
    module.experts_config = MoEConfig(num_moe_experts=module.num_experts, moe_token_dispatcher_type="alltoall")
    module.num_experts //= ranks
    kind = type(module)
    module.__class__ = type(f"Cut{kind.__name__}", (_CutExperts, kind), {})


class _CutExperts:
    """Goes in front of the class of a module that `cut_experts` has cut."""

    # Both are set by `_cut` and fixed: of all ranks' experts, and the number of this rank's.
    experts_config: MoEConfig
    num_experts: int

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Maps `[tokens, h]`, and `[tokens, k]` experts of all ranks with their weights, to `[tokens, h]`."""
        compute: Callable[..., torch.Tensor] = super().forward  # type: ignore[misc]

        def of_rank(rows: torch.Tensor, permutation: Permutation) -> torch.Tensor:
            if not len(rows):  # the module would return a tensor without a graph, and other ranks wait in backward
                own: list[torch.Tensor] = [*self.parameters(recurse=False)]  # type: ignore[attr-defined]
                return rows + torch.cat([parameter.flatten()[:0] for parameter in own]).sum()
            return compute(rows, permutation.row_experts.unsqueeze(1), rows.new_ones(len(rows), 1))

        return dispatch(hidden_states, top_k_weights, top_k_index, of_rank, self.experts_config)
