"""Exit statuses of a program of several ranks, which the launcher reads without importing what a rank needs."""

from __future__ import annotations

CRASH_STATUS = 1
USER_ERROR_STATUS = 2
RUN_ERROR_STATUS = 3
INTERRUPTED_STATUS = 130
