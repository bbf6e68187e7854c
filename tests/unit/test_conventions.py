"""How tests are named and where they are, and how docstrings begin."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import core

CORE = Path(core.__file__).parent
TESTS = Path(__file__).parents[1]
LONGEST_NAME = 60
TESTED_WITH_OTHERS = {"pipeline_parallel"}
"""By `test_megatron_names.py`."""
NOT_OF_CORE = {
    "examples": "tests the parts of `examples/gpt`",
    "distributed/outside_the_loop": "has the scenarios of `distributed/test_outside_the_loop.py`, and no tests",
}
"""Folders of `tests/unit` that mirror no folder of `core`, and what each is for."""


def test_names_of_tests_are_short():
    texts = (file.read_text(encoding="utf-8") for file in TESTS.rglob("test_*.py"))
    names = {name for text in texts for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE)}
    assert len(names) > 1000, "the tests were not found"
    assert {name for name in names if len(name) > LONGEST_NAME} == set()


def test_every_package_has_a_folder_or_a_file_of_tests():
    packages = {file.parent.relative_to(CORE) for file in CORE.rglob("__init__.py")} - {Path()}
    unit = TESTS / "unit"
    untested = {
        package.as_posix()
        for package in packages
        if not (unit / package).is_dir() and not (unit / package.parent / f"test_{package.name}.py").is_file()
    }
    assert len(packages) > 30, "the packages were not found"
    assert untested == TESTED_WITH_OTHERS


def test_every_folder_of_tests_is_a_folder_of_core():
    unit = TESTS / "unit"
    folders = {file.parent.relative_to(unit).as_posix() for file in unit.rglob("*.py")} - {"."}
    assert len(folders) > 20, "the folders were not found"
    assert {folder for folder in folders if not (CORE / folder / "__init__.py").is_file()} == NOT_OF_CORE.keys()


def _first_paragraphs(file: Path) -> Iterator[str]:
    """Yields the first paragraph of each docstring in a file, of attributes too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for entry in body if isinstance(body, list) else ():
            if isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant):
                yield str(entry.value.value).split("\n\n")[0]


def test_docstrings_begin_with_whole_sentences():
    paragraphs = [
        (file.relative_to(CORE).as_posix(), text) for file in CORE.rglob("*.py") for text in _first_paragraphs(file)
    ]
    assert len(paragraphs) > 1500, "the docstrings were not found"
    assert [(name, text) for name, text in paragraphs if ";" in text] == []
