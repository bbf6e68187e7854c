"""Reads and writes folders of safetensors files, as Hugging Face stores models.

The library `safetensors` (extra `hf`) reads and writes the files. It maps them, so that only the requested part of a
tensor is read, and refuses files with a wrong length or header. Several files of one model share an index, a JSON file
that says which tensor is in which file; see https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch

from ..base.checked_json import checked
from ..base.dtypes import DTYPES
from ..base.errors import CheckpointError, import_extra
from ..base.files import JSON_BYTES, read_json, sync_folder, write_durably
from .agreement import Ranks
from .format import folders
from .format.index import CheckpointIndex, Piece, TensorEntry
from .gathering import in_buckets

SINGLE_FILE = "model.safetensors"
SHARDS_INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9
"""The default of `transformers`."""

_DTYPES = {
    **{f"F{bits}": DTYPES[f"float{bits}"] for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    **{f"I{bits}": DTYPES[f"int{bits}"] for bits in (8, 16, 32, 64)},
    **{f"U{bits}": DTYPES[f"uint{bits}"] for bits in (8, 16, 32, 64)},
    "BOOL": torch.bool,
}
"""Dtypes by their names in the format. The library's own table is private."""


def has_safetensors(folder: Path) -> bool:
    """Returns whether `folder` has a model in this format."""
    return (folder / SHARDS_INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def read_safetensors_index(folder: Path) -> CheckpointIndex:
    """Reads and checks the index of the model in `folder`, of one file or several.

    Raises:
        CheckpointError: there is no such model, a file is missing, truncated or no safetensors file, or the index
            differs from the files.
        MissingExtraError: the library is not installed.
    """
    shards_index = folder / SHARDS_INDEX_FILE
    if shards_index.is_file():
        places = _weight_map(shards_index)
    elif (folder / SINGLE_FILE).is_file():
        places = None
    else:
        others = [name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json") if (folder / name).exists()]
        reason = f"only {others[0]}, a pickle, which is not read" if others else "neither that nor its index"
        raise CheckpointError(f"{folder} has no {SINGLE_FILE}: {reason}; save the model with safe_serialization=True")
    tensors: dict[str, TensorEntry] = {}
    file_bytes: dict[str, int] = {}
    for name in sorted(set(places.values())) if places is not None else [SINGLE_FILE]:
        file = open_safetensors(folder / name)
        entries = {key: _entry(folder / name, key, file.get_slice(key)) for key in file.keys()}  # noqa: SIM118
        file_bytes[name] = (folder / name).stat().st_size
        wrong = sorted(key for key in entries if places is not None and places.get(key) != name)
        if wrong:
            raise CheckpointError(f"{folder / name} holds {wrong[0]}, which {SHARDS_INDEX_FILE} does not say")
        tensors |= entries
    missing = sorted(places.keys() - tensors.keys()) if places is not None else []
    if missing:
        raise CheckpointError(f"{shards_index} names {missing[0]}, which {places and places[missing[0]]} lacks")
    index = CheckpointIndex(tensors, file_bytes, encoding="safetensors")
    try:
        index.check()
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is damaged: {error}") from error
    return index


def open_safetensors(path: Path) -> Any:
    """Opens a file with the library's reader, mapped into memory. ``get_slice(name)`` reads the part it is indexed
    with.

    Tensors share the mapping, which is private to this process: writing to them does not change the file.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
        MissingExtraError: the library is not installed.
    """
    library = _library()
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; restore it")
    try:
        return library.safe_open(path, framework="pt")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); restore it") from error
    except library.SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file, or damaged ({error}); restore it") from error


def save_folder(
    folder: Path,
    plan: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterator[tuple[str, torch.Tensor]],
    describe: Callable[[Path], None],
    ranks: Ranks,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    write: Callable[[Path, dict[str, torch.Tensor]], None] | None = None,
) -> None:
    """Writes a model into a folder that appears atomically. Collective. The first rank writes.

    It holds the tensors of one file at a time in host memory; other ranks hold one tensor.

    Args:
        folder: a new or empty folder.
        plan: dtype and shape of every tensor by name, in the order in which they are distributed to files.
        tensors: the plan's tensors in its order, as a `TensorStream` yields them. Every rank takes them to the end,
            after a failure too, because ranks may gather a tensor together.
        describe: adds what goes next to the tensors to the folder that it is given, on the first rank.
        max_shard_bytes: bytes of the tensors in one file, which exceeds them only for a single tensor.
        write: writes the tensors of one file in another format; None means safetensors, with their index.

    Raises:
        CheckpointError: on all ranks, if it failed on one: the folder is not empty, a tensor is not what `plan` says,
            or a file cannot be written.
        MissingExtraError: the library is not installed; with several ranks, a CheckpointError that says so.
    """
    if write is None:
        ranks.on_all(_library)
    temporary = ranks.on_all(lambda: _begin_new_folder(folder) if ranks.is_first else folder)
    shards = in_buckets([(name, _bytes(*of)) for name, of in plan.items()], max_shard_bytes) or [[]]
    files = {_file_name(number, len(shards)): names for number, names in enumerate(shards)}
    failures: list[Exception] = []
    for file, names in files.items():
        shard: dict[str, torch.Tensor] = {}
        for name in names:
            try:
                if ranks.is_first and not failures:
                    shard[name] = _as_planned(name, next(tensors)[1], *plan[name])
                else:
                    next(tensors)
            except Exception as error:
                failures.append(error)
                shard.clear()
        if ranks.is_first and not failures:
            failures += _attempt(write or _write_file, temporary / file, shard)

    def publish() -> None:
        for failure in failures:
            raise failure
        if ranks.is_first:
            if len(files) > 1 and write is None:
                places = {name: file for file, names in files.items() for name in names}
                document = {"metadata": {"total_size": sum(_bytes(*of) for of in plan.values())}, "weight_map": places}
                write_durably(temporary / SHARDS_INDEX_FILE, json.dumps(document, indent=2) + "\n")
            describe(temporary)
            sync_folder(temporary)
            temporary.replace(folder)
            sync_folder(folder.parent)

    try:
        ranks.on_all(publish)
    finally:
        if ranks.is_first:
            folders.discard(folder)


def _as_planned(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(f"{name} came as {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
    return tensor.detach().cpu().contiguous()


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    library = _library()
    try:
        library.torch.save_file(tensors, path, metadata={"format": "pt"})  # which transformers asks for
    except library.SafetensorError as error:
        raise OSError(str(error)) from error


def _attempt(
    write: Callable[[Path, dict[str, torch.Tensor]], None], path: Path, tensors: dict[str, torch.Tensor]
) -> list[Exception]:
    """Returns the error that kept the file from being written, if any."""
    try:
        write(path, tensors)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    except OSError as error:
        return [CheckpointError(f"{path} cannot be written ({error}); make room, or choose another folder")]
    except Exception as error:  # raised on all ranks, which still gather tensors together
        return [error]
    return []


def _begin_new_folder(folder: Path) -> Path:
    """Makes the temporary folder that `folder` is written in. Raises before tensors are gathered."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty; choose another folder, or move it away")
    folders.discard(folder)  # of a call that was killed
    temporary = folders.temporary_folder(folder)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror}); choose another folder") from error
    return temporary


def _library() -> Any:
    library = import_extra("safetensors", "hf", "A safetensors file")
    importlib.import_module("safetensors.torch")
    return library


_Neighbour = Annotated[
    str, lambda name: Path(name).name == name and name not in (".", ".."), "that names a file next to it"
]


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places: dict[str, str] = checked(
            read_json(path, JSON_BYTES)["weight_map"], dict[str, _Neighbour], "weight_map"
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error})") from error
    return places


def _entry(path: Path, name: str, slices: Any) -> TensorEntry:
    dtype, shape = _DTYPES.get(slices.get_dtype()), tuple(slices.get_shape())
    if dtype is None:
        raise CheckpointError(f"{path}: {name} is {slices.get_dtype()!r}, which no tensor here can be")
    num_bytes = _bytes(dtype, shape)
    return TensorEntry(dtype, shape, (Piece((0,) * len(shape), shape, path.name, 0, num_bytes),) if num_bytes else ())


def _file_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize
