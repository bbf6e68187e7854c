"""Readers of messages that come over a connection, given to them as files: one for each kind of message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from core.base import checked_json
from core.base.errors import WeightsError
from core.weights import WeightReceiver
from core.weights import receiver as receiving
from core.weights.messages import Bucket, Failure, Full, Patch, as_json, hash_bucket, new_hash, parse_message
from tests.fuzz.readers import Reader

_WEIGHTS = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
_CHANGED = [("b", torch.tensor([0, 5], dtype=torch.int32)), ("b", torch.ones(2, dtype=torch.bfloat16))]
_ROUNDS = {"full": list(_WEIGHTS.items()), "patch": _CHANGED}


def _metas(parts: list[tuple[str, Tensor]]) -> list[receiving.ParamMeta]:
    return [receiving.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in parts]


def _header(kind: str, base: str) -> dict[str, Any]:
    return checked_json.as_json(Full(1, as_json(_metas(_ROUNDS["full"]))) if kind == "full" else Patch(1, base))


def _end(header: dict[str, Any], kind: str) -> str:
    digest = new_hash(header)
    hash_bucket(digest, kind, _ROUNDS[kind])
    return digest.hexdigest()


def _make_weights(folder: Path) -> None:
    state = _end(_header("full", ""), "full")
    for kind, base in (("full", ""), ("patch", state)):
        header = _header(kind, base)
        said = {"header": header, "0": as_json(_metas(_ROUNDS[kind])), "1": _end(header, kind)}
        for name, value in said.items():
            (folder / f"{kind}_{name}.json").write_text(json.dumps(value))
    (folder / "failure.json").write_text(json.dumps(checked_json.as_json(Failure("a rank was lost"))))


class _Files:
    """A link whose messages are the files of a round, and whose tensors are the honest ones where they fit."""

    rank = 1
    group = finish = close = answer = comes = staticmethod(lambda *arguments: True)

    def __init__(self, folder: Path) -> None:
        self.folder, self.kind, self.parts = folder, "full", list[Tensor]()

    def read(self, key: str, expected: Any) -> Any:
        if key.endswith("header"):
            self.parts = [tensor for _, tensor in _ROUNDS[self.kind]]
        return parse_message((self.folder / f"{self.kind}_{key.split('/')[-1]}.json").read_bytes(), expected)

    def broadcast(self, tensor: Tensor) -> Any:
        sent = self.parts.pop(0) if self.parts else tensor
        if sent.shape == tensor.shape and sent.dtype == tensor.dtype:
            tensor.copy_(sent)
        return bool


def _read_weights(folder: Path) -> None:
    """Gives a receiver a full round and a patch, and holds it to its promise.

    Raises:
        WeightsError: a message was refused, which is not an error of another type underneath.
    """
    files = _Files(folder)
    with mock.patch.object(receiving, "Link", lambda *arguments: files):
        receiver = WeightReceiver("", 0, 1, expected=_metas(_ROUNDS["full"]))
    for files.kind in _ROUNDS:
        before = {name: tensor.clone() for name, tensor in receiver.weights.items()}
        try:
            receiver.receive()
        except WeightsError as error:
            assert isinstance(error.__cause__, (WeightsError, FileNotFoundError)), repr(error.__cause__)
            assert str(error).isprintable() and len(str(error)) < 4000
            assert receiver.weights.keys() == before.keys()
            assert all(torch.equal(tensor, before[name]) for name, tensor in receiver.weights.items())
        assert _metas([*receiver.weights.items()]) in (_metas(_ROUNDS["full"]), [])
    for path in folder.glob("*.json"):
        parse_message(path.read_bytes(), Full | Patch | Bucket | Failure | str)


READERS = {"weights messages": Reader(_make_weights, _read_weights, ("*.json",))}
