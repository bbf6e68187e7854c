"""A tree of values as JSON and tensors: what checkpoints keep of loops, callbacks, schedulers and hyper-parameters.

JSON has neither tuples, keys that are no text, nor numbers that are not finite. Each is written as an object with one
key, the name of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch

from ...errors import CheckpointError

_TENSOR, _TUPLE, _SET, _ITEMS, _FLOAT = "__tensor__", "__tuple__", "__set__", "__items__", "__float__"
_KINDS = (_TENSOR, _TUPLE, _SET, _ITEMS, _FLOAT)


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns `value` as JSON; its tensors are added to `tensors`, by names that begin with `where`.

    Mappings become dicts, and paths text. Subclasses of numbers and text lose their class.

    Raises:
        CheckpointError: names what no checkpoint holds, and where it is.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (str, PurePath)):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, torch.Tensor):
        tensors[where] = value.detach()
        return {_TENSOR: where}
    if isinstance(value, list):
        return [encode(item, f"{where}.{number}", tensors) for number, item in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset)):
        items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
        kind = _TUPLE if isinstance(value, tuple) else _SET
        return {kind: [encode(item, f"{where}.{number}", tensors) for number, item in enumerate(items)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not any(key in _KINDS for key in value):
            return {str(key): encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
        pairs = [
            [encode(key, f"{where}.key{number}", tensors), encode(item, f"{where}.{number}", tensors)]
            for number, (key, item) in enumerate(value.items())
        ]
        return {_ITEMS: pairs}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, and a checkpoint holds numbers, text, lists, dicts and tensors; leave "
        "it out (self.save_hyperparameters(ignore=...), on_save_checkpoint), or convert it"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Returns what `encode` was given; `tensor` returns a tensor by its name.

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
    held = value[kind]
    try:
        if kind == _TENSOR:
            return tensor(held)
        if kind == _FLOAT:
            return float(held)
        if kind == _ITEMS:
            return {decode(key, tensor): decode(item, tensor) for key, item in held}
        return (tuple if kind == _TUPLE else set)(decode(item, tensor) for item in held)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint's values hold an invalid {kind} ({error})") from None
