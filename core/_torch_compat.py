"""The one place for what differs between the torch versions that `setup.py` admits."""

from __future__ import annotations

from typing import Any


def fsdp_param_groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP2 module's state: a list since torch 2.12, one group or None before."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
