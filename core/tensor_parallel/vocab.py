"""Pads the size of a vocabulary, and checks that token ids are in it."""

from __future__ import annotations

import torch

from ..errors import ConfigError, DataError


def pad_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """Returns the smallest multiple of `multiple` that holds `vocab_size` tokens.

    It does not depend on the degrees of parallelism, so that one checkpoint fits all of them. 128 is a multiple of
    every power of two up to it as a tensor-parallel size, and keeps the logits' matrix aligned for GPU kernels.

    Raises:
        ConfigError: either number is below one.
    """
    if vocab_size < 1 or multiple < 1:
        raise ConfigError(f"a vocabulary of {vocab_size} padded to a multiple of {multiple}: both must be positive")
    return -(-vocab_size // multiple) * multiple


def check_ids(ids: torch.Tensor, vocab_size: int, what: str, *, allowed: int | None = None) -> None:
    """Checks that ids are in the vocabulary, for tensors on the CPU, where the check costs almost nothing.

    Args:
        what: name of the ids in the message.
        allowed: one value outside of the vocabulary that is allowed.

    Raises:
        DataError: an id is below zero or beyond the vocabulary; the message names it.
    """
    # Subclasses (fake tensors, DTensors) and traced tensors have no values to check.
    if type(ids) is not torch.Tensor or ids.device.type != "cpu" or not ids.numel() or torch.compiler.is_compiling():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low >= 0 and high < vocab_size:
        return
    outside = (ids < 0) | (ids >= vocab_size)
    if allowed is not None:
        outside &= ids != allowed
    if outside.any():
        raise DataError(
            f"{what} id {int(ids[outside][0])} is outside the vocabulary of {vocab_size} tokens "
            f"(0 to {vocab_size - 1}); use the tokenizer that the model was made for, or raise the vocabulary size"
        )
