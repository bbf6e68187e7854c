"""Freezes parameters of a model by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ..errors import ConfigError


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Excludes parameters from training, before the model is wrapped; returns their names.

    Args:
        patterns: shell patterns of parameter names, such as ``decoder.layers.0.*``.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"freeze {pattern!r} matches no parameter; names are as {names[0]} and {names[-1]}")
    frozen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if len(frozen) == len(names):
        raise ConfigError(f"freeze {' '.join(patterns)} matches all {len(names)} parameters; leave some to train")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen
