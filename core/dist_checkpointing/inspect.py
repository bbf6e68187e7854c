"""Describes a checkpoint and checks its files against the saved hashes, or lists the differences of two checkpoints.

    python -m core.dist_checkpointing.inspect runs/a            # its latest checkpoint
    python -m core.dist_checkpointing.inspect runs/a runs/b     # compared by their metadata, shapes and hashes

Reads checkpoints of this library, of `torch.distributed.checkpoint` (Megatron-LM's among them) and of Hugging Face.
Every byte is read and compared with the hashes that were saved, unless `--no-verify-checkpoint` is given.

Exit status: 0; 1 if two checkpoints differ; 2 if one cannot be read.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..dtypes import dtype_name
from ..errors import CheckpointError, MissingExtraError
from ..text import fold_numbered, numbered_name, readable_bytes
from .agreement import Ranks
from .format.content_hash import joint_hash
from .format.folders import existing_folder, latest_checkpoint
from .format.index import INDEX_FILE, TORCH_INDEX_FILE, CheckpointIndex, TensorEntry
from .format.reader import read_index
from .format.verification import another_offered, damage, verified_line
from .safetensors_io import has_safetensors, read_safetensors_index

_WIDTH = 118
_WEIGHTS = "model."
"""How the names of a run's model begin in its checkpoints."""

_LONGEST_LIST = 8
_DIFFERENCES_SHOWN = 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="core.dist_checkpointing.inspect", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint, the folder of a run, or a model of Hugging Face's"
    )
    parser.add_argument("other", type=Path, nargs="?", help="another, to compare with")
    parser.add_argument("--expand", action="store_true", help="list every layer, equal ones too")
    parser.add_argument(
        "--no-verify-checkpoint", action="store_true", help="read only the description, not the contents of the files"
    )
    asked = parser.parse_args(arguments)
    if asked.other is not None and asked.expand:
        parser.error("--expand is about the description of one checkpoint, and two are given")
    try:
        opened = [open_checkpoint(path) for path in (asked.checkpoint, asked.other) if path is not None]
        checked = [] if asked.no_verify_checkpoint else [_verified(each) for each in opened]
        if asked.other is None:
            sys.stdout.write(describe(opened[0], expand=asked.expand))
            sys.stderr.writelines(checked)
            return 0
        one, other = opened
        check_comparable(one, other)
        found = differences(one, other)
    except (CheckpointError, MissingExtraError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    compared = "contents not compared, for want of hashes"
    if have_hashes(one) and have_hashes(other):
        compared = "tensors have the same contents, by their hashes"
        compared += ", which were not compared with the files" if asked.no_verify_checkpoint else ""
    same = f"{one.folder} and {other.folder} are described the same; {compared}"
    sys.stdout.write("\n".join(shown(found) or [same]) + "\n")
    sys.stderr.writelines(checked)
    return 1 if found else 0


def _verified(opened: Opened) -> str:
    """Compares a checkpoint's files with its hashes; returns a line about it, or raises CheckpointError on damage."""
    if not have_hashes(opened):
        return f"{opened.folder} has no hashes, so that its files could not be compared with the saved tensors\n"
    alone, started = Ranks(), time.perf_counter()
    with another_offered(opened.folder, alone):
        if problems := damage(opened.folder, alone):
            raise CheckpointError("; ".join(problems))
    return verified_line(opened.folder, opened.index, set(opened.index.tensors), time.perf_counter() - started) + "\n"


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
    found = existing_folder(path)
    if not (found / INDEX_FILE).is_file():
        if has_safetensors(path):
            return Opened(path, read_safetensors_index(path))
        if not (path / TORCH_INDEX_FILE).is_file():
            found = (latest_checkpoint(path) if path.is_dir() else None) or found
    return Opened(found, read_index(found))


def describe(opened: Opened, *, expand: bool = False) -> str:
    """Returns a page about a checkpoint: where it comes from, its metadata, and the tree of its tensors.

    Args:
        expand: list every layer; else equal ones are one entry.
    """
    index = opened.index
    total, count = sum(map(_num_bytes, index.tensors.values())), len(index.tensors)
    kind = (
        "torch.distributed.checkpoint, no metadata" if index.encoding == "torch.save" else "tensors alone, no metadata"
    )
    where = _provenance(index.metadata) if index.metadata else kind
    files = f"{len(index.file_bytes)} files" if len(index.file_bytes) != 1 else "1 file"
    held = f"{count} tensors" if count != 1 else "1 tensor"
    lines = [str(opened.folder), f"  {where}", f"  {held}, {readable_bytes(total)} in {files}"]
    weights = {name: entry.content_hash for name, entry in index.tensors.items() if name.startswith(_WEIGHTS)}
    hashes = {name: value for name, value in weights.items() if value is not None}
    if hashes and len(hashes) == len(weights):
        lines.append(f"  weights {joint_hash(hashes)}, the hash that a run logs with --log-weights-hash")
    if index.others:
        lines.append(f"  {len(index.others)} entries that are no tensors, which are never read")
    if index.metadata:
        lines += ["", *_metadata_lines(index.metadata)]
    lines += ["", *_tree_lines(index.tensors, expand)]
    return "\n".join(lines) + "\n"


def differences(one: Opened, other: Opened) -> list[str]:
    """Lists the differences of two checkpoints, one per line; empty if they are the same.

    Contents are compared by their hashes, if both checkpoints have them.
    """
    found = [*_metadata_differences(one.index.metadata, other.index.metadata)]
    ours, theirs = one.index.tensors, other.index.tensors
    found += [f"{name}: only in the first, {_kind(ours[name])}" for name in sorted(ours.keys() - theirs.keys())]
    found += [f"{name}: only in the second, {_kind(theirs[name])}" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        if _kind(ours[name]) != _kind(theirs[name]):
            found.append(f"{name}: {_kind(ours[name])} and {_kind(theirs[name])}")
        elif None not in (hashes := (ours[name].content_hash, theirs[name].content_hash)) and hashes[0] != hashes[1]:
            found.append(f"{name}: other contents, by their hashes")
    return found


def shown(lines: Sequence[str]) -> list[str]:
    """Returns the first lines, and the number of the rest."""
    more = len(lines) - _DIFFERENCES_SHOWN
    return [*lines[:_DIFFERENCES_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _provenance(metadata: Mapping[str, Any]) -> str:
    """Says at which step a run's checkpoint was written, by which ranks; else that there is metadata."""
    parts = []
    if isinstance(step := metadata.get("iteration"), int):
        parts.append(f"step {step}")
    if isinstance(samples := metadata.get("consumed_samples"), int):
        parts.append(f"{samples} samples seen")
    layout = metadata.get("layout")
    if isinstance(layout, dict) and isinstance(ranks := layout.get("ranks"), int):
        degrees = [f"{name} parallel {size}" for name, size in layout.items() if name != "ranks" and size != 1]
        by = f"{ranks} ranks" if ranks != 1 else "1 rank"
        parts.append(f"written by {by}{' (' + ', '.join(degrees) + ')' if degrees else ''}, {_wrapper(metadata)}")
    return ", ".join(parts) or "no run's"


def _wrapper(metadata: Mapping[str, Any]) -> str:
    config = metadata.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("ddp"), dict):
        return "under no known wrapper"
    ddp = config["ddp"]
    strategy = ddp.get("data_parallel_sharding_strategy", "no_shard")
    if strategy == "no_shard" and ddp.get("use_distributed_optimizer"):
        strategy = "optim"
    names = {"no_shard": "DDP", "optim": "ZeRO-1", "optim_grads": "ZeRO-2", "optim_grads_params": "ZeRO-3"}
    name = "FSDP2" if config.get("use_torch_fsdp2") else names.get(strategy, strategy)
    instances = ddp.get("num_distributed_optimizer_instances", 1)
    return f"under {name}" + (f", replicated {instances} times" if instances != 1 else "")


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


@dataclass
class _Node:
    """A node in the tree of tensor names. `_tree_lines` fills it."""

    entry: TensorEntry | None = None
    """The tensor of this name; None if the name is only a prefix of others."""
    below: dict[str, _Node] = field(default_factory=dict)
    """The nodes below, by the next part of their names, in natural order."""

    def entries(self) -> Iterator[TensorEntry]:
        if self.entry is not None:
            yield self.entry
        for node in self.below.values():
            yield from node.entries()

    def signature(self) -> Any:
        """Returns a value that is equal for nodes with tensors of the same names, shapes and dtypes."""
        own = None if self.entry is None else (self.entry.shape, self.entry.dtype)
        return own, tuple((name, node.signature()) for name, node in self.below.items())


def _tree_lines(tensors: Mapping[str, TensorEntry], expand: bool) -> Iterator[str]:
    root = _Node()
    for name in sorted(tensors, key=_natural):
        node = root
        for part in name.split("."):
            node = node.below.setdefault(part, _Node())
        node.entry = tensors[name]
    rows = [*_rows(root, 0, expand)]
    width = max((len(label) for label, _ in rows), default=0)
    for label, entries in rows:
        size = readable_bytes(sum(map(_num_bytes, entries)))
        kinds = {_kind(entry) for entry in entries}
        what = kinds.pop() if len(kinds) == 1 else f"{len(entries)} tensors"
        yield f"  {label:<{width}}  {size:>10}  {what}"


def _rows(node: _Node, depth: int, expand: bool) -> Iterator[tuple[str, list[TensorEntry]]]:
    runs = fold_numbered(
        node.below.items(), itemgetter(0), lambda a, b: not expand and a[1].signature() == b[1].signature()
    )
    for run in runs:
        label, nodes = numbered_name(run[0][0], run[-1][0]), [node for _, node in run]
        first = nodes[0]
        while first.entry is None and len(first.below) == 1:  # a name that leads to one other
            part, first = next(iter(first.below.items()))
            label += f".{part}"
        entries = [entry for each in nodes for entry in each.entries()]
        yield "  " * depth + label + (f"  ({len(nodes)} x)" if len(nodes) > 1 else ""), entries
        yield from _rows(first, depth + 1, expand)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _metadata_differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *(name for name in other if name not in one)]:
            inner = f"{where}.{name}" if where else str(name)
            if name not in one or name not in other:
                side, value = ("second", other[name]) if name not in one else ("first", one[name])
                yield f"{inner}: only in the {side}, {_value(value)}"
            else:
                yield from _metadata_differences(one[name], other[name], inner)
    elif one != other:
        yield f"{where}: {_value(one)} and {_value(other)}"


def have_hashes(opened: Opened) -> bool:
    """Returns whether every tensor has a hash, so that contents can be compared without reading them."""
    return all(entry.content_hash is not None for entry in opened.index.tensors.values())


def _kind(entry: TensorEntry) -> str:
    return f"{dtype_name(entry.dtype)} {list(entry.shape)}"


def _num_bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def check_comparable(one: Opened, other: Opened) -> None:
    """Raises CheckpointError if two checkpoints have no name in common."""
    if not one.index.tensors.keys() & other.index.tensors.keys():
        raise CheckpointError(
            f"{one.folder} and {other.folder} have no tensor's name in common; convert one of them to the other's "
            "layout first (examples/gpt/convert.py)"
        )


if __name__ == "__main__":
    sys.exit(main())
