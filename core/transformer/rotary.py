"""Turning queries and keys by their position (Su et al., 2021); the angles come from `RotaryEmbedding`."""

from __future__ import annotations

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of every angle, `[s, b or 1, 1, r]` each, in fp32; a channel and the one r / 2 further share one."""


def apply_rotary_pos_emb(tensor: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """`tensor` `[s, b, ..., d]` with the first r of its d channels rotated, the rest as it was.

    Channel i turns together with channel i + r / 2. Angles are exact to fp32; the products are taken in the tensor's
    dtype, as Megatron-LM takes them.
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
