"""What a forward leaves to its recomputation: the buffers that it began with, and what its modules noted in it.

A recomputation runs a forward again in backward. It reads what that forward read, other forwards and steps in between
or not, and changes nothing: a running mean is moved once, tokens are counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from ..base._torch_compat import NO_BACKWARD, current_backward

T = TypeVar("T")
Buffers = dict[str, Tensor | None]

# Notes of the recomputed forwards that run now, the outermost first; and those that a recomputation reads. Forwards
# and recomputations set both and restore them. A recomputation may run in a thread of autograd's: nothing else runs
# then.
_recording: list[list[Any]] = []
_replayed: Iterator[Any] | None = None


def noted(make: Callable[[], T]) -> T | None:
    """Returns `make()`. A recomputation does not call it: it returns what its own forward has made.

    What it returns lives as long as the forward's graph, and must not have one of its own. None in a recomputation
    that is not :func:`~core.tensor_parallel.random.recompute`'s, such as torch's checkpoint.
    """
    if _replayed is None and current_backward() != NO_BACKWARD:
        return None
    value: T | None = make() if _replayed is None else next(_replayed, None)
    for notes in _recording:
        notes.append(value)
    return value


class RecordedForward:
    """A forward that will be recomputed. Make it before the forward begins.

    Args:
        modules: those whose buffers the forward may read and write. Copies of these live as long as its graph.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Of each module with buffers: where it holds them; as they were, by identity and version; and their values.
        copies: Copies = {}
        self._states = [
            (module._buffers, _versions(module._buffers), _copied(module._buffers, copies))
            for root in modules
            for module in root.modules()
            if module._buffers
        ]
        self._notes: list[Any] = []  # results of `noted`, in order; the forward adds, recomputations read

    @contextmanager
    def recording(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Context of the forward, around `inner`."""
        _recording.append(self._notes)
        try:
            with inner:
                yield
        finally:
            _recording.pop()
        for held, versions, values in self._states:
            now = _versions(held)
            for name in [name for name, value in values.items() if _is_code(value)]:
                if now.get(name) == versions[name]:
                    del values[name]

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Context of a recomputation. It sees copies of the buffers, which are dropped with what it writes."""
        global _recording, _replayed
        outer, now = (_recording, _replayed), [(held, dict(held)) for held, _, _ in self._states]
        _recording, _replayed = [], iter(self._notes)
        copies: Copies = {}  # anew: another backward through a kept graph recomputes again
        for held, _, values in self._states:
            held.update(_copied(values, copies))
        try:
            yield
        finally:
            _recording, _replayed = outer
            for held, buffers in now:
                held.update(buffers)


Copies = dict[Tensor, Tensor]
"""The copy of each buffer: one for all modules that hold it."""


def _is_code(buffer: Tensor | None) -> bool:
    """Returns whether a buffer holds packed codes, as quantized weights do: too large to be kept, and never written by
    `Tensor.data` or by kernels that leave the version as it was."""
    return buffer is not None and buffer.dim() > 1 and (buffer.itemsize == 1 or not buffer.is_floating_point())


def _versions(buffers: Buffers) -> dict[str, tuple[int, int]]:
    return {name: (id(b), 0 if b is None or b.is_inference() else b._version) for name, b in buffers.items()}


def _copied(buffers: Buffers, copies: Copies) -> Buffers:
    for buffer in buffers.values():
        if buffer is not None and buffer not in copies:
            copies[buffer] = buffer.detach().clone()
    return {name: None if buffer is None else copies[buffer] for name, buffer in buffers.items()}
