"""Names that Megatron-LM has in a module and this project does not: importing one says where the thing is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn


def absent_names(module: str, remedies: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__``: an ImportError with a remedy for the names given, else Python's usual error.

    Args:
        module: its ``__name__``.
        remedies: by Megatron-LM's name, what to use here.
    """

    def getattribute(name: str) -> NoReturn:
        if name in remedies:
            # Not an AttributeError: `from module import name` would replace that by its own message.
            raise ImportError(f"{module} has no {name}: {remedies[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    getattribute.remedies = remedies  # type: ignore[attr-defined]  # for the page that lists them
    return getattribute
