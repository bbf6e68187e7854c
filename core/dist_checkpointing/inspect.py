"""Describes a checkpoint, and checks its files against the saved hashes.

    python -m shardstack.dist_checkpointing.inspect runs/a            # its latest checkpoint
    python -m shardstack.dist_checkpointing.inspect runs/a --expand   # every tensor with its hash: `diff` compares two

Reads checkpoints of this library, of `torch.distributed.checkpoint` (Megatron-LM's among them) and of Hugging Face.
Every byte is read and compared with the hashes that were saved, unless `--no-verify-checkpoint` is given.

Exit status: 0, or 2 if it cannot be read.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..base.command_line import CommandParser
from ..base.dtypes import dtype_name
from ..base.errors import CheckpointError, MissingExtraError
from ..base.text import aligned, fold_numbered, numbered_name, readable_bytes
from .agreement import Ranks
from .format.content_hash import joint_hash
from .format.folders import existing_folder, latest_checkpoint
from .format.index import INDEX_FILE, TORCH_INDEX_FILE, CheckpointIndex, TensorEntry
from .format.reader import read_index
from .good_checkpoints import another_offered
from .loading import damage, verified_line
from .model_state import MODEL
from .safetensors_io import has_safetensors, read_safetensors_index

_WIDTH = 118

_LONGEST_LIST = 8


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m shardstack.dist_checkpointing.inspect"
) -> int:
    """Runs the command. Returns its exit status."""
    parser = CommandParser(prog=program, description=str(__doc__).split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, a run's folder, or a model of Hugging Face's")
    parser.add_argument("--expand", action="store_true", help="list every tensor, with its hash")
    parser.add_argument(
        "--no-verify-checkpoint", action="store_true", help="read only the description, not the contents of the files"
    )
    options = parser.parse_args(arguments)
    try:
        checkpoint = open_checkpoint(options.checkpoint)
        verdict = "" if options.no_verify_checkpoint else _verify_line(checkpoint)
    except (CheckpointError, MissingExtraError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(describe(checkpoint, expand=options.expand))
    sys.stderr.write(verdict)
    return 0


def _verify_line(checkpoint: Opened) -> str:
    """Compares a checkpoint's files with its hashes. Returns a line about it, or raises CheckpointError on damage."""
    if any(entry.content_hash is None for entry in checkpoint.index.tensors.values()):
        return f"{checkpoint.folder} has no hashes, so that its files could not be compared with the saved tensors\n"
    alone, started_at = Ranks(), time.perf_counter()
    with another_offered(checkpoint.folder, alone):
        if problems := damage(checkpoint.folder, alone):
            raise CheckpointError("; ".join(problems))
    seconds = time.perf_counter() - started_at
    return verified_line(checkpoint.folder, checkpoint.index, set(checkpoint.index.tensors), seconds) + "\n"


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose index has been read and checked."""

    folder: Path
    index: CheckpointIndex


def open_checkpoint(folder: str | os.PathLike[str]) -> Opened:
    """Opens the checkpoint in `folder`, or the latest one of a run's folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = Path(folder)
    checkpoint = existing_folder(path)
    if not (checkpoint / INDEX_FILE).is_file():
        if has_safetensors(path):
            return Opened(path, read_safetensors_index(path))
        if not (path / TORCH_INDEX_FILE).is_file():
            checkpoint = (latest_checkpoint(path) if path.is_dir() else None) or checkpoint
    return Opened(checkpoint, read_index(checkpoint))


def describe(checkpoint: Opened, *, expand: bool = False) -> str:
    """Returns a page about a checkpoint: its metadata and its tensors.

    Args:
        expand: list every layer, with the hash of each tensor; else equal layers are one entry.
    """
    index = checkpoint.index
    total, count = sum(entry.num_bytes for entry in index.tensors.values()), len(index.tensors)
    by_torch = "torch.distributed.checkpoint, no metadata"
    kind = by_torch if index.encoding == "torch.save" else "tensors alone, no metadata"
    files = f"{len(index.file_bytes)} files" if len(index.file_bytes) != 1 else "1 file"
    tensors = f"{count} tensors" if count != 1 else "1 tensor"
    lines = [
        str(checkpoint.folder),
        *([] if index.metadata else [f"  {kind}"]),
        f"  {tensors}, {readable_bytes(total)} in {files}",
    ]
    weights = {name: entry.content_hash for name, entry in index.tensors.items() if name.startswith(MODEL)}
    hashes = {name: value for name, value in weights.items() if value is not None}
    if hashes and len(hashes) == len(weights):
        lines.append(f"  weights {joint_hash(hashes)}, the hash that a run logs with --log-weights-hash")
    if index.others:
        lines.append(f"  {len(index.others)} entries that are no tensors, which are not run")
    if index.metadata:
        lines += ["", *_metadata_lines(index.metadata)]
    lines += ["", *_tensor_lines(index.tensors, expand)]
    return "\n".join(lines) + "\n"


def _metadata_lines(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yields plain values together, then a paragraph for each table."""
    plain = {name: value for name, value in metadata.items() if not isinstance(value, dict)}
    tables = {name: value for name, value in metadata.items() if isinstance(value, dict) and name != "config"}
    config = metadata.get("config")
    if isinstance(config, dict):
        tables = {f"config.{name}": v for name, v in config.items() if isinstance(v, dict)} | tables
        plain |= {f"config.{name}": value for name, value in config.items() if not isinstance(value, dict)}
    for name, table in {"": plain, **tables}.items():
        text = ", ".join(f"{key} {_value(value)}" for key, value in table.items())
        head = f"  {name}: " if name else "  "
        yield from textwrap.wrap(text or "empty", _WIDTH, initial_indent=head, subsequent_indent="    ")


def _value(value: Any) -> str:
    if isinstance(value, (list, dict)) and len(value) > _LONGEST_LIST:
        return f"({len(value)} entries)"
    return str(value)


def _tensor_lines(tensors: Mapping[str, TensorEntry], expand: bool) -> Iterator[str]:
    """Yields a line for each tensor. Those of equal layers, whose names only a number sets apart, are one line."""
    runs = fold_numbered(
        sorted(tensors.items(), key=_by_pattern),
        itemgetter(0),
        lambda one, other: not expand and _kind(one[1]) == _kind(other[1]),
    )
    labels = [numbered_name(run[0][0], run[-1][0]) + f"  ({len(run)} x)" * (len(run) > 1) for run in runs]
    sizes = [readable_bytes(len(run) * run[0][1].num_bytes) for run in runs]
    for line, ((_, first), *_) in zip(aligned([*zip(labels, sizes, strict=True)]), runs, strict=True):
        hash_text = f"  {first.content_hash:016x}" if expand and first.content_hash is not None else ""
        yield f"  {line}  {_kind(first)}{hash_text}"


def _by_pattern(item: tuple[str, TensorEntry]) -> tuple[list[str], list[int]]:
    """Sorts names by their words, then by their numbers, so that the same tensor of all layers is together."""
    parts = item[0].split(".")
    return [part for part in parts if not part.isdecimal()], [int(part) for part in parts if part.isdecimal()]


def _kind(entry: TensorEntry) -> str:
    return f"{dtype_name(entry.dtype)} {list(entry.shape)}"


if __name__ == "__main__":
    sys.exit(main())
