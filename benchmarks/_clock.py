"""Says how long a benchmark has run. Import it before torch, which takes seconds to import."""

from __future__ import annotations

import time

_STARTED = time.monotonic()


def stamp() -> str:
    """Returns the seconds since the import of this module, as `[41 s]`."""
    return f"[{time.monotonic() - _STARTED:.0f} s]"
