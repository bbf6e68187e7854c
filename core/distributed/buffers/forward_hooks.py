"""Overlaps the all-gather of parameters with forward: each module waits for its own parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from .bucket_group import BucketGroup


def wait_before_forwards(module: nn.Module, group_of: Mapping[nn.Parameter, BucketGroup]) -> Iterator[Any]:
    """Makes each module below `module` wait for its parameters before its forward; yields the hooks' handles.

    All other code that reads a parameter waits too (`pending_parameters`). A module of torch with children waits for
    all parameters below it, because it may read its children's weights itself, and choose a kernel by them.
    """
    for submodule in module.modules():
        params = submodule.parameters(recurse=_reads_weights_of_children(submodule))
        groups = {group_of[p]: None for p in params if p in group_of}
        if groups:  # before all other hooks, which may read parameters
            yield submodule.register_forward_pre_hook(_Waiter(list(groups)), prepend=True)


class _Waiter:
    """Waits for the parameters of some buckets; in a pickled module it does nothing."""

    def __init__(self, groups: Sequence[BucketGroup]) -> None:
        self._groups = groups

    def __call__(self, *unused: Any) -> None:
        for group in self._groups:
            group.finish_param_sync()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Waiter, ([],)


def _reads_weights_of_children(module: nn.Module) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, containers)
