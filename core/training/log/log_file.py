"""Reads ``log.jsonl``, and cuts it where a resumed run goes on.

A line of ``log.jsonl`` has ``step``, and either the numbers of training since the line before (``loss`` is their mean,
in nats a token; ``memory_bytes`` the most that this rank has held) or ``validation_loss``. A resumed run goes on in
the same file, from which lines after its checkpoint are removed first: it has every step once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...bounds import BoundsError, parse_json
from ...errors import CheckpointError

LOG_FILE = "log.jsonl"
_NO_LOG = "{} is not the log of a run; move it away, or choose another --save"


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``log.jsonl``; a last one that a crash cut short is left out.

    Raises:
        CheckpointError: it is no text.
    """
    return [line for line, _ in _lines_and_ends(path)]


def _lines_and_ends(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The whole lines of a log, each with the byte at which it ends."""
    end = 0
    try:
        with path.open("rb") as file:
            for raw in file:
                end += len(raw)
                text = raw.decode("utf-8")
                try:
                    line = parse_json(text)
                except BoundsError:
                    return
                yield line, end
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(_NO_LOG.format(path)) from None


def drop_lines_after(path: Path, iteration: int) -> int:
    """Removes what a run that is resumed, or begun anew, will write again; returns the length of what is left.

    The file is cut, which takes no room: steps follow one another in it.
    """
    if not path.exists():
        return 0
    kept = 0
    try:
        for line, end in _lines_and_ends(path):
            if line["step"] > iteration:
                break
            kept = end
    except (KeyError, TypeError):
        raise CheckpointError(_NO_LOG.format(path)) from None
    os.truncate(path, kept)
    return kept
