"""Public names are those of `tests/public_names.json`, and each public module has its stability on a page."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter

import pytest

from core.base.errors import MissingExtraError
from tests.public_names import PINNED, REPOSITORY, names_of, public_modules

PINNED_NAMES: dict[str, list[str]] = json.loads(PINNED.read_text(encoding="utf-8"))
REMEDY = (
    "names that users import have changed; if that is meant, say so in CHANGELOG.md, keep old names as "
    "docs/releases.md has it, and run: python -m tests.public_names"
)


def _installed_name(module: str) -> str:
    return re.sub(r"^core\b", "shardstack", module)


@pytest.mark.parametrize("name", public_modules())
def test_public_names_change_only_on_purpose(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert names_of(module) == PINNED_NAMES[module.__name__], REMEDY


def test_a_module_does_not_stop_being_public() -> None:
    assert sorted(map(_installed_name, public_modules())) == sorted(PINNED_NAMES), REMEDY


def test_every_public_module_has_its_stability() -> None:
    """And no other: the table of docs/releases.md names a package, which stands for its modules, or a module."""
    page = (REPOSITORY / "docs" / "releases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (stable|provisional|internal) \| (.*) \|", page, re.MULTILINE)
    assert [kind for kind, _ in rows] == ["stable", "provisional", "internal"]
    listed = Counter(name for _, cell in rows[:2] for name in re.findall(r"`(shardstack[\w.]*)`", cell))
    assert set(listed.values()) == {1}

    def stands_for(module: str) -> str | None:
        above = [module.rsplit(".", parts)[0] if parts else module for parts in range(module.count("."))]
        return next((name for name in above if name in listed), None)

    found = {module: stands_for(module) for module in PINNED_NAMES}
    assert [module for module, name in found.items() if name is None] == []
    assert set(listed) == set(found.values())
