"""Imports modules in a process that has torch, numpy and what these need, and nothing else that is installed.

    python -I -W error _import_alone.py (together | alone) FOLDER[:FOLDER...] MODULE...

Prints a JSON line ``[module, traceback or ""]`` for each. ``together`` imports one after the other. ``alone`` imports
each in a fork of its own, so that what one module imported cannot help the next; Python imports the packages above it
first, and so do the forks. What these have imported already needs no fork. The folders are searched before the
installed packages.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
import warnings
from importlib import metadata
from typing import Any


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _hidden_packages() -> set[str]:
    """Returns the top-level packages of every installed distribution that torch and numpy do not require."""
    allowed = {"shardstack"}
    waiting = ["torch", "numpy", "triton"]  # a torch that is built for a GPU comes with triton, and warns without it
    while waiting:
        name = _canonical(waiting.pop())
        if name in allowed:
            continue
        allowed.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # a requirement of another platform
            continue
        names = [re.match(r"[\w.-]+", line) for line in requirements if "extra ==" not in line]
        waiting += [match[0] for match in names if match]
    return {
        package
        for package, distributions in metadata.packages_distributions().items()
        if not allowed & {_canonical(distribution) for distribution in distributions}
    }


class _Hiding:
    """A finder that finds nothing of what is hidden: packages are probed for as well as imported."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self._hidden else self._finder.find_spec(name, path, target)


def _problem_of(module: str) -> str:
    try:
        importlib.import_module(module)
    except BaseException:
        return traceback.format_exc()
    return ""


def _import_in_forks(module: str, below: dict[str, list[str]]) -> None:
    """Prints the lines of a module and of those below it; these are forked where the package has been imported."""
    if module in sys.modules:
        print(json.dumps([module, ""]), flush=True)
        for other in below.get(module, ()):
            _import_in_forks(other, below)
        return
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of a fork with threads
        child = os.fork()
    if child == 0:
        os.write(theirs, _problem_of(module)[-4000:].encode())  # less than a pipe holds
        os.close(theirs)
        for other in below.get(module, ()):
            _import_in_forks(other, below)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        problem = pipe.read()
    status = os.waitpid(child, 0)[1]
    print(json.dumps([module, problem or (f"ended with status {status}" if status else "")]), flush=True)


def main(way: str, folders: str, modules: list[str]) -> None:
    hidden = _hidden_packages()
    sys.meta_path[:] = [_Hiding(finder, hidden) for finder in sys.meta_path]
    sys.path[:0] = folders.split(os.pathsep)
    if way == "together":
        for module in modules:
            print(json.dumps([module, _problem_of(module)]))
        return
    for shared in ("numpy", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(shared)  # what most modules need of torch, once for all
    below: dict[str, list[str]] = {}
    for module in modules:
        below.setdefault(module.rpartition(".")[0], []).append(module)
    for module in below[""]:
        _import_in_forks(module, below)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
