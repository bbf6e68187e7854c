"""Detects writes to shards and to gathered parameters, so that no forward uses stale values and no write is lost."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import UnitError
from .torch_private import gathered_versions, mark_gathered_parameter, name_of_parameter, shard_versions

_UNWRITTEN = 0
"""Version of a gathered parameter that only torch's gather has written."""


class GatheredValues:
    """Compares versions of shards and of gathered parameters from one forward of a sharded model to the next.

    A version is torch's count of in-place writes to a tensor, an integer that costs nothing to read.

    Args:
        root: the sharded model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        # Versions of shards at the last `are_stale`, which replaces them.
        self._of_shards = shard_versions(root)
        # Versions of gathered parameters at the last `check_unwritten`, which replaces them. A parameter is here once
        # it has been gathered.
        self._of_gathered: dict[Any, int] = {}

    def are_stale(self) -> bool:
        """Returns whether a shard was written (an optimizer's step, a load) since the last call."""
        before, self._of_shards = self._of_shards, shard_versions(self._root)
        return before != self._of_shards

    def check_unwritten(self) -> None:
        """Raises where a parameter was written while it was gathered: the write would be lost with the gathered copy.

        Marks those gathered for the first time, so that the step of an optimizer built from them raises.

        Raises:
            UnitError: names the parameter.
        """
        before, self._of_gathered = self._of_gathered, gathered_versions(self._root)
        for parameter in self._of_gathered.keys() - before.keys():
            mark_gathered_parameter(parameter)
        for parameter, version in self._of_gathered.items():
            if version != before.get(parameter, _UNWRITTEN):
                raise UnitError(
                    f"parameter {name_of_parameter(parameter)} was written while its unit was gathered, between a "
                    "forward and the end of its step, and the write would be lost; write parameters after "
                    "optimizer.step() and before the next forward, when the module shows its shards"
                )
