"""Every test that the page of silent errors names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "silent-errors.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]


def _missing(text: str) -> list[str]:
    """Returns the tests named in a text as `path::name`, under `tests`, that are not there."""
    return [f"{path}::{name}" for path, name in _named(text) if name not in _functions(TESTS / path)]


def _named(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(\S+\.py)::(\w+)`", text)


def _functions(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_error_has_a_test_that_exists():
    assert len(ROWS) >= 20
    for row in ROWS:
        assert len(row.strip("| ").split(" | ")) == 3 and _named(row), row
    assert not _missing(PAGE.read_text())


@pytest.mark.parametrize("named", ["unit/test_silent_errors.py::test_no_such", "unit/no_such.py::test_x"])
def test_a_test_that_is_gone_is_named(named: str):
    assert _missing(f"caught by `{named}` and `unit/test_silent_errors.py::{_exists.__name__}`") == [named]


def _exists() -> None: ...
