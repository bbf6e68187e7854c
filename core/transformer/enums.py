"""Kinds that Megatron-LM's modules are told by an enum."""

from __future__ import annotations

from enum import Enum


class AttnMaskType(Enum):
    """Which tokens a token sees before an explicit mask is applied. Attention here is causal."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
