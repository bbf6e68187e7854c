"""The feed-forward half of a layer, gated or not."""

from __future__ import annotations

import torch

from ..tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from .activations import activation_function
from .module import MegatronModule
from .transformer_config import TransformerConfig


class MLP(MegatronModule):
    """fc2(activation(fc1(x))), or with `gated_linear_unit` fc2(activation(gate) x up).

    Gate and up are one projection whose rows alternate, g0 u0 g1 u1 ...: any even cut of it, over tensor-parallel
    ranks or in a checkpoint, leaves every pair together and in order.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.activation = activation_function(config.activation_func)
        self.gated = config.gated_linear_unit
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            config.ffn_hidden_size * (2 if self.gated else 1),
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear,
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[s, b, h]` to `[s, b, h]`; with sequence parallelism both are this rank's `[s / tp, b, h]`."""
        hidden = self.linear_fc1(hidden_states)[0]  # [s, b, ffn / tp], twice that when gated
        if self.gated:
            # Copies, because activations at a stride of two are not vectorised; what autograd keeps stays the same.
            gate, up = (branch.contiguous() for branch in hidden.unflatten(-1, (-1, 2)).unbind(-1))
            hidden = self.activation(gate) * up
        else:
            hidden = self.activation(hidden)
        output: torch.Tensor = self.linear_fc2(hidden)[0]
        return output
