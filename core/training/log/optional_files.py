"""Writes files that a run does not depend on: logs, pages, plots. On a full disk they are retried, and training goes
on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class OptionalFiles:
    """Writes files, and retries those that could not be written.

    Args:
        say: called with one line when writing pauses, and one when all pending files are written.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: dict[Path, Callable[[], None]] = {}
        """Functions that write the pending files, by file. `write` adds on failure, `retry` removes on success."""

    def write(self, path: Path, write: Callable[[], None]) -> None:
        """Calls `write`, which may raise OSError and be called again; `path` is named in messages."""
        try:
            write()
        except OSError as error:
            if not self._waiting:
                self._say(
                    f"warning: {path} cannot be written ({error.strerror or error}): logs, pages and plots pause, and "
                    "training goes on"
                )
            self._waiting[path] = write
        else:
            if self._waiting.pop(path, None) is not None and not self._waiting:
                self._say("logs, pages and plots are written again")

    def retry(self) -> None:
        """Writes the pending files again."""
        for path, write in list(self._waiting.items()):
            self.write(path, write)

    @property
    def waiting(self) -> list[Path]:
        """The pending files."""
        return list(self._waiting)
