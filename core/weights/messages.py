"""What a sender and receivers of weights tell each other, checked before anything is made of it, and a round's hash.

Messages are JSON in a store that both share. Nothing that is received is unpickled or run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import WeightsError
from ..base.files import BoundsError, brief, parse_json
from ..comm.messages import as_bytes
from ..dist_checkpointing.gathering import ParamMeta

_MESSAGE_BYTES = 64 << 20
"""Longest message. A header of 100,000 tensors has some 10 MB."""

_TEXT_LENGTH, _MOST_SIZES, _MOST_BYTES = 500, 64, 1 << 62
"""Bounds of a name or reason, and of a tensor's dimensions and bytes."""

_ROW_BYTES = 8 * 4093
"""Bytes of a row of 64-bit words, the columns of which are added for a hash. A prime number of words: tensors of usual
sizes that change places change columns."""


@dataclass(frozen=True)
class Message:
    """What one side tells the other."""

    kind: str
    """``"full"`` or ``"patch"``: the header of a round, a promise to which its buckets are held. ``"bucket"``:
    announces what is broadcast next. ``"failure"``: no more buckets come. ``"text"``: after the last bucket the hash
    of the round, and as an answer why a receiver refuses, or nothing."""
    text: str = ""
    """Of the kinds text and failure."""
    tensors: Sequence[ParamMeta] = ()
    """Of a full round all, in order, each name once. Of a bucket those that come, of a patch in pairs."""
    version: int = 0
    base: str = ""
    """Of a patch: the hash of the round whose weights it changes."""

    def as_header(self) -> dict[str, Any]:
        """Returns a header as it travels."""
        header = {"kind": self.kind, "version": self.version, "base": self.base}
        return header | ({"tensors": as_json(self.tensors)} if self.kind == "full" else {})


def parse_message(data: bytes, *kinds: str) -> Message:
    """Returns what came, if it is a message of one of these kinds.

    Raises:
        WeightsError: it is not.
    """
    try:
        if len(data) > _MESSAGE_BYTES:
            raise BoundsError(f"it has {len(data)} bytes, and no message has more than {_MESSAGE_BYTES}")
        message = _message(parse_json(data.decode()))
        if message.kind not in kinds or type(message.version) is not int:
            raise BoundsError(f"it is a {message.kind} of version {brief(message.version)}")
        if message.kind == "full" and len({meta.name for meta in message.tensors}) < len(message.tensors):
            raise BoundsError("a name comes twice in it")
        return message
    except ValueError as error:  # BoundsError, or no UTF-8
        raise WeightsError(f"{' or '.join(kinds)} of weights was expected: {plain(str(error))}") from None


def _message(value: Any) -> Message:
    match value:
        case str():
            return Message("text", plain(value))
        case {"failure": str(reason)} if len(value) == 1:
            return Message("failure", plain(reason))
        case list():
            return Message("bucket", tensors=[_meta(entry) for entry in value])
        case {"kind": "patch", "version": version, "base": str(base)} if len(value) == 3:
            return Message("patch", version=version, base=base)
        case {"kind": "full", "version": version, "base": "", "tensors": list(entries)} if len(value) == 4:
            return Message("full", tensors=[_meta(entry) for entry in entries], version=version)
    raise BoundsError(f"{brief(value)} is no message")


def _meta(entry: Any) -> ParamMeta:
    match entry:
        case [str(name), str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= _MOST_SIZES:
            is_shape = all(type(size) is int and size >= 0 for size in shape)
            is_name = name.isprintable() and len(name) <= _TEXT_LENGTH
            if is_name and is_shape and DTYPES[dtype].itemsize * math.prod(max(n, 1) for n in shape) <= _MOST_BYTES:
                return ParamMeta(name, DTYPES[dtype], tuple(shape))
    raise BoundsError(f"{brief(entry)} describes no tensor")


def plain(text: str) -> str:
    """Returns the beginning of a text from elsewhere, without what would steer a terminal or begin a line."""
    return "".join(character if character.isprintable() else " " for character in text[:_TEXT_LENGTH])


def as_json(metas: Iterable[ParamMeta]) -> list[Any]:
    return [[meta.name, dtype_name(meta.dtype), list(meta.shape)] for meta in metas]


def new_hash(header: Mapping[str, Any]) -> Any:
    """Returns the hash of a round that begins with a header."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode())


def hash_bucket(digest: Any, kind: str, bucket: Iterable[tuple[str, Tensor]]) -> None:
    """Adds a bucket's tensors to a hash, and of a patch their names, dtypes and shapes, which no header has."""
    for name, tensor in bucket:
        if kind == "patch":
            digest.update(json.dumps(as_json([ParamMeta(name, tensor.dtype, tuple(tensor.shape))])).encode())
        update_hash(digest, tensor)


def update_hash(digest: Any, tensor: Tensor) -> None:
    """Adds the column sums of a contiguous tensor's bytes to a hash: a hash of all of them would take longer than
    sending them does."""
    memory = as_bytes(tensor.clone() if tensor.storage_offset() * tensor.itemsize % 8 else tensor)  # words are aligned
    end = len(memory) - len(memory) % _ROW_BYTES
    digest.update(memory[end:].cpu().numpy().data)
    if end:  # modulo 2^64
        digest.update(memory[:end].view(-1, _ROW_BYTES).view(torch.int64).sum(0).cpu().numpy().data)
