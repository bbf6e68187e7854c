"""Which tests run: the cases of a table that run each time, and files that need more packages than torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest


def quick(cases: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """Returns the cases for `parametrize`, tuples as one value for each name, with those that are not quick marked."""
    return [
        case
        if is_quick(case)
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips where a package is missing, without importing it: only processes that run the tests take the time."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
