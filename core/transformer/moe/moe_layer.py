"""The feed-forward half of a layer with experts: route, sort, compute, bring back."""

from __future__ import annotations

import torch

from ...base.megatron_names import refuse
from ...process_groups_config import ProcessGroupCollection, check_same_groups
from ...tensor_parallel.groups import Group, group_size, resolve_group
from ...tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from ..module import MegatronModule
from ..transformer_config import TransformerConfig
from .experts import GroupedMLP
from .permutation import sort_by_expert
from .router import TopKRouter
from .shared_experts import SharedExpertMLP


class MoELayer(MegatronModule):
    """The sum of each token's k experts, times their probabilities, and of the shared experts if there are any.

    Args:
        layer_number: from 1, for the log.
        pg_collection: must be the groups of `core.parallel_state`.
        submodules, is_mtp_layer: Megatron-LM's; refused unless at their defaults.
        name: a label, which nothing reads.

    Raises:
        ConfigError: the config has no experts, or leaves a size at 0.
        ParallelConfigError: other groups or refused arguments are given.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        refuse(
            "MoELayer",
            submodules=(submodules, None, "experts are those that the config describes"),
            is_mtp_layer=(is_mtp_layer, False, "models here predict the next token alone"),
        )
        check_same_groups("MoELayer", pg_collection, ("tp", "cp", "pp"))
        config.check_sizes_given("num_layers", "hidden_size", "num_moe_experts")
        super().__init__(config)
        _keep_from_compiler()
        self.layer_number = layer_number
        # Balance of the last step, on the device. `finish_step` sets it; None before the first step.
        self.step_statistics: torch.Tensor | None = None
        self.tp_group: Group = resolve_group(None)
        self.router = TopKRouter(config)
        self.experts = GroupedMLP(config)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpertMLP(config)

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the number of the layer, from 1."""
        self.layer_number = layer_number

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[s, b, h]` to `[s, b, h]`; with sequence parallelism both are this rank's `[s / tp, b, h]`."""
        group, is_split = self.tp_group, self.config.sequence_parallel
        if is_split:
            whole = gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            whole = copy_to_tensor_model_parallel_region(hidden_states, group)
        probs, experts = self.router(whole)
        permutation = sort_by_expert(experts, probs.detach(), self.config)
        if permutation.has_dropped:
            self.router.note_dropped(lambda: len(permutation.order) - permutation.ends[-1])
        rows = self.experts(permutation.to_rows(whole.flatten(0, 1)), permutation)
        if permutation.has_dropped:
            rows = rows.masked_fill(permutation.dropped_rows, 0.0)
        places = permutation.from_rows(rows)  # [tokens, k, h]
        combined = (places * probs.unsqueeze(-1)).sum(1).to(hidden_states.dtype)
        output: torch.Tensor = combined.view(whole.shape)  # this rank's partial sums
        if is_split:
            output = reduce_scatter_to_sequence_parallel_region(output, group)
        elif group_size(group) > 1:
            output = reduce_from_tensor_model_parallel_region(output, group)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        return output


def _keep_from_compiler() -> None:
    """Makes compiled code call `MoELayer.forward` as it is: the load of experts decides sizes, and the router counts.

    Called when a layer is made, because this imports the compiler, which takes longer than the rest of the package.
    """
    if not getattr(MoELayer.forward, "_torchdynamo_disable", False):
        MoELayer.forward = torch.compiler.disable(MoELayer.forward)  # type: ignore[method-assign]
