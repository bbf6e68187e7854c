"""Folders of safetensors files, as Hugging Face keeps models: read as an index of raw pieces, and written.

A file is the length of a header, the header (JSON: for each tensor dtype, shape and where its bytes lie), and the
bytes, row-major and little-endian. Nothing in it can run. Several files of one model share an index, a JSON file that
says which tensor lies in which; see https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from . import folders
from .index import CheckpointIndex, Piece, TensorEntry, dtype_name

SINGLE_FILE = "model.safetensors"
SHARDS_INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9
"""What `transformers` cuts at."""

_HEADER_LIMIT_BYTES = 100 * 10**6  # the format's own
_ALIGNMENT_BYTES = 8
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
}
"""What the format calls each dtype."""
_DTYPES: dict[str, torch.dtype] = {theirs: getattr(torch, ours) for ours, theirs in _NAMES.items()}


def has_safetensors(folder: Path) -> bool:
    """Whether a model in this format lies in `folder`."""
    return (folder / SHARDS_INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def read_safetensors_index(folder: Path) -> CheckpointIndex:
    """The checked index of the model in `folder`, of one file or of several.

    Raises:
        CheckpointError: no such model, a file that is missing, truncated or no safetensors file, or an index that is
            not what the files hold.
    """
    _refuse_big_endian()
    shards_index = folder / SHARDS_INDEX_FILE
    if shards_index.is_file():
        places = _weight_map(shards_index)
    elif (folder / SINGLE_FILE).is_file():
        places = None
    else:
        others = [name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json") if (folder / name).exists()]
        found = f"only {others[0]}, a pickle, which is not read" if others else "neither that nor its index"
        raise CheckpointError(f"{folder} has no {SINGLE_FILE}: {found}; save the model with safe_serialization=True")
    tensors: dict[str, TensorEntry] = {}
    file_bytes: dict[str, int] = {}
    for name in sorted(set(places.values())) if places is not None else [SINGLE_FILE]:
        held, file_bytes[name] = _read_header(folder / name)
        wrong = sorted(key for key in held if places is not None and places.get(key) != name)
        if wrong:
            raise CheckpointError(f"{folder / name} holds {wrong[0]}, which {SHARDS_INDEX_FILE} does not say")
        tensors |= held
    missing = sorted(places.keys() - tensors.keys()) if places is not None else []
    if missing:
        raise CheckpointError(
            f"{shards_index} names {missing[0]}, which {places and places[missing[0]]} does not hold"
        )
    index = CheckpointIndex(tensors, file_bytes)
    try:
        index.check()
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is damaged: {error}") from error
    return index


def write_safetensors(
    folder: Path,
    plan: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    make: Callable[[str], torch.Tensor],
    *,
    writes: bool = True,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a model into `folder`, which exists; no file is longer than `max_shard_bytes` but for one tensor's sake.

    Args:
        plan: dtype and shape of every tensor by name, which are written in that order where dtypes are the same.
        make: the tensor of that name, asked for in an order that `plan` decides, one at a time, and dropped when it is
            written; also after a failure to write, which is raised at the end, because ranks may gather it together.
        writes: False asks for every tensor and writes nothing: ranks that help to gather what another one writes.
    """
    _refuse_big_endian()
    shards = _shards(plan, max_shard_bytes)
    failure: Exception | None = None
    for number, names in enumerate(shards):
        path = folder / _file_name(number, len(shards))
        made = _Counted(make)
        try:
            if writes and failure is None:
                _write_file(path, {name: plan[name] for name in names}, made)
                continue
        except Exception as error:
            failure, names = error, names[made.count :]  # the others still wait in what `make` gathers
        for name in names:
            make(name)
    if failure is not None:
        raise failure
    if writes and len(shards) > 1:
        places = {name: _file_name(number, len(shards)) for number, names in enumerate(shards) for name in names}
        document = {"metadata": {"total_size": sum(_bytes(*plan[name]) for name in plan)}, "weight_map": places}
        folders.write_durably(folder / SHARDS_INDEX_FILE, json.dumps(document, indent=2) + "\n")


class _Counted:
    """`make`, and how often it was called."""

    def __init__(self, make: Callable[[str], torch.Tensor]) -> None:
        self.make, self.count = make, 0

    def __call__(self, name: str) -> torch.Tensor:
        self.count += 1
        return self.make(name)


def _write_file(
    path: Path, plan: Mapping[str, tuple[torch.dtype, Sequence[int]]], make: Callable[[str], torch.Tensor]
) -> None:
    with path.open("wb") as stream:
        stream.write(_header(plan))
        for name, (dtype, shape) in plan.items():
            tensor = make(name)
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise CheckpointError(f"{name} came as {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
            stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def begin_new_folder(folder: Path) -> Path:
    """Makes the folder in which `folder` is written, aside; :func:`publish_new_folder` gives it its name.

    Raises:
        CheckpointError: `folder` exists and is not empty, or nothing can be written there.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty; choose another folder, or move it away")
    folders.discard(folder)  # of a call that was killed
    temporary = folders.temporary_folder(folder)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror}); choose another folder") from error
    return temporary


def publish_new_folder(folder: Path) -> None:
    """Gives what was written aside its name, at once."""
    temporary = folders.temporary_folder(folder)
    folders.sync_folder(temporary)
    temporary.replace(folder)
    folders.sync_folder(folder.parent)


def _refuse_big_endian() -> None:
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian, and this machine is not; convert them elsewhere")


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        valid = isinstance(places, dict) and all(isinstance(name, str) for name in places.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error})") from error
    if not valid or any(Path(name).name != name or name in (".", "..") for name in places.values()):
        raise CheckpointError(f"{path} has a weight_map that does not name files beside it")
    return dict(places)


def _read_header(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """What a file holds, and how long it is."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_HEADER_LIMIT_BYTES, num_bytes - 8):
                raise CheckpointError(f"{path} is no safetensors file, or truncated: a header of {length} bytes")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); restore it") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is no table")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    end = max((piece.start + piece.num_bytes for entry in entries.values() for piece in entry.pieces), default=0)
    if num_bytes != max(end, 8 + length):
        raise CheckpointError(f"{path} has {num_bytes} bytes where its header says {end}; restore it")
    return entries, num_bytes


def _entry(path: Path, name: str, value: Any, base: int) -> TensorEntry:
    known = isinstance(value, dict) and value.keys() == {"dtype", "shape", "data_offsets"}
    dtype = _DTYPES.get(value["dtype"]) if known and isinstance(value["dtype"], str) else None
    if dtype is None:
        found = value["dtype"] if known else value
        raise CheckpointError(f"{path}: {name} is {found!r}, which no tensor here can be")
    shape, span = value["shape"], value["data_offsets"]
    sizes = isinstance(shape, list) and isinstance(span, list) and len(span) == 2
    if not sizes or any(type(size) is not int or not 0 <= size < 2**63 for size in shape + span):
        raise CheckpointError(f"{path}: {name} has the shape {shape!r} at {span!r}")
    start, end = span
    if end - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{path}: {name} of shape {shape} has {end - start} bytes")
    zeros = (0,) * len(shape)
    pieces = (Piece(zeros, tuple(shape), path.name, base + start, end - start),) if end > start else ()
    return TensorEntry(dtype, tuple(shape), pieces)


def _shards(plan: Mapping[str, tuple[torch.dtype, Sequence[int]]], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    taken = 0
    for name, (dtype, shape) in plan.items():
        size = _bytes(dtype, shape)
        if shards[-1] and taken + size > max_bytes:
            shards.append([])
            taken = 0
        shards[-1].append(name)
        taken += size
    # Wide elements first: each tensor then begins at a multiple of its element's size, without gaps.
    return [sorted(names, key=lambda name: -plan[name][0].itemsize) for names in shards]


def _file_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def _header(plan: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers asks for
    position = 0
    for name, (dtype, shape) in plan.items():
        end = position + _bytes(dtype, shape)
        table[name] = {"dtype": _NAMES[dtype_name(dtype)], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
