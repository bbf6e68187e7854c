"""Plants a fault: finds a function by its name, and what to change by a pattern in its normalised source."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from pathlib import Path

from tests.mutation.mutation import Mutation

REPOSITORY = Path(__file__).parents[2]

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def file_of(mutation: Mutation, root: Path = REPOSITORY) -> Path:
    """Returns the file of the module that a fault's function is in."""
    return _find(mutation.function, root)[0]


def source_of(function: str, root: Path = REPOSITORY) -> str:
    """Returns a function's source as `ast.unparse` writes it: one layout, without comments and docstrings.

    Raises:
        ValueError: there is no such function.
    """
    return _normalised(_find(function, root)[1])


def mutated(mutation: Mutation, root: Path = REPOSITORY) -> str:
    """Returns the text of a fault's file with the fault in it; only the function changes.

    Raises:
        ValueError: there is no such function, the pattern does not match exactly once in it, or nothing changes.
        SyntaxError: what the replacement makes of it is no Python.
    """
    file, node = _find(mutation.function, root)
    sound = _normalised(node)
    source, count = re.subn(mutation.pattern, mutation.replacement, sound, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(
            f"{mutation.name}: {mutation.pattern!r} matches {count} times in {mutation.function}; change the pattern "
            f"under tests/mutation/faults to match once in\n{sound}"
        )
    if ast.unparse(ast.parse(source)) == sound:
        raise ValueError(f"{mutation.name}: the replacement {mutation.replacement!r} changes nothing; give another")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines[first - 1 : node.end_lineno] = [textwrap.indent(source, " " * node.col_offset) + "\n"]
    return "".join(lines)


def _find(function: str, root: Path) -> tuple[Path, _Function]:
    parts = function.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = root.joinpath(*parts[:count])
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                return file, _definition(function, file, parts[count:])
    raise ValueError(f"{function} is in no module of this checkout; name where the function is now")


def _definition(function: str, file: Path, names: list[str]) -> _Function:
    node: ast.AST = _parsed(file.read_text(encoding="utf-8"))
    for name in names:
        found = [child for child in getattr(node, "body", ()) if getattr(child, "name", None) == name]
        if len(found) != 1:
            raise ValueError(
                f"{function}: {name!r} is defined {len(found)} times in {file.name}; name a function there"
            )
        node = found[0]
    if not isinstance(node, _Function):
        raise ValueError(f"{function} is not a function; name one")
    return node


@functools.cache
def _parsed(text: str) -> ast.Module:
    """Parses a file; several faults are in one."""
    return ast.parse(text)


def _normalised(function: _Function) -> str:
    copy = ast.parse(ast.unparse(function))
    for node in ast.walk(copy):
        if isinstance(node, _Function) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(copy)
