"""torchtitan's trainer on this library's FSDP2 engine.

    torchtitan_train --module core.adapters.torchtitan --config llama3_8b     # every config of torchtitan, by its name

In a config function of your own, `with_fsdp2` does the same to any ``Trainer.Config``: it replaces the model's
``parallelize_fn`` by `parallelize`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..bridge.translation import check_version

check_version("torchtitan", __name__)

from torchtitan.models import _supported_models  # noqa: E402

from .parallelize import parallelize, with_fsdp2  # noqa: E402

__all__ = ["parallelize", "with_fsdp2"]


def __getattr__(name: str) -> Callable[[], Any]:
    """Returns the config function of this name, of any model of torchtitan, which asks this module for ``--config``."""
    if name.startswith("_"):  # Python's own look-ups would import every model
        raise AttributeError(f"{__name__} has no attribute {name!r}")
    # A config's name begins with its model's: looking there first imports no other model.
    for model in sorted(_supported_models, key=lambda model: (not name.startswith(model), model)):
        try:
            registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:  # of a package that only this model needs
            if name.startswith(model):
                raise
            continue
        function = vars(registry).get(name)
        if callable(function):
            return lambda: with_fsdp2(function())
    raise AttributeError(f"no model of torchtitan has a config function {name!r}")
