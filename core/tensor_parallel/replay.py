"""What a forward leaves to its recomputation: the buffers that it began with, and what its modules noted in it.

A recomputation runs a forward again in backward. It reads what that forward read, other forwards and steps in between
or not, and changes nothing: a running mean is moved once, tokens are counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from ..base._torch_compat import NO_BACKWARD, current_backward
from ..base.errors import ParallelConfigError

T = TypeVar("T")

MOST_ELEMENTS = 2**20
"""Elements of the largest buffer that is copied before a forward."""

# Notes of the recomputed forwards that run now, the outermost first; and those that a recomputation reads. Forwards
# and recomputations set both and restore them. A recomputation may run in a thread of autograd's: nothing else runs
# then.
_recording: list[list[Any]] = []
_replayed: Iterator[Any] | None = None


def noted(make: Callable[[], T]) -> T | None:
    """Returns `make()`. A recomputation does not call it: it returns what its own forward has made.

    What it returns lives as long as the forward's graph. None in a recomputation that is not
    :func:`~core.tensor_parallel.random.recompute`'s, such as torch's checkpoint.
    """
    if _replayed is None and current_backward() != NO_BACKWARD:
        return None
    value: T | None = make() if _replayed is None else next(_replayed, None)
    for notes in _recording:
        notes.append(value)
    return value


class _Buffer(NamedTuple):
    holder: dict[str, Tensor | None]
    name: str
    before: Tensor | None
    """The buffer when the forward began."""
    version: int
    copy: Tensor | None
    """Its values then. None of a large buffer."""


class RecordedForward:
    """A forward that will be recomputed. Make it before the forward begins.

    Args:
        modules: those whose buffers the forward may write.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Of all buffers at first, and of those that the forward has written from its end.
        self._buffers = [
            _Buffer(module._buffers, name, buffer, _version(buffer), _copy(buffer))
            for root in modules
            for module in root.modules()
            for name, buffer in module._buffers.items()
        ]
        self._notes: list[Any] = []  # results of `noted`, in order; the forward adds, recomputations read

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the forward.

        Raises:
            ParallelConfigError: at its end, if it has written a large buffer in place.
        """
        _recording.append(self._notes)
        try:
            yield
        finally:
            _recording.remove(self._notes)
        self._buffers = [written for buffer in self._buffers if (written := _if_written(buffer)) is not None]

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Context of a recomputation. It sees copies of the buffers, which are dropped with what it writes."""
        global _recording, _replayed
        outer, now = (_recording, _replayed), [buffer.holder.get(buffer.name) for buffer in self._buffers]
        copies = {id(b.before): b.copy.clone() for b in self._buffers if b.copy is not None}
        _recording, _replayed = [], iter(self._notes)
        for buffer in self._buffers:
            buffer.holder[buffer.name] = copies.get(id(buffer.before))
        try:
            yield
        finally:
            _recording, _replayed = outer
            for buffer, present in zip(self._buffers, now, strict=True):
                buffer.holder[buffer.name] = present


class Reenterable(AbstractContextManager[None]):
    """Enters a new context at each entry: every backward through a kept graph recomputes."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Any]] = []  # `__enter__` pushes, `__exit__` pops

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _version(buffer: Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None or buffer.numel() > MOST_ELEMENTS else buffer.detach().clone()


def _if_written(buffer: _Buffer) -> _Buffer | None:
    """Returns a buffer with a copy of what it was if the forward may have written it, else None."""
    before = buffer.before
    if before is not None and _version(before) != buffer.version:
        if buffer.copy is None:
            raise ParallelConfigError(
                f"a recomputed forward has written buffer {buffer.name!r} of {before.numel()} elements in place, and "
                f"buffers of more than {MOST_ELEMENTS} are not copied for recomputation; assign a new tensor to it, "
                "or leave the module out of activation checkpointing"
            )
        return buffer
    if buffer.holder.get(buffer.name) is not before:
        return buffer._replace(copy=before if buffer.copy is None else buffer.copy)
    # Kernels of batch norm write running statistics without a trace: `_version` stays.
    is_statistic = before is not None and before.ndim == 1 and before.is_floating_point()
    return buffer if is_statistic and buffer.copy is not None else None
