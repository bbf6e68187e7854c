"""Every config function of torchtitan's models, under its own name, with this library's FSDP2 engine.

torchtitan imports this module for ``--module core.adapters.torchtitan``, and ``--config`` names the function.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torchtitan.models import _supported_models

from .parallelize import with_fsdp2


def __getattr__(name: str) -> Callable[[], Any]:
    # A config's name begins with its model's: looking there first imports no other model.
    if name.startswith("_"):  # Python's own look-ups would import every model
        raise AttributeError(f"{__name__} has no attribute {name!r}")
    for model in sorted(_supported_models, key=lambda model: (not name.startswith(model), model)):
        try:
            registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:  # of a package that only this model needs
            if name.startswith(model):
                raise
            continue
        function = vars(registry).get(name)
        if callable(function):
            return functools.partial(_sharded, function)
    raise AttributeError(f"no model of torchtitan has a config function {name!r}")


def _sharded(function: Callable[[], Any]) -> Any:
    return with_fsdp2(function())
