"""Self-attention: fused projection, rotation, core, projection back."""

from __future__ import annotations

import torch

from ..tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.random import checkpoint
from .dot_product_attention import DotProductAttention
from .module import MegatronModule
from .norms import build_norm
from .rotary import Rotation, apply_rotary_pos_emb
from .transformer_config import TransformerConfig


class SelfAttention(MegatronModule):
    """Causal multi-head or grouped-query attention, of which each tensor-parallel rank has whole groups.

    The rows of the fused projection's weight are laid out by query group, `[q ... q k v]` of one after those of
    another, so that a cut between groups keeps together what belongs together.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        heads, groups, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
        self.heads_per_group = heads // groups
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (heads + 2 * groups) * channels,
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear or config.add_qkv_bias,
        )
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            # Each tensor-parallel rank norms its own heads with the whole weight.
            partial = config.tensor_model_parallel_size > 1
            self.q_layernorm = build_norm(config, channels, partial_gradients=partial)
            self.k_layernorm = build_norm(config, channels, partial_gradients=partial)
        self.core_attention = DotProductAttention(config)
        self.linear_proj = RowParallelLinear(
            heads * channels,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: Rotation | None = None,
    ) -> torch.Tensor:
        """`[s, b, h]` to `[s, b, h]`; with sequence parallelism both are this rank's `[s / tp, b, h]`.

        Args:
            attention_mask: as `DotProductAttention` takes it.
            rotary_pos_emb: rotates queries and keys.
        """
        query, key, value = self._query_key_value(hidden_states, rotary_pos_emb)
        if self.config.recompute_granularity == "selective" and self.training:
            context = checkpoint(self.core_attention, query, key, value, attention_mask)
        else:
            context = self.core_attention(query, key, value, attention_mask)
        output: torch.Tensor = self.linear_proj(context)[0]
        return output

    def _query_key_value(
        self, hidden_states: torch.Tensor, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query `[s, b, heads / tp, d]`, key and value `[s, b, groups / tp, d]`: views where nothing changed them."""
        per_group = self.heads_per_group
        mixed = self.linear_qkv(hidden_states)[0].unflatten(-1, (-1, per_group + 2, self.config.kv_channels))
        if self.q_layernorm is None or self.k_layernorm is None:
            turning, value = mixed.split([per_group + 1, 1], dim=3)  # queries and their key turn alike, in one go
            if rotation is not None:
                turning = apply_rotary_pos_emb(turning, rotation)
            query, key = turning.split([per_group, 1], dim=3)
        else:
            query, key, value = mixed.split([per_group, 1, 1], dim=3)
            query, key = self.q_layernorm(query), self.k_layernorm(key)
            if rotation is not None:
                query, key = apply_rotary_pos_emb(query, rotation), apply_rotary_pos_emb(key, rotation)
        return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)
