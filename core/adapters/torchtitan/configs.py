"""Configs of torchtitan with this library's `parallelize` in place of the model's."""

from __future__ import annotations

import dataclasses
from typing import Any

from .parallelize import parallelize


def with_fsdp2(config: Any) -> Any:
    """Returns a ``Trainer.Config`` whose model is sharded by `parallelize`; nothing else changes.

    Args:
        config: torchtitan's, changed in place; or a ``ModelSpec``, which is copied.
    """
    if hasattr(config, "model_spec"):
        config.model_spec = with_fsdp2(config.model_spec)
        return config
    return dataclasses.replace(config, parallelize_fn=parallelize)
