"""Shortens the traceback of a rank's crash: one rank's is printed, without the frames of this library.

Run as a script, runs a rank's program: ``python tracebacks.py script.py ...`` or ``tracebacks.py -m module ...``.
This file imports nothing of the package, whose name a program's folder may have, and which may be what fails.
"""

from __future__ import annotations

import fcntl
import io
import os
import pkgutil
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

FILE = "SHARDSTACK_TRACEBACKS"
"""Variable: the file to which the ranks of a machine add their whole tracebacks. The launcher names it."""
FULL = "SHARDSTACK_FULL_TRACEBACK"
"""Variable: 1 prints every frame."""

_MOST_CHARACTERS = 300
_STARTS = {__file__, runpy.__file__, "<frozen runpy>"}  # files of the frames that start a program


class _Folded(traceback.StackSummary):
    """Frames, of which those of `core` are one line, with those of torch and Python next to them."""

    file = ""  # the whole traceback; `shorten` sets it before the frames are formatted

    def format(self, **options: Any) -> list[str]:  # Python 3.13 colors it
        return [line for folds, run in self.runs() for line in self._lines(folds, run, options)]

    def runs(self) -> Iterator[tuple[bool, list[traceback.FrameSummary]]]:
        """Yields frames next to each other, and whether they are folded."""
        for is_below, frames in groupby(self, lambda frame: bool(_room(frame.filename))):
            run = [*frames]
            yield is_below and any(_room(frame.filename) == "shardstack" for frame in run), run

    def _lines(self, folds: bool, run: list[traceback.FrameSummary], options: Any) -> list[str]:
        if not folds:
            return traceback.StackSummary.from_list(run).format(**options)
        rooms = " and ".join(dict.fromkeys(_room(frame.filename) for frame in run))
        return [f"  ... {len(run)} frame{'s' * (len(run) > 1)} in {rooms}: see {self.file}\n"]


@cache
def _room(file: str) -> str:
    """Returns whose code a file is: that of core, torch or Python, or empty for the user's."""
    path = Path(file).resolve()
    for room, module in (("shardstack", "shardstack.base.errors"), ("torch", "torch.version")):
        known = getattr(sys.modules.get(module), "__file__", None)  # a program's own `core` has no such module
        if known and Path(known).resolve().parents[module.count(".") - 1] in path.parents:
            return room
    is_python = file.startswith("<frozen") or (Path(os.__file__).parent in path.parents and "-packages" not in file)
    return "Python" if is_python else ""


def shorten(error: BaseException) -> tuple[str, str]:
    """Returns an error's traceback without frames of `core`, and what other ranks of the machine have written before.

    Writes the whole traceback into the launcher's file; under another launcher into one of its own, if any frame is
    left out. What cannot be written is not shortened.
    """
    whole = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    summary = traceback.TracebackException.from_exception(error)
    stacks, pending, name = list[_Folded](), [summary], os.environ.get(FILE, "")
    while pending:
        each = pending.pop()
        each.stack = _Folded(each.stack)
        stacks.append(each.stack)
        pending += filter(None, [each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ())])
    is_shorter = os.environ.get(FULL) != "1" and any(folds for stack in stacks for folds, _ in stack.runs())
    try:
        if not name and is_shorter:
            name = tempfile.mkstemp(".txt", "shardstack-")[1]
        number = os.open(name or os.devnull, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(number, "a+", encoding="utf-8", errors="backslashreplace") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            before = file.read()
            file.write(f"{where()}:\n{whole}\n")
    except OSError:
        return whole, ""
    for stack in stacks:
        stack.file = name
    return "".join(summary.format()) if is_shorter else whole, before


def where() -> str:
    """Returns this process's rank and the number of ranks, as text."""
    return f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}"


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints the traceback of a machine's first rank to fail, and of a later one a line. Is `sys.excepthook`."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _STARTS:
        trace = trace.tb_next
    text, before = shorten(error.with_traceback(trace))
    last = "".join(traceback.format_exception_only(kind, error)).strip()
    if before:
        most = None if kind.__module__ == "shardstack.base.errors" else _MOST_CHARACTERS  # ours end with the remedy
        short = " ".join(last.split())[:most]
        text = "the same error" if last in before else f"{short} (after another rank's; see {os.environ[FILE]})"
    sys.stderr.write(f"{where()}: {text}\n" if before else f"{where()}:\n{text}")  # at once: lines do not mix
    sys.stderr.flush()


def _run(arguments: list[str]) -> None:
    """Runs what Python would run for these arguments, a script, folder or zip, ``-m module`` or ``-c text``."""
    kind, is_file = arguments[0], arguments[0] not in ("-c", "-m")
    sys.excepthook, sys.argv = _report, arguments if is_file else [kind, *arguments[2:]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(kind).resolve().parent if is_file else Path.cwd())
    try:
        if kind == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif is_file and pkgutil.get_importer(kind) is not None:  # a folder or zip with a __main__.py
            sys.path.pop(0)  # run_path puts the folder there
            runpy.run_path(kind, run_name="__main__")
        else:
            with io.open_code(kind) if is_file else io.BytesIO(arguments[1].encode()) as file:
                text = file.read()
            main = sys.modules["__main__"] = ModuleType("__main__")
            main.__dict__.update({"__builtins__": __builtins__, **({"__file__": kind} if is_file else {})})
            exec(compile(text, kind if is_file else "<string>", "exec", dont_inherit=True), main.__dict__)
    except (ImportError, OSError) as error:
        if {frame.filename for frame in traceback.extract_tb(error.__traceback__)} - _STARTS:
            raise  # the program's own
        if os.environ.get("LOCAL_RANK", "0") == "0":
            name = arguments[kind == "-m"]
            sys.stderr.write(f"error: {name} cannot be run: {error.args[-1]}; give a script, or -m and a module\n")
        sys.exit(2)


if __name__ == "__main__":
    _run(sys.argv[1:])
