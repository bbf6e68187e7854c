"""Reads and writes the description of a checkpoint, which is JSON, as a checked :class:`CheckpointIndex`.

The description contains its own SHA-256, so that a flipped bit, for example in a step count, is found.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from typing import Any

from ...dtypes import DTYPES, dtype_name
from ...errors import CheckpointError
from ...files.bounds import BoundsError, brief, parse_json
from .index import CheckpointIndex, Piece, TensorEntry

INDEX_FILE = "checkpoint.json"
TORCH_INDEX_FILE = ".metadata"
"""The description that torch's own writer leaves, see `torch_files`."""
_FORMAT = "shardstack-checkpoint"
_HASH = re.compile(r"[0-9a-f]{16}")
_VERSION = 2
_KEYS = {"format", "version", "byte_order", "metadata", "file_bytes", "tensors"}


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
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "byte_order": sys.byteorder,
        "metadata": index.metadata,
        "file_bytes": index.file_bytes,
        "tensors": tensors,
    }
    return _dump({**document, "sha256": seal(document)})


def seal(document: dict[str, Any]) -> str:
    """Returns the SHA-256 of a description without its entry ``sha256``."""
    return hashlib.sha256(_dump({k: v for k, v in document.items() if k != "sha256"}).encode()).hexdigest()


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))


def decode_index(text: str) -> CheckpointIndex:
    """Returns the checked index in `text`; raises CheckpointError on anything that :func:`encode_index` never
    writes."""
    try:
        document = parse_json(text)
    except BoundsError as error:
        raise CheckpointError(str(error)) from error
    expect(isinstance(document, dict) and document.get("format") == _FORMAT, f'no "format": "{_FORMAT}"')
    version = document.get("version")
    expect(version in (1, _VERSION), f"version {brief(version)}, and this library reads versions 1 and {_VERSION}")
    sealed = version != 1  # the first version had neither hashes nor a seal
    expect(document.keys() == _KEYS | ({"sha256"} if sealed else set()), "unknown keys")
    order = document["byte_order"]
    expect(order == sys.byteorder, f"bytes are in {brief(order)} order, and this machine's is {sys.byteorder!r}")
    metadata, file_bytes, tensors = (document[key] for key in ("metadata", "file_bytes", "tensors"))
    expect(isinstance(metadata, dict) and isinstance(file_bytes, dict) and isinstance(tensors, dict), "no tables")
    expect(all(is_size(size) for size in file_bytes.values()), "sizes of files that are no integers")
    entries = {name: _decode_tensor(name, value, sealed) for name, value in tensors.items()}
    index = CheckpointIndex(entries, file_bytes, metadata)
    index.check()
    if sealed:
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


def _decode_tensor(name: str, value: Any, hashed: bool) -> TensorEntry:
    keys = {"dtype", "shape", "pieces"} | ({"hash"} if hashed else set())
    known = isinstance(value, dict) and value.keys() == keys
    expect(known and isinstance(value["pieces"], list), f"tensor {brief(name)} has no dtype, shape and pieces")
    dtype = value["dtype"]
    expect(isinstance(dtype, str) and dtype in DTYPES, f"tensor {brief(name)} has the unknown dtype {brief(dtype)}")
    pieces = []
    for piece in value["pieces"]:
        complete = isinstance(piece, list) and len(piece) == 5 + hashed
        expect(complete, f"tensor {brief(name)} has a piece without its {'six' if hashed else 'five'} fields")
        offsets, sizes, file, start, num_bytes = piece[:5]
        typed = isinstance(file, str) and is_size(start) and is_size(num_bytes)
        expect(typed, f"tensor {brief(name)} has a piece at no place in a file")
        hashed_to = _hash_value(name, piece[5]) if hashed else None
        pieces.append(Piece(as_sizes(offsets), as_sizes(sizes), file, start, num_bytes, hashed_to))
    return TensorEntry(DTYPES[dtype], as_sizes(value["shape"]), tuple(pieces))


def _hash_text(value: int | None) -> str:
    if value is None:
        raise CheckpointError("a piece without a hash cannot be described")
    return f"{value:016x}"


def _hash_value(name: str, text: Any) -> int:
    valid = isinstance(text, str) and _HASH.fullmatch(text) is not None
    expect(valid, f"tensor {brief(name)} has {brief(text)} where a hash of 16 hexadecimal digits should be")
    return int(text, 16)
