"""The feed-forward half of a layer with experts: route, drop, dispatch to experts, bring back.

A step ends once for all its micro-batches: biases move, and the log gets its statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import parallel_state
from ...base.device import current_device
from ...base.megatron_names import checks_arguments
from ...comm.collectives import all_reduce_by_backend
from ...parallel_state import check_same_groups
from ...process_groups_config import ProcessGroupCollection
from ...tensor_parallel import mappings
from ...tensor_parallel.groups import Group, check_degrees, expert_tensor_group, group_size, resolve_group
from ..module import MegatronModule
from ..transformer_config import TransformerConfig
from .dispatch import dispatch, drop_over_capacity, gather_tokens
from .experts import GroupedMLP, SharedExpertMLP
from .router import SUMS, TopKRouter

STATISTICS = ("load_max", "load_min", "dropped_share", "entropy", "balance_loss", "z_loss")
"""What the log shows of each layer: the largest and smallest load of an expert, as multiples of the mean load, the
share of choices that were dropped, the mean entropy of a token's scores, in nats, and means of the losses, without
their coefficients."""


class MoELayer(MegatronModule):
    """The sum of each token's k experts, times their probabilities, and of the shared experts if there are any.

    Where the ranks that share an expert's matrices are those that share a dense layer's, all of them route the same
    tokens, and each has partial sums of the outputs. Else (`splits_tokens`) each tensor-parallel rank routes its part
    of the sequence, and the ranks that share the matrices gather each other's tokens.

    Args:
        layer_number: from 1, for the log.
        pg_collection: must be the groups of `shardstack.parallel_state`.
        submodules, is_mtp_layer: Megatron-LM's; refused unless at their defaults.
        name: a label, which nothing reads.

    Raises:
        ConfigError: the config has no experts, or leaves a size at 0.
        ParallelConfigError: other groups or refused arguments are given.
    """

    @checks_arguments
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        check_same_groups("MoELayer", pg_collection, ("tp", "cp", "pp", "ep", "expt_tp"))
        config.check_sizes_given("num_layers", "hidden_size", "num_moe_experts")
        check_degrees(
            config,
            expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
            expert_tensor_parallel_size=group_size(expert_tensor_group()),
        )
        super().__init__(config)
        # Compiled code calls `forward` as it is: the load of experts decides sizes, and the router counts. The first
        # layer says so, because that imports the compiler, which takes longer than the rest of the package.
        if not getattr(MoELayer.forward, "_torchdynamo_disable", False):
            MoELayer.forward = torch.compiler.disable(MoELayer.forward)  # type: ignore[method-assign]
        self.layer_number = layer_number
        # Balance of the last step, on the device. `use_step_sums` sets it; None before the first step.
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
        sums = dispatch(flat, probs, experts, self.experts, self.config)
        if self.splits_tokens:
            sums = mappings.reduce_scatter_to_sequence_parallel_region(sums, self.expert_tp_group)
        output = self._leave(sums.view(tokens.shape))
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        return output

    @property
    def rank_dependence(self) -> str:
        """Why a loss depends on the number of ranks: it reads the counts of all replicas' micro-batches that run at
        one time. Empty if none does."""
        if "global_aux_loss" not in self.config.auxiliary_losses:
            return ""
        return (
            "what 'global_aux_loss' of moe_router_load_balancing_type counts depends on the number of ranks; take "
            "'aux_loss' or 'seq_aux_loss'"
        )

    @property
    def step_sums(self) -> torch.Tensor:
        """The router's."""
        return self.router.step_sums

    @property
    def step_sums_group(self) -> Group:
        """Tensor-parallel ranks that route different tokens, else None."""
        return self.tp_group if self.splits_tokens else None

    def use_step_sums(self, totals: torch.Tensor) -> None:
        """Moves each expert's bias by the tokens of all ranks, and keeps what the log shows as `step_statistics`.

        Args:
            totals: the sums of `TopKRouter.step_sums` over ranks.
        """
        counts = totals[: -len(SUMS)]
        bias = self.router.expert_bias
        if bias is not None and self.training:
            bias += self.config.moe_router_bias_update_rate * (counts.mean() - counts).sign().to(bias.dtype)
        self.step_statistics = _statistics(counts, totals[-len(SUMS) :])
        self.clear_step_sums()

    def clear_step_sums(self) -> None:
        """Forgets the tokens of a step that did not end."""
        self.router.clear_step()

    def _enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the tokens that this rank routes, `[s, b, h]`."""
        group, is_split = self.tp_group, self.config.sequence_parallel
        if self.splits_tokens:
            return hidden_states if is_split else mappings.scatter_to_sequence_parallel_region(hidden_states, group)
        if is_split:
            return mappings.gather_from_sequence_parallel_region(hidden_states, group=group)
        return mappings.copy_to_tensor_model_parallel_region(hidden_states, group)

    def _leave(self, output: torch.Tensor) -> torch.Tensor:
        """Returns the output in the form of the layer's input: from whole sums of this rank's tokens if they are
        split, else from partial sums of all."""
        group, is_split = self.tp_group, self.config.sequence_parallel
        if self.splits_tokens:
            return output if is_split else mappings.gather_from_sequence_parallel_region(output, False, group)
        if is_split:
            return mappings.reduce_scatter_to_sequence_parallel_region(output, group)
        return mappings.reduce_from_tensor_model_parallel_region(output, group)


def logged_statistics(models: Sequence[nn.Module]) -> tuple[list[str], torch.Tensor] | None:
    """Returns names and values, on the device, of what the last step's log shows. None for a model without experts.

    All ranks of a pipeline call it: the log shows the layers of all stages.

    Means over layers come first. With `moe_per_layer_logging` the statistics of each layer follow, and the load of
    each of its experts.
    """
    modules = (module for model in models for module in model.modules())
    layers: list[Any] = [
        layer for layer in modules if isinstance(layer, MoELayer) and layer.step_statistics is not None
    ]
    rows = {layer.layer_number: layer.step_statistics for layer in layers}
    config: Any = layers[0].config if layers else models[0].config
    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    if has_stages and getattr(config, "num_moe_experts", None) is not None:
        rows = _of_all_stages(rows, config)
    if not rows:
        return None
    names = [f"moe/{name}" for name in STATISTICS]
    parts = [torch.stack([row[: len(STATISTICS)] for row in rows.values()]).mean(0)]
    for number, row in rows.items():
        if config.moe_per_layer_logging:
            place = f"moe/layer_{number}"
            names += [f"{place}/{name}" for name in STATISTICS]
            names += [f"{place}/expert_{index}/load" for index in range(len(row) - len(STATISTICS))]
            parts.append(row)
    return names, torch.cat(parts)


def _of_all_stages(rows: Mapping[int, torch.Tensor], config: Any) -> dict[int, torch.Tensor]:
    """Returns the statistics of the layers of all pipeline stages, by layer number."""
    numbers = [number for number in range(1, config.num_layers + 1) if config.has_experts(number)]
    table = torch.zeros(
        len(numbers), len(STATISTICS) + config.num_moe_experts, dtype=torch.float64, device=current_device()
    )
    for place, number in enumerate(numbers):
        if number in rows:
            table[place] = rows[number]
    group = parallel_state.get_pipeline_model_parallel_group()
    all_reduce_by_backend(table, group, what="statistics of experts")
    return dict(zip(numbers, table, strict=True))


def _statistics(counts: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Returns `STATISTICS`, and the load of each expert."""
    tokens, num_dropped, entropy, micro_batches, balance, of_logits = sums.unbind()
    loads = counts / counts.mean().clamp(min=1e-300)
    shares = [loads.max(), loads.min(), num_dropped / counts.sum().clamp(min=1), entropy / tokens.clamp(min=1)]
    batches = micro_batches.clamp(min=1e-300)
    return torch.cat([torch.stack([*shares, balance / batches, of_logits / batches]), loads])
