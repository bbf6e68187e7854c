"""Ends a process with its launcher: ``python -I parent_death.py LAUNCHER_PID command ...`` becomes that command.

Linux sends the signal when the launcher dies for any reason; the request survives ``exec``. If the launcher died
before the request, the parent's process id has changed, and the process ends itself. This file imports nothing of the
package, so that the time in between is short.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent, of process id `parent`, dies. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
