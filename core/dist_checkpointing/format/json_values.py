"""Values of a training state as JSON, which lacks tuples, sets, keys that are no text, and infinite numbers and NaN.

Each of these is an object with one key, the name of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from ...base.errors import CheckpointError

_TENSOR, _TUPLE, _SET, _ITEMS, _FLOAT = "__tensor__", "__tuple__", "__set__", "__items__", "__float__"
_KINDS = (_TENSOR, _TUPLE, _SET, _ITEMS, _FLOAT)


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Returns `value` as JSON, and adds its tensors to `tensors`, by names that begin with `where`.

    Mappings become dicts, and paths text. Subclasses of numbers and text lose their class.

    Raises:
        CheckpointError: names what no checkpoint holds, and where it is.
    """

    def each(items: Any) -> list[Any]:
        return [encode(item, f"{where}.{number}", tensors) for number, item in enumerate(items)]

    match value:
        case None | bool():
            return value
        case str() | PurePath():
            return str(value)
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
        case torch.Tensor():
            if where in tensors:
                raise CheckpointError(f"two tensors have the name {where}, by keys with dots; rename one")
            tensors[where] = value.detach()
            return {_TENSOR: where}
        case list():
            return each(value)
        case tuple():
            return {_TUPLE: each(value)}
        case set() | frozenset():
            return {_SET: each(sorted(value, key=repr))}
        case Mapping() if all(isinstance(key, str) and key not in _KINDS for key in value):
            return {str(key): encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
        case Mapping():
            return {_ITEMS: each(list(value.items()))}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, and a checkpoint holds numbers, text, lists, dicts and tensors; leave "
        "it out (self.save_hyperparameters(ignore=...), on_save_checkpoint), or convert it"
    )


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Returns what `encode` was given. `tensor` returns a tensor by its name.

    Raises:
        CheckpointError: JSON that `encode` does not write.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next((name for name in _KINDS if name in value), None)
    if kind is None:
        return {key: decode(item, tensor) for key, item in value.items()}
    content = value[kind]
    try:
        if kind in (_TENSOR, _FLOAT):
            return tensor(content) if kind == _TENSOR else float(content)
        return {_TUPLE: tuple, _SET: set, _ITEMS: dict}[kind](decode(content, tensor))
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint's values hold an invalid {kind} ({error})") from None
