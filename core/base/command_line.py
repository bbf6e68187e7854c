"""The parser of commands that need no extra to read their flags. Its errors are one line, as those of all commands."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from typing import NoReturn

from .text import nearest


class CommandParser(ArgumentParser):
    """Prints an error without the usage, on the first rank alone, and names the flag that is nearest to an unknown
    one."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2. A message without a semicolon does not say yet what to do."""
        word = message.removeprefix("unrecognized arguments: ").replace("=", " ").split()[0]
        hint = "" if ";" in message else f"; {nearest(word, self._option_string_actions)}"
        self.exit(2, f"error: {message}{hint}\n" if os.environ.get("RANK", "0") == "0" else None)
