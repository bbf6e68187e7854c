"""The site of `make docs`: it builds without a warning, and has a docstring for every public name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, TypeVar

import pytest

from core.base.errors import MissingExtraError
from tests.unit._program import LIMIT_S, REPOSITORY


def _public() -> tuple[str, ...]:
    """Returns the packages that docs/site.py makes pages of; read without mkdocs, which `make test-gpu` may not
    have."""
    source = (REPOSITORY / "docs" / "site.py").read_text()
    return tuple(re.findall(r'^    "(core\.[\w.]+)",$', source, re.MULTILINE))


def _module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except MissingExtraError as error:
        pytest.skip(str(error))


def _names(module: types.ModuleType) -> list[str]:
    own = [
        name
        for name, value in vars(module).items()
        if not isinstance(value, TypeVar) and getattr(value, "__module__", None) == module.__name__
    ]
    return [name for name in getattr(module, "__all__", own) if not name.startswith("_")]


def _is_documented(name: str, value: Any) -> bool:
    if inspect.isclass(value) or inspect.isroutine(value):  # the text that a dataclass gives itself is no docstring
        return bool(value.__doc__) and not value.__doc__.startswith(f"{value.__name__}(")
    if isinstance(value, types.ModuleType):
        return bool(value.__doc__)
    origins = [m for m in list(sys.modules.values()) if m.__name__.startswith("core.") and name in vars(m)]
    return any(name in _documented_constants(inspect.getsource(module)) for module in origins)


def _documented_constants(source: str) -> set[str]:
    """Returns the names that a module assigns, with a docstring right below."""
    found = set()
    for statement, below in itertools.pairwise(ast.parse(source).body):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if (
            isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_a_constants_docstring_is_the_one_right_below_it() -> None:
    assert _documented_constants('A = 1\nB: int = 2\n"""Of B."""\nC = 3\n') == {"B"}


@pytest.mark.parametrize("package", _public())
def test_every_public_name_has_a_docstring(package: str) -> None:
    module = _module(package)
    names = _names(module)
    assert names and module.__doc__
    assert [name for name in names if not _is_documented(name, getattr(module, name))] == []


def test_every_package_with_public_names_has_a_page() -> None:
    """But for those that only the library itself imports."""
    internal = {"core.distributed.guards", "core.distributed.plan", "core.distributed.report"}
    internal |= {"core.models.common.embeddings"}
    internal |= {"core.training.config"}
    packages = {
        ".".join(path.parent.relative_to(REPOSITORY).parts)
        for path in (REPOSITORY / "core").rglob("__init__.py")
        if "__all__" in path.read_text()
    }
    assert packages - internal - set(_public()) == set()


def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package)
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    pages = {path.parent.name for path in (tmp_path / "site").rglob("index.html")}
    assert pages >= {page.stem for page in (REPOSITORY / "docs").glob("*.md")} - {"README"}
    shown = (tmp_path / "site" / "packages" / "core.distributed" / "index.html").read_text()
    assert 'id="core.distributed.wrap_model"' in shown
