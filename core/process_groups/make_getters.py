"""Makes the getters of `core.parallel_state` that differ only in the kind of group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed import ProcessGroup

from ..errors import ParallelConfigError
from . import current


class GroupGetter(Protocol):
    """Returns this rank's process group; None if it has none and `check_initialized` is False."""

    def __call__(self, check_initialized: bool = True) -> ProcessGroup | None: ...


def group_getter(kind: str, text: str) -> GroupGetter:
    """Makes a getter of this rank's process group; `text` is its docstring."""

    def getter(check_initialized: bool = True) -> ProcessGroup | None:
        return current.process_group(kind, check_initialized)

    getter.__doc__ = text
    return getter


def size_getter(kind: str, what: str, alone: int | None = None) -> Callable[[], int]:
    """Makes a getter of the number of ranks, which returns `alone`, if given, before initialisation."""

    def getter() -> int:
        return current.size(kind, alone)

    getter.__doc__ = f"Returns the size of the {what}{'' if alone is None else f'; {alone} before initialisation'}."
    return getter


def rank_getter(kind: str, what: str, alone: int | None = None) -> Callable[[], int]:
    """Makes a getter of this rank's place, which returns `alone`, if given, before initialisation."""

    def getter() -> int:
        return current.rank(kind, alone)

    getter.__doc__ = (
        f"Returns this rank's place in the {what}{'' if alone is None else f'; {alone} before initialisation'}."
    )
    return getter


def data_parallel_kind(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    """Returns the kind of data-parallel group that these arguments of Megatron-LM's getters ask for."""
    if partial_data_parallel and not with_context_parallel:
        raise ParallelConfigError(
            "partial_data_parallel=True was asked for without with_context_parallel=True; an optimizer instance "
            "shards over both, so pass both"
        )
    return "dp_shard_cp" if partial_data_parallel else "dp_cp" if with_context_parallel else "dp"


def name_functions(module: dict[str, Any]) -> None:
    """Names the functions made here after their variables in a module, for tracebacks and `help`."""
    for name, made in module.items():
        if getattr(made, "__qualname__", "").endswith("<locals>.getter"):
            made.__name__ = made.__qualname__ = name
            made.__module__ = module["__name__"]
