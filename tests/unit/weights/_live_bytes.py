"""Counts the bytes of storages that are made while it is active, as long as they live, on this thread."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(value) for value in tree_flatten((args, kwargs))[0] if self._counts(value)}
        result = func(*args, **(kwargs or {}))
        for value in tree_flatten(result)[0]:
            if self._counts(value) and self._key(value) not in given:
                self._add(value.untyped_storage())
        return result

    @staticmethod
    def _counts(value: Any) -> bool:
        return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"

    @staticmethod
    def _key(value: torch.Tensor) -> int:
        return value.untyped_storage()._cdata

    def _add(self, storage: Any) -> None:
        if storage._cdata in self._seen:
            return
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self._seen[storage._cdata] = weakref.finalize(storage, self._drop, storage._cdata, num_bytes)

    def _drop(self, key: int, num_bytes: int) -> None:
        self._seen.pop(key, None)
        self.now -= num_bytes
