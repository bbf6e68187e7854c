"""Finds the files of a corpus and streams their documents, with at most one document in memory.

A text file has one document, one per line, or one per paragraph; a JSON-lines file has one per line. Files may be
compressed (.gz; .zst with the extra `train`). :func:`read_records` splits a file into records of raw bytes, and
:func:`parse_record` decodes one, so that the slower decoding can run in other processes.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from shardstack.base.errors import DataError, MissingExtraError

Format = Literal["auto", "text", "jsonl"]
SplitOn = Literal["file", "line", "blank-lines"]

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = (".gz", ".zst")

_LEFT_BY_PREPARE = (".bin", ".idx", "tokenizer.json", "tokenizer_config.json")
_BOM = b"\xef\xbb\xbf"


class Record(NamedTuple):
    """The raw bytes of one document."""

    content: bytes
    line: int
    """Number of its first line in the file, from 1."""
    offset: int
    """Uncompressed bytes of the file before it."""


def find_files(inputs: Iterable[str | os.PathLike[str]], file_format: Format = "auto") -> list[Path]:
    """Resolves paths, folders and glob patterns to files, sorted within each input, without duplicates.

    Takes the files of a folder, at any depth, with a known suffix; with an explicit format all files that are not
    hidden. Skips corpora and tokenizers.

    Raises:
        DataError: an input matches no file, or a file's suffix is of no known format.
    """
    found: dict[Path, None] = {}
    for item in inputs:
        path = Path(item)
        if path.is_dir():
            inside = [p for p in path.rglob("*") if p.is_file() and not _is_skipped(p.relative_to(path))]
            files = sorted(p for p in inside if file_format != "auto" or _known_format(p))
            if not files:
                raise DataError(f"{path}: no file with a known suffix ({_suffixes()}) in this folder")
        elif path.exists():
            files = [path]
        else:
            matches = glob.glob(str(path), recursive=True)  # noqa: PTH207  # Path.glob takes no absolute pattern
            files = sorted(p for p in map(Path, matches) if p.is_file())
            if not files:
                raise DataError(f"{path}: no such file, folder or pattern; check the path")
        for file in files:
            if file_format == "auto" and not _known_format(file):
                raise DataError(f"{file}: unknown suffix {file.suffix!r}, known are {_suffixes()}; or name the format")
            found[file] = None
    return list(found)


def standard_library_sources() -> list[Path]:
    """Returns the source files of the running Python's standard library, sorted: real text that every machine has.

    Skips installed packages, tests, and files of data (code pages, topic tables).
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    files: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [
            name for name in inside if name not in skipped
        ]  # do not enter installed packages: they may be many
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"{root}: this Python's standard library has no sources; name a corpus of your own")
    return sorted(files)


def resolve_format(path: Path, file_format: Format = "auto") -> Literal["text", "jsonl"]:
    """Returns the given format; for "auto", that of the suffix."""
    if file_format != "auto":
        return file_format
    return _known_format(path) or "text"


def read_records(
    path: Path, file_format: Literal["text", "jsonl"], split_on: SplitOn, report: Callable[[int], None]
) -> Iterator[Record]:
    """Splits a file into records; skips blank ones.

    Args:
        split_on: what ends a document of a text file.
        report: called with the number of bytes read from disk since the last call.

    Raises:
        DataError: the file cannot be read or decompressed.
    """
    try:
        with path.open("rb") as raw:
            last = 0
            for record in _cut(_decompressed(path, raw), file_format, split_on):
                if record.content.strip():
                    yield record
                report(raw.tell() - last)
                last = raw.tell()
            report(raw.tell() - last)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or cut short, it cannot be decompressed ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def parse_record(record: Record, name: str, file_format: Literal["text", "jsonl"], json_key: str) -> str:
    """Returns the text of a record of file `name`.

    Raises:
        DataError: the record is not UTF-8 or JSON, or has no text under `json_key`; the message names file and place.
    """
    content = record.content.removeprefix(_BOM) if record.offset == 0 else record.content
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = record.offset + len(record.content) - len(content) + error.start
        raise DataError(
            f"{name}: byte 0x{content[error.start]:02x} at offset {offset} (line "
            f"{record.line + content.count(10, 0, error.start)}) is no UTF-8; convert the file to UTF-8"
        ) from None
    if file_format == "text":
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{name}, line {record.line}: invalid JSON ({reason}); each line must be one object") from None
    if not isinstance(value, dict):
        raise DataError(f"{name}, line {record.line}: a JSON {type(value).__name__}; each line must be one object")
    if json_key not in value:
        keys = ", ".join(map(repr, value)) or "none"
        raise DataError(f"{name}, line {record.line}: no key {json_key!r}; keys there: {keys}; name the right one")
    if not isinstance(value[json_key], str):
        kind = type(value[json_key]).__name__
        raise DataError(f"{name}, line {record.line}: {json_key!r} is of type {kind}, it must be text")
    return cast(str, value[json_key])


def _cut(stream: BinaryIO, file_format: str, split_on: SplitOn) -> Iterator[Record]:
    if file_format == "text" and split_on == "file":
        yield Record(stream.read(), 1, 0)
        return
    line_number, offset = 1, 0
    paragraph: list[bytes] = []
    start = (1, 0)
    for line in stream:
        if file_format == "jsonl" or split_on == "line":
            yield Record(line.rstrip(b"\r\n"), line_number, offset)
        elif line.strip():
            if not paragraph:
                start = (line_number, offset)
            paragraph.append(line)
        elif paragraph:
            yield Record(b"".join(paragraph), *start)
            paragraph = []
        line_number, offset = line_number + 1, offset + len(line)
    if paragraph:
        yield Record(b"".join(paragraph), *start)


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdReader(raw), 1 << 20))
    return raw


class _ZstdReader(io.RawIOBase):
    """Decompresses any number of frames. Raises if the last one is truncated, which the library's reader ignores."""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise MissingExtraError("zstandard", "train", "A .zst file") from None
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._raw = raw
        # Decompressor of the current frame; None between frames. `readinto` sets and clears it.
        self._frame: Any = None
        # Decompressed bytes that were not read yet. `readinto` fills and drains it.
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._raw.read(1 << 16)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the last frame does not end")
                return 0
            self._ready = b"".join(self._decompress(compressed))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, compressed: bytes) -> Iterator[bytes]:
        while compressed:
            if self._frame is None:
                self._frame = self._new_frame()
            try:
                yield self._frame.decompress(compressed)
            except self._error as error:
                raise EOFError(str(error)) from None
            compressed = b""
            if self._frame.eof:
                compressed, self._frame = self._frame.unused_data, None


def _known_format(path: Path) -> Literal["text", "jsonl"] | None:
    plain = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    return "jsonl" if plain.suffix in JSON_SUFFIXES else "text" if plain.suffix in TEXT_SUFFIXES else None


def _is_skipped(path: Path) -> bool:
    """Returns whether a file is hidden, or the output of an earlier preparation."""
    return any(part.startswith(".") for part in path.parts) or path.name.endswith(_LEFT_BY_PREPARE)


def _suffixes() -> str:
    return f"{' '.join(TEXT_SUFFIXES + JSON_SUFFIXES)}, each also with {' or '.join(COMPRESSIONS)}"
