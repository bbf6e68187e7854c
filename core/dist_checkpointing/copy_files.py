"""The files of copies in memory (`host_copies`): writes them, and finds what can be read after a loss.

A mark says of which step a rank's pieces are, and has their sums. It is JSON, signed with the secret of the job for
its place: generation, version and rank. Its file has its memory before the first step, and is written in place: a
memory that is full later cannot refuse it. It begins with a zero byte while it is written, and with its text then.

Nothing in memory is believed: what cannot be read of a version is absent, and named.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..base.files import JSON_BYTES, BoundsError, open_in_place, parse_json, read_file
from ..rendezvous.job_secret import is_signed, signature
from .format.index import CheckpointIndex, decode_index, is_size

PLAN_FILE, GENERATION, VERSIONS = "plan.json", "generation_{:05d}", ("version_0", "version_1")
_UNFINISHED, _SIGNATURE = b"\0", "signature"
T = TypeVar("T")

Mark = dict[str, Any]
"""What a rank writes about a version of its pieces, once they are complete: `step` (an integer), `metadata` (a table)
and `sums` (the `word_sum` of each file)."""

Version = tuple[CheckpointIndex, dict[str, int], dict[int, dict[str, Any]]]
"""What one rank has found of a version: its plan, the step of the files that are complete, and the metadata of each
step."""


def mark_path(path: Path) -> Path:
    """Returns where the mark of a file of pieces is."""
    return path.with_name(path.name.replace("shared", "rank").replace(".bin", ".json"))


def encode_mark(mark: Mark, secret: bytes, path: Path) -> bytes:
    """Returns the text of a mark.

    Args:
        path: where it is written, on whichever machine: its last three parts are signed too.
    """
    return json.dumps({**mark, _SIGNATURE: signature(secret, _place(path), json.dumps(mark))}).encode()


def decode_mark(data: bytes, secret: bytes, path: Path) -> Mark | None:
    """Returns a checked mark, or None if it is not finished.

    Raises:
        ValueError: it is damaged, of another place, or of one who does not know the secret.
    """
    if data[:1] == _UNFINISHED:
        return None
    mark: Mark = parse_json(data.decode("utf-8"))
    given = mark.pop(_SIGNATURE, None) if isinstance(mark, dict) else None
    if not is_signed(given, secret, _place(path), json.dumps(mark)):
        raise BoundsError("it is no mark of this place that this job has signed")
    step, metadata, sums = (mark.get(name) for name in ("step", "metadata", "sums"))
    if not (is_size(step) and isinstance(metadata, dict) and isinstance(sums, dict)):
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
    with path.open("xb") as file:
        file.truncate(num_bytes)
        if has_memory and num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a write to memory that is full ends the process


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
    damaged: list[str] = []
    for generation in sorted(root.glob("generation_*")):
        index = _unless_damaged(generation / PLAN_FILE, lambda data: decode_index(data.decode()), damaged)
        if index is None:
            continue
        for name in VERSIONS:
            steps: dict[str, int] = {}
            metadata: dict[int, dict[str, Any]] = {}
            for file in sorted(index.file_bytes)[share::num_shares]:
                path = generation / name / file
                decode = partial(decode_mark, secret=secret, path=mark_path(path))
                mark = _unless_damaged(mark_path(path), decode, damaged)
                if mark is not None and _has_sum(path, index.file_bytes[file], mark["sums"].get(file)):
                    steps[file], metadata[mark["step"]] = mark["step"], mark["metadata"]
                elif mark is not None:
                    damaged.append(str(path))
            versions[f"{generation.name}/{name}"] = index, steps, metadata
    return versions, damaged


def _unless_damaged(path: Path, decode: Callable[[bytes], T], damaged: list[str]) -> T | None:
    """Returns what a file has, or None. Notes the path of what is there and cannot be read."""
    try:
        return decode(read_file(path, JSON_BYTES, follow_link=False))
    except FileNotFoundError:
        return None
    except Exception:  # of many kinds
        damaged.append(str(path))
        return None


def _has_sum(path: Path, num_bytes: int, expected: Any) -> bool:
    with suppress(OSError, ValueError):
        return type(expected) is int and word_sum(map_file(path, num_bytes)) == expected
    return False


def _place(path: Path) -> str:
    return "/".join(path.parts[-3:])
