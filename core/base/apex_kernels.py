"""NVIDIA apex's fused kernels, where they are asked for.

``SHARDSTACK_APEX=1`` takes its optimizers and norms on GPUs in place of torch's. They round otherwise, and count steps
by group and not by parameter, so that a run must not begin to use them because a machine has them.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from .errors import ConfigError, warn_once


def apex_module(name: str, kernels: str, *functions: str) -> Any | None:
    """Returns a module of apex where it is asked for, else None.

    Args:
        name: of the module, for example ``apex.optimizers``.
        kernels: its compiled part, without which its functions exist but cannot be called.
        functions: what it has to have. PyPI's `apex` is another project.

    Raises:
        ConfigError: it is asked for, and not there.
    """
    setting = os.environ.get("SHARDSTACK_APEX", "0")
    if setting not in ("0", "1"):
        raise ConfigError(f"SHARDSTACK_APEX is {setting!r}; it takes 1 or 0")
    if setting == "0":
        return None
    try:
        importlib.import_module(kernels)
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"SHARDSTACK_APEX is 1, but {error}; build NVIDIA apex with its kernels, or unset it"
        ) from None
    missing = [function for function in functions if not hasattr(module, function)]
    if missing:
        raise ConfigError(
            f"SHARDSTACK_APEX is 1, but {name} has no {', '.join(missing)}; install NVIDIA's apex (PyPI's is another "
            "project), or unset it"
        )
    warn_once(f"SHARDSTACK_APEX: {name} in place of torch's kernels; its results are rounded otherwise")
    return module
