"""The core of attention, softmax(QK^T / sqrt(d)) V, on torch's fused kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..tensor_parallel.random import get_rng_tracker
from .module import MegatronModule
from .transformer_config import TransformerConfig


class DotProductAttention(MegatronModule):
    """Causal attention of this rank's heads. Holds no parameters.

    Without an explicit mask no tensor of s x s elements exists, except where a backend has no fused kernel for what
    is asked; on CPU that is attention dropout.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.dropout = config.attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the heads and groups of this rank; strides are free, but for a contiguous last dim.

        Args:
            query: `[s, b, heads, d]`.
            key, value: `[s, b, groups, d]`; consecutive heads / groups query heads share a group.
            attention_mask: `[b or 1, 1, s, s]`, True where a query (third dim) must not see a key, in addition to
                the keys after it, which it never sees.

        Returns:
            `[s, b, heads * d]`.
        """
        grouped = query.shape[2] != key.shape[2]
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, n, s, d], views
        if grouped and not _fuses_groups(query, attention_mask):
            key, value = (_expand_groups(tensor, query.shape[1]) for tensor in (key, value))
            grouped = False
        visible = None if attention_mask is None else _visible(attention_mask)
        dropout = self.dropout if self.training else 0.0
        if dropout > 0.0:
            with get_rng_tracker().fork():
                context = _attend(query, key, value, visible, dropout, grouped)
        else:
            context = _attend(query, key, value, visible, dropout, grouped)
        return context.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n * d]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    dropout: float,
    grouped: bool,
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, visible, dropout, is_causal=visible is None, enable_gqa=grouped
    )


def _visible(attention_mask: torch.Tensor) -> torch.Tensor:
    """Megatron's mask (True is hidden) with the future hidden, as torch wants it (True is seen)."""
    return attention_mask.logical_not().tril()


def _fuses_groups(query: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    """Whether a fused kernel takes fewer key heads than query heads as they are.

    On CPU it does, and is 5 to 10 % quicker than on copies. On CUDA the flash and cuDNN kernels do, which want half
    precision and no mask; without them torch would fall back to the kernel that holds s x s scores.
    """
    return not query.is_cuda or (attention_mask is None and query.dtype in (torch.float16, torch.bfloat16))


def _expand_groups(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """`[b, groups, s, d]` to `[b, heads, s, d]`, each group repeated for its heads."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
