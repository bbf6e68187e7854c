"""The one rule by which training under a wrapper differs from that of a plain module; oracles apply it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def give_unused_zero_gradients(parameters: Iterable[nn.Parameter], attribute: str = "grad") -> None:
    """Gives zeros to parameters that are trainable when gradients are finalized, and that no backward has reached.

    Momentum and weight decay move them, which an optimizer of torch would leave out. The same under every wrapper, as
    in Megatron-LM; `test_unused_parameters` checks it by numbers.
    """
    for parameter in parameters:
        if parameter.requires_grad and getattr(parameter, attribute, None) is None:
            setattr(parameter, attribute, torch.zeros_like(parameter))
