"""The versions of accelerate and transformers whose insides these adapters override."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from ...errors import ConfigError, MissingExtraError

SUPPORTED = {"accelerate": ((1, 15), (2,)), "transformers": ((5, 23), (6,))}
"""From the first version, which is tested, to the second, which is not supported."""


def check_version(package: str) -> None:
    """Raises unless the installed version of a package is a supported one.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: another version.
    """
    least, end = SUPPORTED[package]
    if find_spec(package) is None:
        raise MissingExtraError(package, "hf", "core.adapters.accelerate")
    found = version(package)
    parts = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if not least <= parts < end:
        wanted = f"{package}>={'.'.join(map(str, least))},<{'.'.join(map(str, end))}"
        raise ConfigError(
            f"core.adapters.accelerate overrides methods of {package}, and version {found} is installed; "
            f"pip install '{wanted}'"
        )
