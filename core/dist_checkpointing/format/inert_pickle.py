"""Reads pickles without running them: each class in a pickle becomes a record that stores its arguments.

A pickle is a program. Only names that the reader knows are resolved, to new record classes or dtypes; no class of
torch and no function can be called or reached. The size of the pickle bounds what it may allocate
(`core.files.bounds`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from ...dtypes import DTYPES
from ...errors import CheckpointError
from ...files.bounds import BoundsError, brief, check_pickle


class Record:
    """Replaces every class and function in a pickle: stores its arguments and does nothing."""

    kind = ""

    def __init__(self, *args: Any) -> None:
        # The arguments of the constructor. `__setstate__` replaces them while the pickle is read.
        self.state: Any = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        state = getattr(self, "state", None)
        return state.get(name) if isinstance(state, dict) else None


def load_inert(
    data: bytes, kind_of: Callable[[str, str], str | None], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Returns the object that a pickle describes, made of records, dtypes and plain values.

    Args:
        kind_of: returns the `kind` of the record for a global, by module and name; None refuses the name.
        persistent: returns the object for a persistent id; None refuses all ids.

    Raises:
        CheckpointError: the pickle names something else, allocates too much, or is damaged.
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
        """Record classes by module and name, of this pickle alone: it can set attributes on the classes that it names.
        `find_class` adds them."""

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
