"""Rotates queries and keys by their positions (Su et al., 2021); the angles come from `RotaryEmbedding`."""

from __future__ import annotations

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of every angle, `[s, b or 1, 1, r]` each, in fp32; channels i and i + r / 2 have one angle."""


def apply_rotary_pos_emb(tensor: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates the first r of the d channels of `tensor` `[s, b, ..., d]`; the others are unchanged.

    Channel i is rotated together with channel i + r / 2. Angles are in fp32; products are in the tensor's dtype, as in
    Megatron-LM.
    """
    cos, sin = (part.to(tensor.dtype) for part in rotation)
    while cos.dim() < tensor.dim():
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    size = cos.shape[-1]
    if size == tensor.shape[-1]:
        return tensor * cos + _quarter_turn(tensor) * sin
    turned, passed = tensor[..., :size], tensor[..., size:]
    return torch.cat((turned * cos + _quarter_turn(turned) * sin, passed), dim=-1)


def _quarter_turn(tensor: torch.Tensor) -> torch.Tensor:
    first, second = tensor.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
