"""The command ``shardstack``: one name for the programs of this package.

`commands.json` lists them. Help is printed from `help.json`, which `make help` writes from the programs' own parsers,
so that it needs no torch: a program is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, ShardstackError
from ..base.text import nearest

USER_ERROR_STATUS = 2

_PACKAGE = __name__.partition(".")[0]
_HELP = {"-h", "--help"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default this process's. Returns the exit status."""
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    commands = _table("commands.json")
    if name in _HELP:
        _print_help("")
    elif name == "--version":
        sys.stdout.write(f"shardstack {import_module(_PACKAGE).__version__}\n")
    elif name not in commands:
        return _refuse(f"{name!r} is none of the commands {', '.join(commands)}; {nearest(name, commands)}")
    elif _HELP & {*(words[:1] if name == "launch" else words)}:  # a program that is launched has its own help
        if os.environ.get("RANK", "0") == "0":
            _print_help(name)
    else:
        try:
            return _run(name, words, **commands[name])
        except ShardstackError as error:
            return _refuse(str(error))
    return 0


def program(name: str) -> Path:
    """Returns the path of an example program: in the installed package, or next to it in a checkout.

    Raises:
        ConfigError: it is in neither.
    """
    package = Path(__file__).parents[1]
    for folder in (package, package.parent):
        if (file := folder / "examples" / "gpt" / name).is_file():
            return file
    raise ConfigError(f"examples/gpt/{name} is neither in {package} nor next to it; install shardstack again")


def _run(name: str, words: Sequence[str], *, module: str = "", script: str = "", **_: str) -> int:
    if module:
        return int(import_module(f"{_PACKAGE}.{module}").main(words, f"shardstack {name}"))
    file = program(script)
    if name == "train":
        from ..rendezvous.launchers import set_launcher_variables
        from ..training.launch.__main__ import main as launch

        set_launcher_variables()
        if "RANK" not in os.environ:
            return launch(words, "shardstack train", str(file))
    sys.argv, sys.path[0] = [str(file), *words], str(file.parent)
    runpy.run_path(str(file), run_name="__main__")
    return 0


def _print_help(name: str) -> None:
    page = _table("help.json")[name]
    parser = argparse.ArgumentParser(
        usage=f"shardstack {name} {page['usage']}".replace("  ", " "), description=page["about"], add_help=False
    )
    for title, flags in page["groups"].items():
        group = parser.add_argument_group(title)
        for flag in flags:
            text = f"{flag['help']} [{flag['default']}]".removesuffix(" []")
            kind = {"metavar": flag["type"]} if flag["type"] else {"action": "store_true"}
            group.add_argument(*flag["names"], help=text.replace("%", "%%"), **kind)
    parser.print_help()


def _table(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text("utf-8"))


def _refuse(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return USER_ERROR_STATUS
