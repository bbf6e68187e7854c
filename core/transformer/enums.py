"""Enums that Megatron-LM's modules take."""

from __future__ import annotations

from enum import Enum

AttnBackend = Enum("AttnBackend", ["flash", "fused", "unfused", "local", "auto"])
"""Kernels of attention, for `TransformerConfig.attention_backend`, which keeps the name."""

AttnMaskType = Enum("AttnMaskType", ["padding", "causal", "no_mask", "padding_causal", "arbitrary"])
"""Implicit mask of attention, applied before an explicit one. Attention here is causal."""
