"""Reads what `torch.save` wrote, such as the files of Megatron-LM's format ``torch``, without running code from it.

Objects of other classes than Python's own become inert records, as in `torch_files`. Tensors are not loaded: where
their bytes are is enough to read parts of them.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from typing import IO, Any, TypeAlias

import torch

from ...base.dtypes import DTYPES
from ...base.errors import CheckpointError
from ...base.files import BoundsError, brief
from .index import as_sizes, expect, is_size
from .torch_files import PICKLE_BYTES, STORAGES, InertUnpickler, Record, check_pickle, is_dtype

Place: TypeAlias = tuple[torch.dtype, tuple[int, ...], int, int]
"""Dtype, shape, first byte and number of bytes of a tensor."""


class TorchArchive:
    """What `torch.save` wrote into an archive, read without running it.

    Raises:
        CheckpointError: `stream` is no such archive of this machine's byte order, or is damaged.
    """

    root: Any
    """Dicts, lists, tuples and plain values, with a `Record` in the place of every other object."""

    def __init__(self, stream: IO[bytes]) -> None:
        try:
            with zipfile.ZipFile(stream) as archive:
                members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                expect(members["data.pkl"].file_size <= PICKLE_BYTES, "its description is too large")
                expect(all(info.compress_type == zipfile.ZIP_STORED for info in members.values()), "it is compressed")
                order = archive.read(members["byteorder"]).decode() if "byteorder" in members else sys.byteorder
                expect(order == sys.byteorder, f"its bytes are in {brief(order)} order")
                data = archive.read(members["data.pkl"])
            check_pickle(data, lambda module, name: True)
            self.root = _Unpickler(io.BytesIO(data)).load()
            self._stream = stream
            self._places = {name: (_start_of(stream, info), info.file_size) for name, info in members.items()}
        except (CheckpointError, BoundsError) as error:
            raise CheckpointError(f"no readable archive of torch.save: {error}; nothing was run") from None
        except Exception as error:  # a damaged archive raises almost anything
            raise CheckpointError(f"no archive of torch.save, or a damaged one ({brief(str(error))})") from None

    def tensor(self, value: Any) -> Place | None:
        """Returns the place of a tensor in `root`, or None for any other value."""
        if not isinstance(value, Record) or not value.kind.startswith("_rebuild_"):
            return None
        try:
            if value.kind == "_rebuild_parameter":
                return self.tensor(value.state[0])
            (_, storage, key, *_), first, *rest = value.state
            shape, strides = as_sizes(rest[0]), as_sizes(rest[1])
            dtype: torch.dtype = rest[4] if value.kind == "_rebuild_tensor_v3" else STORAGES[storage.kind]
            start, size = self._places[f"data/{key}"]
            first, num_bytes = first * dtype.itemsize, math.prod(shape) * dtype.itemsize
        except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise CheckpointError(f"it describes a tensor in a way of its own ({brief(str(error))})") from None
        rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        dense = len(strides) == len(shape)
        dense &= all(stride == row or size == 1 for stride, row, size in zip(strides, rows, shape, strict=False))
        expect(dense, f"a tensor of shape {list(shape)} is stored with the strides {list(strides)}")
        expect(is_size(first) and first + num_bytes <= size, "a tensor lies outside of its bytes")
        return dtype, shape, start + first, num_bytes

    def number(self, value: Any) -> Any:
        """Returns a number in `root`, which may be a tensor of one element, or anything else as it is."""
        if (place := self.tensor(value)) is None:
            return value
        dtype, _, start, num_bytes = place
        self._stream.seek(start)
        return torch.frombuffer(bytearray(self._stream.read(num_bytes)), dtype=dtype).item()


def _start_of(stream: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Returns the first byte of a member's data, after a header of its own."""
    stream.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", stream.read(4))
    return info.header_offset + 30 + int(name) + int(extra)


class _Unpickler(InertUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if is_dtype(module, name):
            return DTYPES[name]
        return self.record_class(module, name, name, _Table if name == "OrderedDict" else Record)

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Table(dict[Any, Any]):
    def __setstate__(self, state: Any) -> None:
        """Drops attributes."""
