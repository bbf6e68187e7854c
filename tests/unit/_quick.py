"""Which cases of a table run each time; the others belong to the long set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
