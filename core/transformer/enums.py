"""Enums that Megatron-LM's modules take."""

from __future__ import annotations

from enum import Enum


class AttnMaskType(Enum):
    """Implicit mask of attention, applied before an explicit one. Attention here is causal."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
