"""Rejects parameters of experts, which Megatron-LM marks by ``allreduce = False``; experts are not supported yet."""

from __future__ import annotations

from typing import Any

from torch import nn

from ... import parallel_state
from ...errors import ParallelConfigError
from ..plan.make_flat_plan import is_expert_parameter


def reject_expert_parameters(module: nn.Module, config: Any) -> None:
    """Raises if a parameter is replicated over other ranks than those that its wrapper reduces gradients over.

    A marked parameter belongs to the experts' data-parallel group. That group is the data-parallel group if experts
    are split like dense layers; otherwise a wrapper would overwrite one expert by another.

    Args:
        config: the model's; its ``expert_model_parallel_size`` is used if there are no process groups.

    Raises:
        ParallelConfigError: a parameter is marked, and experts are split differently.
    """
    expert = max(
        parallel_state.get_expert_model_parallel_world_size(), getattr(config, "expert_model_parallel_size", 1) or 1
    )
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    expert_tensor = (
        parallel_state.get_expert_tensor_parallel_world_size() if parallel_state.is_initialized() else tensor
    )
    if expert == 1 and expert_tensor == tensor:
        return
    for name, parameter in module.named_parameters():
        if is_expert_parameter(parameter):
            raise ParallelConfigError(
                f"parameter {name} is marked allreduce=False, as an expert's, with expert_model_parallel_size "
                f"{expert} and expert_tensor_parallel_size {expert_tensor}; no wrapper keeps experts apart yet: "
                f"initialise with expert_model_parallel_size 1 and expert_tensor_parallel_size {tensor}"
            )
