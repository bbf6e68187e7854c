"""Kinds of models, by Megatron-LM's names."""

from __future__ import annotations

from enum import Enum


class ModelType(Enum):
    """What a script tells its training loop of the model. There is one kind here."""

    encoder_or_decoder = 1
