"""The feed-forward half of a layer with experts: route, drop, dispatch to experts, bring back."""

from __future__ import annotations

import torch

from ... import parallel_state
from ...base.errors import ParallelConfigError
from ...base.megatron_names import refuse
from ...process_groups_config import ProcessGroupCollection, check_same_groups
from ...tensor_parallel.groups import Group, expert_tensor_group, group_size, resolve_group
from ...tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from ..module import MegatronModule
from ..transformer_config import TransformerConfig
from .dispatch import dispatch, gather_tokens
from .experts import GroupedMLP
from .permutation import drop_over_capacity
from .router import TopKRouter
from .shared_experts import SharedExpertMLP


class MoELayer(MegatronModule):
    """The sum of each token's k experts, times their probabilities, and of the shared experts if there are any.

    Where the ranks that share an expert's matrices are those that share a dense layer's, all of them route the same
    tokens, and each has partial sums of the outputs. Else (`splits_tokens`) each tensor-parallel rank routes its part
    of the sequence, and the ranks that share the matrices gather each other's tokens.

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
        check_same_groups("MoELayer", pg_collection, ("tp", "cp", "pp", "ep", "expt_tp"))
        config.check_sizes_given("num_layers", "hidden_size", "num_moe_experts")
        check_expert_degrees(config)
        super().__init__(config)
        _keep_from_compiler()
        self.layer_number = layer_number
        # Balance of the last step, on the device. `finish_step` sets it; None before the first step.
        self.step_statistics: torch.Tensor | None = None
        self.tp_group: Group = resolve_group(None)
        self.expert_tp_group: Group = expert_tensor_group()
        self.splits_tokens = self.expert_tp_group is not self.tp_group
        self.router = TopKRouter(config, splits_tokens=self.splits_tokens)
        self.experts = GroupedMLP(config)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpertMLP(config)

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the number of the layer, from 1."""
        self.layer_number = layer_number

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[s, b, h]` to `[s, b, h]`. With sequence parallelism both are this rank's `[s / tp, b, h]`."""
        tokens = self._enter(hidden_states)
        probs, experts = self.router(tokens)
        experts = drop_over_capacity(experts, probs.detach(), self.config)
        self.router.note_dropped(probs, experts)
        flat = tokens.flatten(0, 1)
        if self.splits_tokens and self.expert_tp_group is not None:
            flat, probs, experts = gather_tokens(flat, probs, experts, self.expert_tp_group)
        combined = dispatch(flat, probs, experts, self.experts, self.config)
        if self.splits_tokens:
            combined = reduce_scatter_to_sequence_parallel_region(combined, self.expert_tp_group)
        output = self._leave(combined.view(tokens.shape))
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        return output

    def _enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the tokens that this rank routes, `[s, b, h]`."""
        group, is_split = self.tp_group, self.config.sequence_parallel
        if self.splits_tokens:
            return hidden_states if is_split else scatter_to_sequence_parallel_region(hidden_states, group)
        if is_split:
            return gather_from_sequence_parallel_region(hidden_states, group=group)
        return copy_to_tensor_model_parallel_region(hidden_states, group)

    def _leave(self, output: torch.Tensor) -> torch.Tensor:
        """Returns the output in the form of the layer's input: from whole sums of this rank's tokens if they are
        split, else from partial sums of all."""
        group, is_split = self.tp_group, self.config.sequence_parallel
        if self.splits_tokens:
            return output if is_split else gather_from_sequence_parallel_region(output, False, group)
        if is_split:
            return reduce_scatter_to_sequence_parallel_region(output, group)
        return reduce_from_tensor_model_parallel_region(output, group)


def check_expert_degrees(config: TransformerConfig) -> None:
    """Raises ParallelConfigError unless experts are cut over as many ranks as the config says."""
    degrees = {
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": group_size(expert_tensor_group()),
    }
    for name, ranks in degrees.items():
        degree = getattr(config, name)
        if degree not in (None, ranks):
            raise ParallelConfigError(
                f"config.{name} is {degree}, but core.parallel_state has such groups of {ranks}; call "
                "initialize_model_parallel with the same size first"
            )


def _keep_from_compiler() -> None:
    """Makes compiled code call `MoELayer.forward` as it is: the load of experts decides sizes, and the router counts.

    Called when a layer is made, because this imports the compiler, which takes longer than the rest of the package.
    """
    if not getattr(MoELayer.forward, "_torchdynamo_disable", False):
        MoELayer.forward = torch.compiler.disable(MoELayer.forward)  # type: ignore[method-assign]
