"""The size of a vocabulary as the model holds it, and the check that token ids lie in it."""

from __future__ import annotations

import torch

from ..errors import ConfigError, DataError


def pad_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """The smallest multiple of `multiple` that holds `vocab_size` tokens.

    It depends on no degree of parallelism, so that one checkpoint fits them all: 128 is divided by every
    tensor-parallel size that is a power of two up to it, and keeps the logits' matrix aligned for GPU kernels.

    Raises:
        ConfigError: either number is below one.
    """
    if vocab_size < 1 or multiple < 1:
        raise ConfigError(f"a vocabulary of {vocab_size} padded to a multiple of {multiple}: both must be positive")
    return -(-vocab_size // multiple) * multiple


def check_ids(ids: torch.Tensor, vocab_size: int, what: str, *, allowed: int | None = None) -> None:
    """Looks for ids outside the vocabulary where looking costs next to nothing: in tensors on the CPU.

    Args:
        what: the ids are called in the message.
        allowed: one value outside the vocabulary that has a meaning.

    Raises:
        DataError: an id below zero or beyond the vocabulary, which the message names.
    """
    # Subclasses (fake tensors, DTensors) and traced tensors hold no values to look at.
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
