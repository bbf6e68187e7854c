"""Lists the names that users import, and writes them to `public_names.json`, which a test compares with the code.

python -m tests.public_names    # after a change, with its line in CHANGELOG.md
"""

from __future__ import annotations

import ast
import importlib
import json
import types
from pathlib import Path
from typing import TypeVar

REPOSITORY = Path(__file__).parents[1]
PINNED = Path(__file__).with_suffix(".json")


def public_modules() -> tuple[str, ...]:
    """Returns the packages and modules that docs/site.py makes pages of.

    They are read without mkdocs, which `make test-gpu` may not have.
    """
    statements = ast.parse((REPOSITORY / "docs" / "site.py").read_text(encoding="utf-8")).body
    (public,) = (
        node.value for node in statements if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PUBLIC"
    )
    return tuple(name for names in ast.literal_eval(public).values() for name in names)


def names_of(module: types.ModuleType) -> list[str]:
    """Returns the public names of a module: those of its `__all__`, or else the classes and functions that it has."""
    own = [
        name
        for name, value in vars(module).items()
        if not isinstance(value, TypeVar) and getattr(value, "__module__", None) == module.__name__
    ]
    return sorted(name for name in getattr(module, "__all__", own) if not name.startswith("_"))


def main() -> None:
    modules = map(importlib.import_module, public_modules())
    found = {module.__name__: names_of(module) for module in modules}
    PINNED.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
