"""Reads the files of `torch.distributed.checkpoint` without running code from them.

Its description, ``.metadata``, is a pickle, which is a program. torch's weights-only unpickler does not know the
protocol that it is written in. The unpickler here knows a few names and builds inert records for them: no class of
torch and no function can be called. Each tensor is an archive of `torch.save`, which torch reads itself
(``weights_only``), once sizes, names and checksums have been checked.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...base.dtypes import DTYPES
from ...base.errors import CheckpointError
from ...base.files import MAX_DEPTH, BoundsError, brief, read_file
from .index import CheckpointIndex, Piece, TensorEntry, as_sizes, expect, is_size

_TORCH_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": (  # Megatron-LM leaves the plans of its ranks
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}
PICKLE_BYTES = 512 << 20
"""Largest index that torch's writer leaves."""

_EMPTY_CHUNKS = 1 << 16
"""Limit of empty pieces of a tensor, in addition to the stored ones: one for each rank without rows."""
_MEGATRON_MODULES = "megatron.core.dist_checkpointing."


def _kind_of(module: str, name: str) -> str | None:
    if module.startswith(_MEGATRON_MODULES) and name == "MCoreMetadata":  # torch's, with notes on optimizer state
        return "Metadata"
    return name if name in _TORCH_RECORDS.get(module, ()) else None


def read_torch_index(path: Path) -> CheckpointIndex:
    """Returns the checked index of a ``torch.distributed.checkpoint`` checkpoint, from its ``.metadata`` pickle."""
    root = _load_inert(read_file(path, PICKLE_BYTES))
    places = _table(_field(root, "Metadata", "storage_data"))
    infos: dict[tuple[str, tuple[int, ...]], Record] = {}
    bytes_of: dict[str, Piece] = {}
    for key, info in places.items():
        name, offset = _field(key, "MetadataIndex", "fqn"), _field(key, "MetadataIndex", "offset")
        expect(isinstance(name, str), f"a piece belongs to {brief(name)}")
        if offset is None:
            bytes_of[name] = _piece(name, info, (), ())
        else:
            infos[name, _torch_size(offset)] = info
    tensors: dict[str, TensorEntry] = {}
    others = dict[str, Piece | None]()
    num_pieces = 0
    for name, entry in _table(_field(root, "Metadata", "state_dict_metadata")).items():
        expect(isinstance(name, str), f"an entry has the name {brief(name)}")
        if getattr(entry, "kind", "") == "BytesStorageMetadata":
            others[name] = bytes_of.get(name)
        else:
            tensors[name] = _torch_tensor(name, entry, infos)
            num_pieces += len(tensors[name].pieces)
            expect(num_pieces <= len(infos), f"up to tensor {brief(name)} it has more pieces than are stored")
    file_bytes: dict[str, int] = {}
    for piece in (piece for entry in tensors.values() for piece in entry.pieces):
        file_bytes[piece.file] = max(file_bytes.get(piece.file, 0), piece.start + piece.num_bytes)
    index = CheckpointIndex(tensors, file_bytes, encoding="torch.save", others=others)
    index.check()
    return index


def _torch_tensor(name: str, entry: Any, infos: dict[tuple[str, tuple[int, ...]], Record]) -> TensorEntry:
    properties = getattr(_field(entry, "TensorStorageMetadata", "properties"), "state", None)
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    expect(isinstance(dtype, torch.dtype), f"tensor {brief(name)} has the unknown dtype {brief(dtype)}")
    chunks = _field(entry, "TensorStorageMetadata", "chunks")
    expect(isinstance(chunks, list), f"tensor {brief(name)} has no list of pieces")
    expect(len(chunks) <= len(infos) + _EMPTY_CHUNKS, f"tensor {brief(name)} has more pieces than are stored")
    pieces = []
    for chunk in chunks:
        offsets = _torch_size(_field(chunk, "ChunkStorageMetadata", "offsets"))
        sizes = _torch_size(_field(chunk, "ChunkStorageMetadata", "sizes"))
        if 0 in sizes:  # a rank without rows
            continue
        expect((name, offsets) in infos, f"tensor {brief(name)} has a piece at {list(offsets)} that is stored nowhere")
        pieces.append(_piece(name, infos[name, offsets], offsets, sizes))
    shape = _torch_size(_field(entry, "TensorStorageMetadata", "size"))
    return TensorEntry(dtype, shape, tuple(pieces))  # type: ignore[arg-type]  # checked above


def _piece(name: str, info: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
    file, start, num_bytes = (_field(info, "_StorageInfo", key) for key in ("relative_path", "offset", "length"))
    has_types = isinstance(file, str) and is_size(start) and is_size(num_bytes)
    expect(has_types, f"tensor {brief(name)} has a piece at no place in a file")
    expect(info.get("transform_descriptors") is None, f"tensor {brief(name)} is stored through a stream transform")
    return Piece(offsets, sizes, file, start, num_bytes)


def _field(record: Any, kind: str, name: str) -> Any:
    expect(isinstance(record, Record) and record.kind == kind, f"a {kind} is missing")
    return record.get(name)


def _table(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError("a table is missing")
    return value


def _torch_size(value: Any) -> tuple[int, ...]:
    args = value.state if isinstance(value, Record) and value.kind == "Size" else None
    return as_sizes(args[0] if isinstance(args, tuple) and len(args) == 1 else None)


class Record:
    """Replaces every class and function in a pickle: stores its arguments and does nothing."""

    kind = ""
    state: Any = None
    """The arguments of the constructor. `__setstate__` replaces them while the pickle is read."""

    def __init__(self, *args: Any) -> None:
        self.state = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


def _load_inert(data: bytes) -> Any:
    """Returns the object that a pickle describes, made of records, dtypes and plain values.

    Raises:
        CheckpointError: the pickle names something else, allocates too much, or is damaged.
    """
    try:
        check_pickle(data, lambda module, name: is_dtype(module, name) or _kind_of(module, name) is not None)
        return InertUnpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except BoundsError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"not readable ({type(error).__name__}: {brief(str(error))})") from None


def is_dtype(module: str, name: str) -> bool:
    return module == "torch" and name in DTYPES


class InertUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._classes: dict[tuple[str, str], type[Any]] = {}
        """Record classes by module and name, of this pickle alone: it can set attributes on the classes that it names.
        `find_class` adds them."""

    def find_class(self, module: str, name: str) -> Any:
        if is_dtype(module, name):
            return DTYPES[name]
        kind = _kind_of(module, name)
        if kind is None:
            raise CheckpointError(
                f"it names {brief(f'{module}.{name}')}, which no description of tensors needs; nothing was run"
            )
        return self.record_class(module, name, kind, Record)

    def record_class(self, module: str, name: str, kind: str, base: type) -> Any:
        if (module, name) not in self._classes:
            self._classes[module, name] = type(kind, (base,), {"kind": kind})
        return self._classes[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError("it refers to something outside of itself; nothing was run")


STORAGES = {
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
}
_STORAGES = (*STORAGES, "UntypedStorage")
_ARCHIVED = {
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
    "torch": (*_STORAGES, *DTYPES),
    "torch.storage": _STORAGES,
    "collections": ("OrderedDict",),
}
"""Names in the archive of a tensor, by module: fewer than torch admits, whose others can allocate memory."""


def read_tensor_archive(data: bytes) -> torch.Tensor:
    """Returns the tensor in an archive, on the CPU.

    Raises:
        CheckpointError: `data` is no archive of one tensor, or is damaged.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if any(info.compress_type != zipfile.ZIP_STORED for info in members) or (
                sum(info.file_size for info in members) > len(data)
            ):
                raise CheckpointError("its members are compressed or too large; torch.save writes neither")
            if archive.testzip() is not None:
                raise CheckpointError("its bytes do not match their checksum")
            for info in members:
                if info.filename.endswith("data.pkl"):
                    check_pickle(archive.read(info), lambda module, name: name in _ARCHIVED.get(module, ()))
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive raises almost anything
        raise CheckpointError(f"no archive of torch.save, or a damaged one ({brief(str(error))})") from None
    if not isinstance(tensor, torch.Tensor) or tensor.nbytes > len(data):
        raise CheckpointError("it holds no tensor, or fewer bytes than its tensor has; nothing in it was run")
    return tensor.detach()


def check_pickle(data: bytes, is_known: Callable[[str, str], bool]) -> None:
    """Refuses a pickle that requires more memory or deeper nesting than its length allows, without running it.

    Args:
        is_known: returns whether a global, by module and name, is allowed. Names that the pickle takes from its memo
            are checked by the unpickler's `find_class`.

    Raises:
        BoundsError: the pickle is refused, or `data` is no pickle.
    """
    stack: list[int] = []
    memo: dict[int, int] = {}
    try:
        argument: Any
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            name = opcode.name
            if name in _REFUSED:
                raise BoundsError(f"it has the instruction {name}, which no description of tensors needs")
            if name == "GLOBAL":
                module, _, attribute = str(argument).partition(" ")
                if not is_known(module, attribute):
                    raise BoundsError(f"it names {brief(f'{module}.{attribute}')}; nothing was run")
            if name in _PUTS:
                if argument > count:
                    raise BoundsError(f"it numbers a value {argument} after {count} instructions")
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in _GETS:
                stack.append(memo[argument])
            else:
                _follow(name, stack)
    except BoundsError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise BoundsError(f"no pickle, or a damaged one ({type(error).__name__}: {brief(str(error))})") from None


_REFUSED = {"EMPTY_SET", "FROZENSET", "EXT1", "EXT2", "EXT4", "INST", "OBJ", "NEXT_BUFFER"}
_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}
_MARK = -1
_EFFECTS = {
    opcode.name: (
        pickletools.markobject in opcode.stack_before,
        [*opcode.stack_before, pickletools.markobject].index(pickletools.markobject),
        [_MARK if after is pickletools.markobject else 0 for after in opcode.stack_after],
        opcode.name.startswith("TUPLE"),
    )
    for opcode in pickletools.opcodes
}
"""Per instruction: whether it pops down to a mark, how many others it pops and pushes, and whether it makes a
tuple."""


def _follow(name: str, stack: list[int]) -> None:
    """Applies an instruction to a stack with the nesting depth of each value's tuples."""
    to_mark, count, pushes, makes_tuple = _EFFECTS[name]
    deepest = 0
    if to_mark:
        while (depth := stack.pop()) != _MARK:
            deepest = max(deepest, depth)
    for _ in range(count):
        deepest = max(deepest, stack.pop())
    if makes_tuple:
        if deepest >= MAX_DEPTH:
            raise BoundsError(f"it is nested more than {MAX_DEPTH} deep")
        stack.append(deepest + 1)
    else:
        stack.extend(pushes)
