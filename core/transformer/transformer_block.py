"""The stack of layers, with the norm at its end and whole-layer recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..tensor_parallel.random import recompute
from .module import MegatronModule
from .norms import build_norm
from .rotary import Rotation
from .sequence_pieces import Piece
from .transformer_config import TransformerConfig
from .transformer_layer import TransformerLayer


class TransformerBlock(MegatronModule):
    """`config.num_layers` layers and `final_layernorm`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_layers))
        self.final_layernorm = build_norm(config, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: Rotation | None = None,
        pieces: Sequence[Piece] | None = None,
    ) -> torch.Tensor:
        """`[s, b, h]` to `[s, b, h]`; with sequence parallelism both are this rank's `[s / tp, b, h]`."""
        for first, last, recomputed in self._chunks():
            if recomputed:
                hidden_states = recompute(
                    self._run_layers, first, last, hidden_states, attention_mask, rotary_pos_emb, pieces
                )
            else:
                hidden_states = self._run_layers(first, last, hidden_states, attention_mask, rotary_pos_emb, pieces)
        output: torch.Tensor = self.final_layernorm(hidden_states)
        return output

    def _chunks(self) -> Iterator[tuple[int, int, bool]]:
        """Consecutive runs of layers, first to before last, and whether each is recomputed."""
        config, layers = self.config, len(self.layers)
        number = config.recompute_num_layers
        if config.recompute_granularity != "full" or number is None or not self.training:
            yield 0, layers, False
        elif config.recompute_method == "uniform":
            for first in range(0, layers, number):
                yield first, min(first + number, layers), True
        else:
            for layer in range(number):
                yield layer, layer + 1, True
            yield number, layers, False

    def _run_layers(
        self,
        first: int,
        last: int,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: Rotation | None,
        pieces: Sequence[Piece] | None,
    ) -> torch.Tensor:
        for layer in self.layers[first:last]:
            hidden_states = layer(hidden_states, attention_mask, rotary_pos_emb, pieces)
        return hidden_states
