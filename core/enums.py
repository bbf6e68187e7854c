"""Kinds of models, by Megatron-LM's names."""

from __future__ import annotations

from enum import Enum


class ModelType(Enum):
    """The kind of a script's model. There is one here."""

    encoder_or_decoder = 1
