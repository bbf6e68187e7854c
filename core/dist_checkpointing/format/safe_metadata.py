"""Reads and writes the description of a checkpoint without running code from a file.

Ours is JSON. torch's own writer leaves a pickle named ``.metadata``. A pickle is a program, so that it is read by an
unpickler that knows a few names and builds inert records for them: no class of torch and no function can be called.
Both become a :class:`CheckpointIndex`, whose every entry has been checked.

Our description contains its own SHA-256, so that a flipped bit, for example in a step count, is found.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ...dtypes import DTYPES, dtype_name
from ...errors import CheckpointError
from ...files.bounds import PICKLE_BYTES, BoundsError, brief, parse_json, read_file
from .index import CheckpointIndex, Piece, TensorEntry
from .inert_pickle import Record, load_inert

INDEX_FILE = "checkpoint.json"
TORCH_INDEX_FILE = ".metadata"
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
    _expect(isinstance(document, dict) and document.get("format") == _FORMAT, f'no "format": "{_FORMAT}"')
    version = document.get("version")
    _expect(version in (1, _VERSION), f"version {brief(version)}, and this library reads versions 1 and {_VERSION}")
    sealed = version != 1  # the first version had neither hashes nor a seal
    _expect(document.keys() == _KEYS | ({"sha256"} if sealed else set()), "unknown keys")
    order = document["byte_order"]
    _expect(order == sys.byteorder, f"bytes are in {brief(order)} order, and this machine's is {sys.byteorder!r}")
    metadata, file_bytes, tensors = (document[key] for key in ("metadata", "file_bytes", "tensors"))
    _expect(isinstance(metadata, dict) and isinstance(file_bytes, dict) and isinstance(tensors, dict), "no tables")
    _expect(all(_is_size(size) for size in file_bytes.values()), "sizes of files that are no integers")
    entries = {name: _decode_tensor(name, value, sealed) for name, value in tensors.items()}
    index = CheckpointIndex(entries, file_bytes, metadata)
    index.check()
    if sealed:
        for name, entry in entries.items():
            adds_up = entry.content_hash == _hash_value(name, tensors[name]["hash"])
            _expect(adds_up, f"tensor {brief(name)} has a hash that is not the sum of its pieces' hashes")
        _expect(document["sha256"] == seal(document), "its text does not match its sha256")
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


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise CheckpointError(problem)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(_is_size(size) for size in value):
        raise CheckpointError(f"{brief(value)} is given where a list of sizes should be")
    return tuple(value)


def _decode_tensor(name: str, value: Any, hashed: bool) -> TensorEntry:
    keys = {"dtype", "shape", "pieces"} | ({"hash"} if hashed else set())
    known = isinstance(value, dict) and value.keys() == keys
    _expect(known and isinstance(value["pieces"], list), f"tensor {brief(name)} has no dtype, shape and pieces")
    dtype = value["dtype"]
    _expect(isinstance(dtype, str) and dtype in DTYPES, f"tensor {brief(name)} has the unknown dtype {brief(dtype)}")
    pieces = []
    for piece in value["pieces"]:
        complete = isinstance(piece, list) and len(piece) == 5 + hashed
        _expect(complete, f"tensor {brief(name)} has a piece without its {'six' if hashed else 'five'} fields")
        offsets, sizes, file, start, num_bytes = piece[:5]
        typed = isinstance(file, str) and _is_size(start) and _is_size(num_bytes)
        _expect(typed, f"tensor {brief(name)} has a piece at no place in a file")
        hashed_to = _hash_value(name, piece[5]) if hashed else None
        pieces.append(Piece(_sizes(offsets), _sizes(sizes), file, start, num_bytes, hashed_to))
    return TensorEntry(DTYPES[dtype], _sizes(value["shape"]), tuple(pieces))


def _hash_text(value: int | None) -> str:
    if value is None:
        raise CheckpointError("a piece without a hash cannot be described")
    return f"{value:016x}"


def _hash_value(name: str, text: Any) -> int:
    valid = isinstance(text, str) and _HASH.fullmatch(text) is not None
    _expect(valid, f"tensor {brief(name)} has {brief(text)} where a hash of 16 hexadecimal digits should be")
    return int(text, 16)


# The pickle of torch's own writer.


_TORCH_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}
_EMPTY_CHUNKS = 1 << 16
"""Limit of empty pieces of a tensor, in addition to the stored ones: one for each rank without rows."""
_MEGATRON_MODULES = "megatron.core.dist_checkpointing."


def _kind_of(module: str, name: str) -> str | None:
    if module.startswith(_MEGATRON_MODULES) and name == "MCoreMetadata":  # torch's, with notes on optimizer state
        return "Metadata"
    return name if name in _TORCH_RECORDS.get(module, ()) else None


def read_torch_index(path: Path) -> CheckpointIndex:
    """Returns the checked index of a ``torch.distributed.checkpoint`` checkpoint, from its ``.metadata`` pickle."""
    try:
        root = load_inert(read_file(path, PICKLE_BYTES), _kind_of)
    except (BoundsError, OSError) as error:
        raise CheckpointError(f"not a readable description of a checkpoint ({error})") from error
    stored = _table(_field(root, "Metadata", "storage_data"))
    infos: dict[tuple[str, tuple[int, ...]], Record] = {}
    for key, info in stored.items():
        name, offset = _field(key, "MetadataIndex", "fqn"), _field(key, "MetadataIndex", "offset")
        _expect(isinstance(name, str), f"a piece belongs to {brief(name)}")
        if offset is not None:
            infos[name, _torch_size(offset)] = info
    tensors: dict[str, TensorEntry] = {}
    others = set()
    num_pieces = 0
    for name, entry in _table(_field(root, "Metadata", "state_dict_metadata")).items():
        _expect(isinstance(name, str), f"an entry has the name {brief(name)}")
        if getattr(entry, "kind", "") == "BytesStorageMetadata":
            others.add(name)
        else:
            tensors[name] = _torch_tensor(name, entry, infos)
            num_pieces += len(tensors[name].pieces)
            _expect(num_pieces <= len(infos), f"up to tensor {brief(name)} it has more pieces than are stored")
    file_bytes: dict[str, int] = {}
    for piece in (piece for entry in tensors.values() for piece in entry.pieces):
        file_bytes[piece.file] = max(file_bytes.get(piece.file, 0), piece.start + piece.num_bytes)
    index = CheckpointIndex(tensors, file_bytes, encoding="torch.save", others=frozenset(others))
    index.check()
    return index


def _torch_tensor(name: str, entry: Any, infos: dict[tuple[str, tuple[int, ...]], Record]) -> TensorEntry:
    properties = getattr(_field(entry, "TensorStorageMetadata", "properties"), "state", None)
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    _expect(isinstance(dtype, torch.dtype), f"tensor {brief(name)} has the unknown dtype {brief(dtype)}")
    chunks = _field(entry, "TensorStorageMetadata", "chunks")
    _expect(isinstance(chunks, list), f"tensor {brief(name)} has no list of pieces")
    _expect(len(chunks) <= len(infos) + _EMPTY_CHUNKS, f"tensor {brief(name)} has more pieces than are stored")
    pieces = []
    for chunk in chunks:
        offsets = _torch_size(_field(chunk, "ChunkStorageMetadata", "offsets"))
        sizes = _torch_size(_field(chunk, "ChunkStorageMetadata", "sizes"))
        if 0 in sizes:  # a rank without rows
            continue
        _expect(
            (name, offsets) in infos, f"tensor {brief(name)} has a piece at {list(offsets)} that is stored nowhere"
        )
        info = infos[name, offsets]
        file, start, num_bytes = (_field(info, "_StorageInfo", key) for key in ("relative_path", "offset", "length"))
        typed = isinstance(file, str) and _is_size(start) and _is_size(num_bytes)
        _expect(typed, f"tensor {brief(name)} has a piece at no place in a file")
        _expect(
            info.get("transform_descriptors") is None, f"tensor {brief(name)} is stored through a stream transform"
        )
        pieces.append(Piece(offsets, sizes, file, start, num_bytes))
    shape = _torch_size(_field(entry, "TensorStorageMetadata", "size"))
    return TensorEntry(dtype, shape, tuple(pieces))  # type: ignore[arg-type]  # checked above


def _field(record: Any, kind: str, name: str) -> Any:
    _expect(isinstance(record, Record) and record.kind == kind, f"a {kind} is missing")
    return record.get(name)


def _table(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError("a table is missing")
    return value


def _torch_size(value: Any) -> tuple[int, ...]:
    args = value.state if isinstance(value, Record) and value.kind == "Size" else None
    return _sizes(args[0] if isinstance(args, tuple) and len(args) == 1 else None)
