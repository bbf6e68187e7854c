"""The versions of Lightning that the strategies are written for."""

from __future__ import annotations

from importlib import metadata

from ...errors import ConfigError, MissingExtraError

OLDEST, BELOW = (2, 6), (2, 7)
"""Their first two numbers; the second is not admitted. `setup.py` says the same."""


def check_version() -> None:
    """Raises unless a supported Lightning is installed.

    Raises:
        MissingExtraError: there is none.
        ConfigError: another version.
    """
    try:
        found = metadata.version("lightning")
    except metadata.PackageNotFoundError:
        raise MissingExtraError("lightning", "lightning", "core.adapters.lightning") from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers < BELOW:
        wanted = f"lightning>={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"
        raise ConfigError(f"lightning {found} is installed, and core.adapters.lightning takes {wanted}; install that")
