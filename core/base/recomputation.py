"""Runs a function without saving its activations, and again in backward, which then reads what the forward read.

A recomputation begins with the buffers and random streams that its forward began with, other forwards and steps in
between or not, and gets what modules noted in that forward. It changes nothing: a running mean is moved once, tokens
are counted once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ._torch_compat import NO_BACKWARD, current_backward

T = TypeVar("T")
Buffers = dict[str, Tensor | None]

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Context managers for the forward and for its recomputation."""

tracked_streams: dict[str, Tensor] = {}
"""State of each random stream of this process next to torch's default one, by name. A tracker of a model's layers
fills it, recomputations replace its states and put them back. Never replaced itself."""

# Notes of the recomputed forwards that run now, the outermost first; and those that a recomputation reads. Forwards
# and recomputations set both and restore them. A recomputation may run in a thread of autograd's: nothing else runs
# then.
_recording: list[list[Any]] = []
_replayed: Iterator[Any] | None = None


def noted(make: Callable[[], T]) -> T | None:
    """Returns `make()`. A recomputation does not call it: it returns what its own forward has made.

    What it returns lives as long as the forward's graph, and must not have one of its own. None in a recomputation
    that is not :func:`recompute`'s, such as torch's checkpoint.
    """
    if is_recomputed_elsewhere():
        return None
    value: T | None = make() if _replayed is None else next(_replayed, None)
    for notes in _recording:
        notes.append(value)
    return value


def is_recomputed_elsewhere() -> bool:
    """Returns whether a recomputation runs that is not :func:`recompute`'s, such as torch's checkpoint."""
    return _replayed is None and current_backward() != NO_BACKWARD


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


def recompute(
    function: Callable[..., Any],
    *args: Any,
    modules: Iterable[nn.Module] | None = None,
    context_fn: Callable[[], Contexts] | None = None,
    **kwargs: Any,
) -> Any:
    """Calls `function(*args, **kwargs)` without saving its activations, which backward computes again (Chen et al.,
    2016), by torch's non-reentrant checkpoint.

    Recomputation draws the random numbers of the forward, from the default stream and `tracked_streams`, and restores
    all streams.

    Args:
        modules: those whose buffers the function may write; by default the module that `function` is, or is a method
            of. A recomputation reads what the buffers were, and leaves what they are.
        context_fn: torch's argument, to save some activations (`create_selective_checkpoint_contexts`).
    """
    # torch.compile does not support our contexts; a model without tracked streams does not need them: compiled code
    # writes buffers in its forward alone.
    if tracked_streams or not torch.compiler.is_compiling():
        context_fn = functools.partial(_contexts, _modules_of(function) if modules is None else modules, context_fn)
    contexts: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    return torch_checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=False, **contexts)


def _modules_of(function: Any) -> list[nn.Module]:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return [owner] if isinstance(owner, nn.Module) else []


def _contexts(modules: Iterable[nn.Module], inner: Callable[[], Contexts] | None) -> Contexts:
    forward, recomputation = (nullcontext(), nullcontext()) if inner is None else inner()
    record = RecordedForward(modules)
    return record.recording(forward), _Recomputation(record, dict(tracked_streams), recomputation)


class _Recomputation:
    """Begins a recomputation as its forward began. Each backward through the graph enters."""

    def __init__(
        self, record: RecordedForward, streams: dict[str, Tensor], inner: AbstractContextManager[Any]
    ) -> None:
        self._record, self._streams, self._inner = record, streams, inner  # fixed
        self._entered: list[ExitStack] = []  # `__enter__` pushes, `__exit__` pops

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.callback(set_tracked, dict(tracked_streams))
        set_tracked(self._streams)
        stack.enter_context(self._record.replaying())
        stack.enter_context(self._inner)
        self._entered.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def set_tracked(states: dict[str, Tensor]) -> None:
    """Replaces all of `tracked_streams`."""
    tracked_streams.clear()
    tracked_streams.update(states)
