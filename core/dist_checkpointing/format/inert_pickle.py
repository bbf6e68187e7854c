"""Reads pickles without running them: each class that one names becomes a record that keeps what it is given.

A pickle is a program. Of its names only those that a reader knows are resolved, to fresh records or to dtypes; no
class of torch and no function is ever called or even reachable. Its size bounds what it may ask for (`core.bounds`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from ...bounds import BoundsError, brief, check_pickle
from ...dtypes import DTYPES
from ...errors import CheckpointError


class Record:
    """Takes the place of every class and function that a pickle names: keeps what it is given and does nothing."""

    kind = ""

    def __init__(self, *args: Any) -> None:
        self.state: Any = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        state = getattr(self, "state", None)
        return state.get(name) if isinstance(state, dict) else None


def load_inert(
    data: bytes, kind_of: Callable[[str, str], str | None], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """What a pickle describes, of records, dtypes and plain values.

    Args:
        kind_of: the `kind` of the record for a global, by module and name; None for one that may not be named.
        persistent: what a persistent id becomes; None refuses them.

    Raises:
        CheckpointError: it names something else, asks for too much, or is damaged.
    """
    try:
        check_pickle(data, lambda module, name: _is_dtype(module, name) or kind_of(module, name) is not None)
        return _Unpickler(io.BytesIO(data), kind_of, persistent).load()
    except CheckpointError:
        raise
    except BoundsError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"not readable ({type(error).__name__}: {brief(str(error))})") from None


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and name in DTYPES


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, kind_of: Callable[[str, str], str | None], persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(stream)
        self._kind_of, self._persistent = kind_of, persistent
        self._classes: dict[tuple[str, str], type[Record]] = {}
        """Made for this pickle alone: it can set attributes on the classes that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if _is_dtype(module, name):
            return DTYPES[name]
        kind = self._kind_of(module, name)
        if kind is None:
            raise CheckpointError(
                f"it names {brief(f'{module}.{name}')}, which no description of tensors needs; nothing was run"
            )
        if (module, name) not in self._classes:
            self._classes[module, name] = type(kind, (Record,), {"kind": kind})
        return self._classes[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise CheckpointError("it refers to something outside of itself; nothing was run")
        return self._persistent(pid)
