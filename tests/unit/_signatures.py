"""The table of signatures in the docs: how it is read, and how two signatures differ."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "megatron-signatures.md"


class Argument(NamedTuple):
    name: str
    default: str | None
    """Source of the default; None where one has to be given."""
    is_keyword_only: bool


class Row(NamedTuple):
    name: str
    theirs: str
    """Megatron-LM's arguments, as source."""
    difference: str
    reason: str


def rows() -> Iterator[Row]:
    """Yields every row of the page's tables of signatures."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 4 and cells[1].startswith("`"):
            yield Row(cells[0].strip("`"), cells[1].strip("`"), cells[2], cells[3])


def parse(source: str) -> list[Argument]:
    """Returns the arguments of ``name, other=1, *, third``, without `self`."""
    arguments = ast.parse(f"def f({source}): ...").body[0].args  # type: ignore[attr-defined]
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[Any] = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    found = [
        Argument(argument.arg, None if default is None else ast.unparse(default), False)
        for argument, default in zip(plain, defaults, strict=True)
    ]
    found += [
        Argument(argument.arg, None if default is None else ast.unparse(default), True)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    found += [Argument(f"*{extra.arg}", None, True) for extra in (arguments.vararg, arguments.kwarg) if extra]
    return [argument for argument in found if argument.name != "self"]


def ours(name: str) -> list[Argument]:
    """Returns the arguments that `core.<name>` takes now."""
    found = []
    for parameter in inspect.signature(resolve(name)).parameters.values():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        has_default = parameter.default is not parameter.empty
        is_keyword_only = is_variadic or parameter.kind is parameter.KEYWORD_ONLY
        label = f"*{parameter.name}" if is_variadic else parameter.name
        found.append(Argument(label, _source(parameter.default) if has_default else None, is_keyword_only))
    return [argument for argument in found if argument.name != "self"]


def _source(default: object) -> str:
    return f"{default.__module__}.{default.__qualname__}" if isinstance(default, type) else repr(default)


def resolve(name: str) -> Callable[..., Any]:
    """Returns the object at a dotted path below `core`, through modules and then attributes."""
    found: Any = importlib.import_module("core")
    path = "core"
    for part in name.split("."):
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:  # a module that nothing has imported yet
            found = importlib.import_module(path)
    return found  # type: ignore[no-any-return]


def difference(theirs: list[Argument], ours: list[Argument]) -> str:
    """Returns "same", or what differs: ``+only here``, ``-absent``, ``name=default here``, ``*by name alone``,
    ``order``."""
    by_name, by_their_name = {a.name: a for a in ours}, {a.name: a for a in theirs}
    parts = [f"-{a.name}" for a in theirs if a.name not in by_name]
    parts += [f"+{a.name}" for a in ours if a.name not in by_their_name]
    for argument in theirs:
        here = by_name.get(argument.name)
        if here is None:
            continue
        if _value(here.default) != _value(argument.default):
            parts.append(
                f"{argument.name}={here.default}" if here.default is not None else f"{argument.name} required"
            )
        if here.is_keyword_only and not argument.is_keyword_only:
            parts.append(f"*{argument.name}")
    both = [
        a.name for a in theirs if not a.is_keyword_only and a.name in by_name and not by_name[a.name].is_keyword_only
    ]
    if [a.name for a in ours if a.name in both] != both:
        parts.append("order")
    return ", ".join(f"`{part}`" for part in parts) or "same"


def _value(source: str | None) -> Any:
    if source is None:
        return None, "required"
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return source
