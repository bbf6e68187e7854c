"""Experts that take every token: one MLP next to the others."""

from __future__ import annotations

import torch

from ...tensor_parallel.groups import Group
from ...tensor_parallel.initialization import ParameterOwner, initialize_unless_deferred, mark_parameter
from ...tensor_parallel.weight_gradients import linear
from ..mlp import MLP
from ..transformer_config import TransformerConfig


class SharedExpertMLP(MLP, ParameterOwner):
    """An MLP of `moe_shared_expert_intermediate_size`, multiplied by sigmoid(x g^T) with `moe_shared_expert_gate`."""

    gate_weight: torch.nn.Parameter | None

    def __init__(self, config: TransformerConfig, tp_group: Group = None) -> None:
        super().__init__(config, ffn_hidden_size=config.moe_shared_expert_intermediate_size, tp_group=tp_group)
        self.register_parameter("gate_weight", None)
        if config.moe_shared_expert_gate:
            self.add_parameter(
                "gate_weight",
                (1, config.hidden_size),
                config.init_method,
                config=config,
                sequence_parallel=config.sequence_parallel,
            )
            mark_parameter(self, "gate_weight", use_muon=False)
        initialize_unless_deferred(self, config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[s, b, h]` to `[s, b, h]`. With sequence parallelism both are this rank's `[s / tp, b, h]`."""
        output = super().forward(hidden_states)
        if self.gate_weight is None:
            return output
        return output * linear(hidden_states, self.gate_weight).sigmoid()
