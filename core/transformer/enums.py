"""Enums that Megatron-LM's modules take."""

from __future__ import annotations

from enum import Enum


class AttnBackend(Enum):
    """Kernels of attention, for `TransformerConfig.attention_backend`, which keeps the name."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5


class AttnMaskType(Enum):
    """Implicit mask of attention, applied before an explicit one. Attention here is causal."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
