"""Files that a run can do without for a while: logs, pages, plots. A full disk makes them wait, not the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class OptionalFiles:
    """Writes files, and tries again later those that could not be written.

    Args:
        say: is given a line when writing pauses, one when all that waited is written, and no others.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: dict[Path, Callable[[], None]] = {}
        """What could not be written, by file, with what writes it; emptied by `retry`."""

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
        """Tries again what waits."""
        for path, write in list(self._waiting.items()):
            self.write(path, write)

    @property
    def waiting(self) -> list[Path]:
        """The files that are not written."""
        return list(self._waiting)
