"""One pre-norm transformer layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attention import SelfAttention
from .dropout import hidden_dropout
from .mlp import MLP
from .module import MegatronModule
from .norms import build_norm
from .rotary import Rotation
from .sequence_pieces import Piece
from .transformer_config import TransformerConfig


class TransformerLayer(MegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.input_layernorm = build_norm(config, config.hidden_size)
        self.self_attention = SelfAttention(config)
        self.pre_mlp_layernorm = build_norm(config, config.hidden_size)
        self.mlp = MLP(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: Rotation | None = None,
        pieces: Sequence[Piece] | None = None,
    ) -> torch.Tensor:
        """`[s, b, h]` to `[s, b, h]`; with sequence parallelism both are this rank's `[s / tp, b, h]`."""
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attention(normed, attention_mask, rotary_pos_emb, pieces)
        hidden_states = hidden_states + self._dropout(attended)
        return hidden_states + self._dropout(self.mlp(self.pre_mlp_layernorm(hidden_states)))

    def _dropout(self, branch: torch.Tensor) -> torch.Tensor:
        config = self.config
        return hidden_dropout(
            branch, config.hidden_dropout, training=self.training, sequence_parallel=config.sequence_parallel
        )
