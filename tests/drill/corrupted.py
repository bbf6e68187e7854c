"""Corrupts the files of a checkpoint in every way at random: each is refused, or what is loaded is what was saved."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch

from core.base.errors import CheckpointError
from core.dist_checkpointing import load
from core.dist_checkpointing.format.reader import read_index
from tests.drill.report import Report


def corrupt_files(checkpoint: Path, folder: Path, count: int, draw: random.Random, report: Report) -> None:
    """Corrupts `count` copies of files of `checkpoint`, one at a time."""
    copy = folder / checkpoint.name
    shutil.copytree(checkpoint, copy)
    index = read_index(checkpoint)
    expected = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in index.tensors.items()}
    load(expected, checkpoint)
    state = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    message = ""
    for number in range(count):
        path = draw.choice(sorted(path for path in copy.iterdir() if path.is_file()))
        honest = path.read_bytes()
        path.write_bytes(_corrupted(honest, draw))
        try:
            metadata = load(state, copy)
        except CheckpointError as error:
            message = str(error).splitlines()[0]
            report.fault("a corrupted file of a checkpoint, refused")
        else:
            same = all(torch.equal(_bits(state[name]), _bits(tensor)) for name, tensor in expected.items())
            if not same or metadata != index.metadata:
                path.rename(folder / f"read-{number}-{path.name}")
                raise SystemExit(f"a corrupted {path.name} was read without a word; kept as {folder}/read-{number}-*")
            report.fault(
                "a corrupted file of a checkpoint, in bytes that hold nothing", message="nothing: all is right"
            )
        path.write_bytes(honest)
    report.fault("a corrupted file of a checkpoint, refused", count=0, message=message)
    shutil.rmtree(copy)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _corrupted(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    start = draw.randrange(len(data))
    length = min(draw.choice([1, 8, 64, 4096]), len(data) - start)
    kind = draw.choice(["bit", "bytes", "zeros", "cut", "longer", "moved", "digit"])
    if kind == "bit":
        changed[start] ^= 1 << draw.randrange(8)
    elif kind == "bytes":
        changed[start : start + length] = draw.randbytes(length)
    elif kind == "zeros":
        changed[start : start + length] = bytes(length)
    elif kind == "cut":
        del changed[start:]
    elif kind == "longer":
        changed += draw.randbytes(length)
    elif kind == "moved":
        other = draw.randrange(len(data) - length + 1)
        changed[start : start + length] = data[other : other + length]
    else:
        changed[start] = ord(draw.choice("0123456789"))
    return bytes(changed)
