"""Says what a checkpoint holds, without loading it; of two, in what they differ.

    python -m core.dist_checkpointing.inspect runs/a                        # its latest checkpoint
    python -m core.dist_checkpointing.inspect runs/a runs/b --contents     # and how far apart the tensors are

Exit status: 0; 1 where two checkpoints differ; 2 where one cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError, MissingExtraError
from .description import check_comparable, describe, differences, have_hashes, open_checkpoint, shown


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="core.dist_checkpointing.inspect", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint, the folder of a run, or a model of Hugging Face's"
    )
    parser.add_argument("other", type=Path, nargs="?", help="another, to compare with")
    parser.add_argument("--expand", action="store_true", help="every layer for itself, also where they are alike")
    parser.add_argument("--contents", action="store_true", help="read the tensors too, and say how far apart they are")
    asked = parser.parse_args(arguments)
    if asked.other is None and asked.contents:
        parser.error("--contents compares two checkpoints, and one is given")
    if asked.other is not None and asked.expand:
        parser.error("--expand is about the description of one checkpoint, and two are given")
    try:
        one = open_checkpoint(asked.checkpoint)
        if asked.other is None:
            sys.stdout.write(describe(one, expand=asked.expand))
            return 0
        other = open_checkpoint(asked.other)
        check_comparable(one, other)
        found = differences(one, other, contents=asked.contents)
    except (CheckpointError, MissingExtraError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    compared = "contents not compared, for want of hashes: add --contents"
    if asked.contents or (have_hashes(one) and have_hashes(other)):
        compared = "tensors have the same contents" + ("" if asked.contents else ", by their hashes")
    same = f"{one.folder} and {other.folder} are described the same; {compared}"
    sys.stdout.write("\n".join(shown(found) or [same]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
