"""Describes a checkpoint and checks its files against the saved hashes, or lists the differences of two checkpoints.

    python -m core.dist_checkpointing.inspect runs/a                        # its latest checkpoint
    python -m core.dist_checkpointing.inspect runs/a runs/b --contents     # and how far apart the tensors are

Every byte is read and compared with the hashes that were saved, unless `--no-verify-checkpoint` is given.

Exit status: 0; 1 if two checkpoints differ; 2 if one cannot be read.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError, MissingExtraError
from .agreement import Ranks
from .description import Opened, check_comparable, describe, differences, have_hashes, open_checkpoint, shown
from .format.verification import another_offered, damage, verified_line


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
    parser.add_argument("--contents", action="store_true", help="read the tensors too, and say how far apart they are")
    parser.add_argument(
        "--no-verify-checkpoint", action="store_true", help="read only the description, not the contents of the files"
    )
    asked = parser.parse_args(arguments)
    if asked.other is None and asked.contents:
        parser.error("--contents compares two checkpoints, and one is given")
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
        found = differences(one, other, contents=asked.contents)
    except (CheckpointError, MissingExtraError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    compared = "contents not compared, for want of hashes: add --contents"
    if asked.contents or (have_hashes(one) and have_hashes(other)):
        compared = "tensors have the same contents" + ("" if asked.contents else ", by their hashes")
    if asked.no_verify_checkpoint and not asked.contents:
        compared += ", which were not compared with the files"
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


if __name__ == "__main__":
    sys.exit(main())
