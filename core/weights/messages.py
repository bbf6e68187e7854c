"""What a sender and receivers of weights tell each other, checked before anything is made of it, and a round's hash.

Messages are JSON in a store that both share. Nothing that is received is unpickled or run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from ..base.checked_json import decode
from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import WeightsError
from ..base.files import BoundsError
from ..comm.messages import as_bytes
from ..dist_checkpointing.gathering import ParamMeta

_MESSAGE_BYTES = 64 << 20
"""Longest message. A header of 100,000 tensors has some 10 MB."""

_TEXT_LENGTH, _MOST_SIZES, _MOST_BYTES = 500, 64, 1 << 62
"""Bounds of a name or reason, and of a tensor's dimensions and bytes."""

_ROW_BYTES = 8 * 4093
"""Bytes of a row of 64-bit words, the columns of which are added for a hash. A prime number of words: tensors of usual
sizes that change places change columns."""


Entry = tuple[
    Annotated[str, lambda name: len(name) <= _TEXT_LENGTH, f"of {_TEXT_LENGTH} characters at most"],
    Annotated[str, DTYPES],
    Annotated[list[Annotated[int, range(1 << 62)]], lambda shape: len(shape) <= _MOST_SIZES],
]
"""Name, dtype and shape of a tensor."""


def _has_bytes(entry: Entry) -> bool:
    _, dtype, shape = entry
    return DTYPES[dtype].itemsize * math.prod(max(size, 1) for size in shape) <= _MOST_BYTES


def _are_apart(entries: list[Entry]) -> bool:
    return len({name for name, _, _ in entries}) == len(entries)


Bucket = list[Annotated[Entry, _has_bytes, f"of {_MOST_BYTES} bytes at most"]]
"""Announces what is broadcast next. Of a patch places and values of each tensor follow each other."""


@dataclass(frozen=True)
class Full:
    """The header of a round of all weights: a promise to which its buckets are held."""

    version: int
    tensors: Annotated[Bucket, _are_apart, "with each name once"]
    """All tensors, in order."""
    base: Annotated[str, {""}] = ""
    kind = "full"


@dataclass(frozen=True)
class Patch:
    """The header of a round of changes."""

    version: int
    base: str
    """The hash of the round whose weights it changes."""
    kind = "patch"


@dataclass(frozen=True)
class Failure:
    """No more buckets come."""

    reason: str


def parse_message(data: bytes, expected: Any) -> Any:
    """Returns what came, if it is a message of the types that are expected.

    A text is, after the last bucket, the hash of the round, and as an answer why a receiver refuses, or nothing.

    Raises:
        WeightsError: it is not.
    """
    try:
        if len(data) > _MESSAGE_BYTES:
            raise BoundsError(f"has {len(data)} bytes, and none has more than {_MESSAGE_BYTES}")
        return decode(data, expected)
    except BoundsError as error:
        raise WeightsError(f"a message of weights {error}") from None


def plain(text: str) -> str:
    """Returns the beginning of a text from elsewhere, without what would steer a terminal or begin a line."""
    return "".join(character if character.isprintable() else " " for character in text[:_TEXT_LENGTH])


def as_json(metas: Iterable[ParamMeta]) -> list[Entry]:
    return [(meta.name, dtype_name(meta.dtype), list(meta.shape)) for meta in metas]


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
