"""The files of copies in memory (`host_copies`): what a rank writes, and what of it can be read after a loss.

A mark says of which step a rank's pieces are, and has their sums. It is JSON, signed with the secret of the job for
its place: generation, version and rank. Its file has its memory before the first step, and is written in place: a
memory that is full later cannot refuse it. It begins with a zero byte while it is written, and with its text then.

Nothing in memory is believed: of a version whatever cannot be read is absent, and named.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.files import CONFIG_BYTES, JSON_BYTES, BoundsError, open_in_place, parse_json, read_file
from ..base.job_secret import is_signed, signature
from .format.index import decode_index, is_size

PLAN_FILE, GENERATION, VERSIONS = "plan.json", "generation_{:05d}", ("version_0", "version_1")
_UNFINISHED = b"\0"
_FIELDS = {"step", "metadata", "sums"}


@dataclass(frozen=True)
class Mark:
    """What a rank writes about a version of its pieces, once they are complete."""

    step: int
    metadata: dict[str, Any]
    sums: dict[str, int]
    """`word_sum` of each file."""


@dataclass
class Version:
    """What one rank has found of a version on its machine."""

    plan: str
    """The index of all copies of the version, without metadata."""
    files: list[str]
    """Those that the plan names."""
    steps: dict[str, int] = field(default_factory=dict)
    """Of the files that are complete, the step that they are of."""
    metadata: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By step."""


def mark_path(path: Path) -> Path:
    """Returns where the mark of a file of pieces is."""
    return path.with_name(path.name.replace("shared", "rank").replace(".bin", ".json"))


def encode_mark(mark: Mark, secret: bytes, path: Path) -> bytes:
    """Returns the text of a mark.

    Args:
        path: where it is written, on whichever machine: its last three parts are signed too.
    """
    fields = {"step": mark.step, "metadata": mark.metadata, "sums": mark.sums}
    return json.dumps({**fields, "signature": signature(secret, _place(path), json.dumps(fields))}).encode()


def decode_mark(data: bytes, secret: bytes, path: Path) -> Mark | None:
    """Returns a checked mark, or None if it is not finished.

    Raises:
        ValueError: it is damaged, of another place, or of one who does not know the secret.
    """
    if data[:1] == _UNFINISHED:
        return None
    fields = parse_json(data.decode("utf-8"))
    given = fields.pop("signature", None) if isinstance(fields, dict) else None
    if not is_signed(given, secret, _place(path), json.dumps(fields)) or fields.keys() != _FIELDS:
        raise BoundsError("it is no mark of this place that this job has signed")
    mark = Mark(**fields)
    has_types = is_size(mark.step) and isinstance(mark.metadata, dict) and isinstance(mark.sums, dict)
    if not has_types or not all(type(value) is int for value in mark.sums.values()):
        raise BoundsError("its fields are of other types")
    return mark


def write_mark(path: Path, data: bytes = _UNFINISHED) -> None:
    """Writes a mark in place, its first byte last: whenever this process ends, it is whole, or not finished."""
    with os.fdopen(open_in_place(path, os.O_RDWR), "r+b") as file:
        for start, part in ((0, _UNFINISHED), (1, data[1:]), (0, data[:1])):
            file.seek(start)
            file.write(part)
            file.flush()


def word_sum(data: Tensor) -> int:
    """Returns the sum of bytes read as 64-bit words, modulo 2^64, signed. It shows any change of one word."""
    whole = len(data) // 8 * 8
    return int(data[:whole].view(torch.int64).sum() + data[whole:].sum())


def make_file(path: Path, num_bytes: int, *, has_memory: bool = True) -> None:
    """Makes a file of zeros, in the place of what has its name.

    Args:
        has_memory: False: it takes none, and is not to be read.

    Raises:
        OSError: the memory is full.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, num_bytes)
        if has_memory and num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)  # else a write to memory that is full ends the process
    finally:
        os.close(descriptor)


def map_file(path: Path, num_bytes: int) -> Tensor:
    """Returns the bytes of a file in memory, not copied. It lives until nothing refers to them.

    Raises:
        OSError: it is absent, has another length, or is no file.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with os.fdopen(open_in_place(path, os.O_RDWR), "r+b", buffering=0) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_size != num_bytes:
            raise OSError(errno.EINVAL, f"no file of {num_bytes} bytes")
        return torch.from_numpy(np.memmap(file, np.uint8, mode="r+", shape=(num_bytes,)))


def find_versions(root: Path, secret: bytes, share: int, num_shares: int) -> tuple[dict[str, Version], list[str]]:
    """Looks at one of so many shares of the copies on this machine.

    Returns:
        versions by their place in `root`, and the paths of what is damaged. What is absent, or was being written when
        its rank ended, is not among those.
    """
    versions: dict[str, Version] = {}
    damaged_files = []
    for generation in sorted(root.glob("generation_*")):
        try:
            plan = read_file(generation / PLAN_FILE, JSON_BYTES, follow_link=False).decode("utf-8")
            file_bytes = decode_index(plan).file_bytes
        except FileNotFoundError:
            continue
        except Exception:  # of many kinds
            damaged_files.append(str(generation / PLAN_FILE))
            continue
        for name in VERSIONS:
            version = versions[f"{generation.name}/{name}"] = Version(plan, sorted(file_bytes))
            for file in version.files[share::num_shares]:
                damaged_files += _look_at(generation / name / file, file_bytes, secret, version)
    return versions, damaged_files


def _look_at(path: Path, file_bytes: Mapping[str, int], secret: bytes, version: Version) -> list[str]:
    """Adds a file to a version if it is complete. Returns the path of what is damaged."""
    try:
        mark = decode_mark(read_file(mark_path(path), CONFIG_BYTES, follow_link=False), secret, mark_path(path))
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        return [str(mark_path(path))]
    if mark is None:
        return []
    with suppress(OSError, ValueError):
        if word_sum(map_file(path, file_bytes[path.name])) == mark.sums.get(path.name):
            version.steps[path.name], version.metadata[mark.step] = mark.step, mark.metadata
            return []
    return [str(path)]


def _place(path: Path) -> str:
    return "/".join(path.parts[-3:])
