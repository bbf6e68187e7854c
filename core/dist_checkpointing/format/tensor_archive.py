"""Reads a tensor from an archive of `torch.save`, as ``torch.distributed.checkpoint`` stores each.

An archive is a zip file of uncompressed members: ``data.pkl``, which describes the tensor, and ``data/<key>``, its
elements. The description is read without running it, and checked against the sizes of the members and their CRC-32.
"""

from __future__ import annotations

import io
import math
import sys
import zipfile
from typing import Any

import torch

from ...dtypes import DTYPES
from ...errors import CheckpointError
from ...files.bounds import brief
from .inert_pickle import Record, load_inert

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
"""Dtypes by storage class; the newest dtypes have an untyped storage instead."""

_REBUILDS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
_MAX_DIMS = 64


def read_tensor_archive(data: bytes) -> torch.Tensor:
    """Returns the tensor in an archive, on the CPU.

    Raises:
        CheckpointError: `data` is no archive of one tensor, or is damaged.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(archive, len(data))
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"no archive of torch.save, or a damaged one ({brief(str(error))})") from None
    except (KeyError, RuntimeError, OverflowError, TypeError, UnicodeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"a damaged archive ({type(error).__name__}: {brief(str(error))})") from None


def _read(archive: zipfile.ZipFile, num_bytes: int) -> torch.Tensor:
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()) or (
        sum(info.file_size for info in members.values()) > num_bytes
    ):
        raise CheckpointError("its members are compressed, or larger than it is; torch.save does not write that")
    if "data.pkl" not in members:
        raise CheckpointError("it has no data.pkl; nothing in it was run")
    if "byteorder" in members and archive.read(members["byteorder"]).decode("ascii") != sys.byteorder:
        raise CheckpointError("its bytes are in another order than this machine's")

    def storage(pid: Any) -> tuple[torch.dtype, bytes]:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[2], str)):
            raise CheckpointError(f"it refers to {brief(pid)}; nothing was run")
        dtype = _STORAGES.get(getattr(pid[1], "kind", ""))
        if dtype is None or f"data/{pid[2]}" not in members:
            raise CheckpointError(f"it refers to {brief(pid)}, which it does not hold")
        return dtype, archive.read(members[f"data/{pid[2]}"])

    return _rebuilt(load_inert(archive.read(members["data.pkl"]), _kind_of, storage))


def _kind_of(module: str, name: str) -> str | None:
    known = {
        "torch._utils": _REBUILDS,
        "torch": _STORAGES,
        "torch.storage": _STORAGES,
        "collections": ("OrderedDict",),
    }
    return name if name in known.get(module, ()) else None


def _rebuilt(call: Any) -> torch.Tensor:
    """Builds the tensor that the call in an archive describes."""
    arguments = call.state if isinstance(call, Record) and isinstance(call.state, tuple) else ()
    kind = getattr(call, "kind", "")
    if kind == "_rebuild_parameter" and arguments and getattr(arguments[0], "kind", "").startswith("_rebuild_tensor"):
        return _rebuilt(arguments[0])
    if kind not in _REBUILDS or len(arguments) < 5:
        raise CheckpointError("it holds no tensor; nothing in it was run")
    (dtype, content), offset, shape, stride = arguments[:4]
    if kind == "_rebuild_tensor_v3":
        dtype = arguments[6] if len(arguments) > 6 else None
    if dtype not in DTYPES.values() or not all(_is_sizes(sizes) for sizes in ((offset,), shape, stride)):
        raise CheckpointError("it describes no tensor that could be one")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if math.prod(shape) * dtype.itemsize > len(content) or (last + 1) * dtype.itemsize > len(content):
        raise CheckpointError(f"it holds {len(content)} bytes, which are fewer than a tensor of {brief(shape)} has")
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    flat = flat[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
    return flat.as_strided(shape, stride, offset)


def _is_sizes(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= _MAX_DIMS
        and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
    )
