"""Finds methods other than `forward` that need gathered parameters, as `generate` or `encode_image`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import nn

from ...errors import WrapError


def find_forward_methods(
    root: nn.Module, members: Iterable[nn.Module], names: Sequence[str]
) -> dict[nn.Module, list[str]]:
    """Returns which of the named methods the root and each module of the units have.

    Raises:
        WrapError: a name that neither the root nor a unit has as a method.
    """
    modules = list(dict.fromkeys([root, *members]))
    found: dict[nn.Module, list[str]] = defaultdict(list)
    for name in names:
        holders = [module for module in modules if callable(getattr(module, name, None))]
        if not holders:
            kinds = sorted({type(module).__name__.removeprefix("FSDP") for module in modules})
            raise WrapError(
                f"forward_methods names {name!r}, which is a method of neither the model nor its units "
                f"({', '.join(kinds)}); name methods of these, and classes that have it in sub_modules_to_wrap"
            )
        for module in holders:
            found[module].append(name)
    return found
