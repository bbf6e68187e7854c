"""The index of a checkpoint: its tensors, the bytes of each piece, and the size of each file, stored as JSON.

The index is all that is trusted about a checkpoint before its files are read, so every entry is checked: file names
stay inside the folder, pieces are inside their file and their tensor, and pieces cover a tensor exactly once. The JSON
contains its own SHA-256, so that a flipped bit, for example in a step count, is found.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ...base.dtypes import DTYPES, dtype_name
from ...base.errors import CheckpointError
from ...base.files import BoundsError, brief, parse_json
from ..global_view import overlap
from .content_hash import MODULUS

Encoding = Literal["raw", "torch.save", "safetensors"]
"""How pieces are stored: raw bytes in row-major order, archives of ``torch.save`` (by torch's own writer), or whole
tensors in safetensors files, found by name."""

_MAX_DIMS = 64
"""The limit of torch and numpy."""

_FILE_NAME = re.compile(r"(mp_rank_[0-9_]+/)?[A-Za-z0-9_][A-Za-z0-9_.\-]*")
"""A file in the folder, or of one of Megatron-LM's ranks."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor that is an interval in every dimension."""

    offsets: tuple[int, ...]
    """First index of the box, per dimension of the whole tensor."""
    sizes: tuple[int, ...]
    """Extent of the box per dimension. None is 0."""


@dataclass(frozen=True)
class Piece(Box):
    """A box of a tensor, stored in one run of bytes."""

    file: str
    """Name of a file in the checkpoint's folder."""
    start: int
    """Bytes from the beginning of the file, or 0 in a safetensors file."""
    num_bytes: int
    hash: int | None = None
    """Addend of the box to the hash of the whole tensor (`content_hash`). None if the writer stored none."""


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor and its pieces. A tensor without elements has none."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def content_hash(self) -> int | None:
        """The hash of the whole tensor, which does not depend on its pieces, or None if a piece has no hash."""
        hashes = [piece.hash for piece in self.pieces if piece.hash is not None]
        return sum(hashes) % MODULUS if len(hashes) == len(self.pieces) else None


@dataclass(frozen=True)
class CheckpointIndex:
    """A checked description of a checkpoint."""

    tensors: dict[str, TensorEntry]
    file_bytes: dict[str, int]
    """Bytes of each file, or a lower bound if pieces are archives."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The metadata given to ``save``."""
    encoding: Encoding = "raw"
    others: dict[str, Piece | None] = field(default_factory=dict)
    """Entries that are not tensors, which only torch's own writer makes, with the place of their bytes if the index
    gives one. No pickle in them is run."""

    def check(self) -> None:
        """Raises CheckpointError on the first entry that contradicts another."""
        for name, size in self.file_bytes.items():
            expect(_FILE_NAME.fullmatch(name) is not None, f"{brief(name)} is no name of a file in the folder")
            expect(size >= 0, f"file {brief(name)} has the size {size}")
        for name, entry in self.tensors.items():
            self._check_tensor(name, entry)
        for piece in filter(None, self.others.values()):
            expect(_FILE_NAME.fullmatch(piece.file) is not None, f"{brief(piece.file)} is no name of a file there")

    def _check_tensor(self, name: str, entry: TensorEntry) -> None:
        where = f"tensor {brief(name)} of shape {brief(list(entry.shape))}"
        expect(len(entry.shape) <= _MAX_DIMS, f"{where} has more than {_MAX_DIMS} dimensions")
        expect(all(size >= 0 for size in entry.shape), f"{where} has a negative dimension")
        volume = 0
        for piece in entry.pieces:
            expect(len(piece.offsets) == len(piece.sizes) == len(entry.shape), f"{where} has a piece of other rank")
            inside = all(
                offset >= 0 and size > 0 and offset + size <= whole
                for offset, size, whole in zip(piece.offsets, piece.sizes, entry.shape, strict=True)
            )
            expect(inside, f"{where} has a piece at {list(piece.offsets)} of size {list(piece.sizes)} outside of it")
            expect(piece.file in self.file_bytes, f"{where} names the unlisted file {brief(piece.file)}")
            in_file = piece.start >= 0 and piece.num_bytes > 0
            in_file = in_file and piece.start + piece.num_bytes <= self.file_bytes[piece.file]
            expect(in_file, f"{where} has a piece beyond the end of {brief(piece.file)}")
            elements = math.prod(piece.sizes)
            least = elements * entry.dtype.itemsize
            expect(piece.num_bytes >= least, f"{where} has a piece of {elements} elements in {piece.num_bytes} bytes")
            if self.encoding != "torch.save":
                fits = piece.num_bytes == least
                expect(fits, f"{where} has a piece of {elements} elements in {piece.num_bytes} bytes")
                expect(piece.start % entry.dtype.itemsize == 0, f"{where} has a piece at the odd byte {piece.start}")
            volume += elements
        is_covered = volume == math.prod(entry.shape) and not share_elements(entry.pieces)
        expect(is_covered, f"{where} is not covered exactly once by its {len(entry.pieces)} pieces")


def share_elements(pieces: Sequence[Box]) -> bool:
    """Returns whether two of the boxes share an element: sweeps along the dimension that separates most of them."""
    if len(pieces) < 2:
        return False
    num_dims = len(pieces[0].offsets)
    if num_dims == 0:
        return True
    axis = max(range(num_dims), key=lambda dim: len({piece.offsets[dim] for piece in pieces}))
    active: list[Box] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[axis]):
        active = [other for other in active if other.offsets[axis] + other.sizes[axis] > piece.offsets[axis]]
        if any(overlap((piece.offsets, piece.sizes), (other.offsets, other.sizes)) for other in active):
            return True
        active.append(piece)
    return False


INDEX_FILE = "checkpoint.json"
TORCH_INDEX_FILE = ".metadata"
"""The description that torch's own writer leaves, see `torch_files`."""
_FORMAT = "shardstack-checkpoint"
_HASH = re.compile(r"[0-9a-f]{16}")
_VERSION = 2
_KEYS = {"format", "version", "byte_order", "metadata", "file_bytes", "tensors", "sha256"}


def encode_index(index: CheckpointIndex) -> str:
    """Returns the JSON text of a checked index of raw pieces."""
    index.check()
    tensors = {
        name: {
            "dtype": dtype_name(entry.dtype),
            "shape": entry.shape,
            "hash": _hash_text(entry.content_hash),
            "pieces": [[p.offsets, p.sizes, p.file, p.start, p.num_bytes, _hash_text(p.hash)] for p in entry.pieces],
        }
        for name, entry in index.tensors.items()
    }
    document = {"format": _FORMAT, "version": _VERSION, "byte_order": sys.byteorder}
    document |= {"metadata": index.metadata, "file_bytes": index.file_bytes, "tensors": tensors}
    return _dump({**document, "sha256": seal(document)})


def seal(document: dict[str, Any]) -> str:
    """Returns the SHA-256 of a description without its entry ``sha256``."""
    return hashlib.sha256(_dump({k: v for k, v in document.items() if k != "sha256"}).encode()).hexdigest()


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))


def decode_index(text: str) -> CheckpointIndex:
    """Returns the checked index in `text`. Raises CheckpointError on anything that :func:`encode_index` never
    writes."""
    try:
        document = parse_json(text)
    except BoundsError as error:
        raise CheckpointError(str(error)) from error
    expect(isinstance(document, dict) and document.get("format") == _FORMAT, f'no "format": "{_FORMAT}"')
    version = document.get("version")
    expect(version == _VERSION, f"version {brief(version)}, and this library reads version {_VERSION}")
    expect(document.keys() == _KEYS, "unknown keys")
    order = document["byte_order"]
    expect(order == sys.byteorder, f"bytes are in {brief(order)} order, and this machine's is {sys.byteorder!r}")
    metadata, file_bytes, tensors = (document[key] for key in ("metadata", "file_bytes", "tensors"))
    expect(isinstance(metadata, dict) and isinstance(file_bytes, dict) and isinstance(tensors, dict), "no tables")
    expect(all(is_size(size) for size in file_bytes.values()), "sizes of files that are no integers")
    entries = {name: _decode_tensor(name, value) for name, value in tensors.items()}
    index = CheckpointIndex(entries, file_bytes, metadata)
    index.check()
    for name, entry in entries.items():
        adds_up = entry.content_hash == _hash_value(name, tensors[name]["hash"])
        expect(adds_up, f"tensor {brief(name)} has a hash that is not the sum of its pieces' hashes")
    expect(document["sha256"] == seal(document), "its text does not match its sha256")
    return index


def json_problem(value: Any, where: str = "metadata") -> str | None:
    """Describes what in `value` JSON would change, or None. Tuples may become lists."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    if isinstance(value, (list, tuple)):
        inner = [(f"{where}[{number}]", item) for number, item in enumerate(value)]
    elif isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f"{where} has the key {key!r}, and JSON knows only text as keys"
        inner = [(f"{where}[{key!r}]", item) for key, item in value.items()]
    else:
        return f"{where} is a {type(value).__name__}, which is no JSON; convert it, or save it as a tensor"
    return next((problem for path, item in inner if (problem := json_problem(item, path))), None)


def expect(holds: bool, problem: str) -> None:
    if not holds:
        raise CheckpointError(problem)


def is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def as_sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(is_size(size) for size in value):
        raise CheckpointError(f"{brief(value)} is given where a list of sizes should be")
    return tuple(value)


def _decode_tensor(name: str, value: Any) -> TensorEntry:
    has_fields = isinstance(value, dict) and value.keys() == {"dtype", "shape", "hash", "pieces"}
    expect(has_fields and isinstance(value["pieces"], list), f"tensor {brief(name)} has no dtype, shape and pieces")
    dtype = value["dtype"]
    expect(isinstance(dtype, str) and dtype in DTYPES, f"tensor {brief(name)} has the unknown dtype {brief(dtype)}")
    pieces = []
    for piece in value["pieces"]:
        complete = isinstance(piece, list) and len(piece) == 6
        expect(complete, f"tensor {brief(name)} has a piece without its six fields")
        offsets, sizes, file, start, num_bytes, hash_value = piece
        has_types = isinstance(file, str) and is_size(start) and is_size(num_bytes)
        expect(has_types, f"tensor {brief(name)} has a piece at no place in a file")
        pieces.append(Piece(as_sizes(offsets), as_sizes(sizes), file, start, num_bytes, _hash_value(name, hash_value)))
    return TensorEntry(DTYPES[dtype], as_sizes(value["shape"]), tuple(pieces))


def _hash_text(value: int | None) -> str | None:
    return None if value is None else f"{value:016x}"


def _hash_value(name: str, text: Any) -> int | None:
    if text is None:  # of a copy in memory (`host_copies`)
        return None
    valid = isinstance(text, str) and _HASH.fullmatch(text) is not None
    expect(valid, f"tensor {brief(name)} has {brief(text)} where a hash of 16 hexadecimal digits should be")
    return int(text, 16)
