"""A rank's end of the socket to the launcher of its machine."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

from .messages import FromRank, encode

LAUNCHER_FD = "SHARDSTACK_LAUNCHER_FD"
"""Environment variable: the open file of the socket to the launcher."""

_sockets: dict[int, socket.socket] = {}
"""The socket to the launcher by the process that has it: a fork speaks for no rank. `launcher_socket` adds it."""


def launcher_socket() -> socket.socket | None:
    """Returns the socket to the launcher that has started this process, or None under another one, or none."""
    number, process = os.environ.get(LAUNCHER_FD, ""), os.getpid()
    if process not in _sockets and number.isascii() and number.isdigit() and len(number) < 8:
        with suppress(OSError):  # the variable is that of a process above this one, whose files are not open here
            connection = socket.socket(fileno=os.dup(int(number)))
            is_ours = connection.family == socket.AF_UNIX
            if is_ours and sys.platform.startswith("linux"):  # where a socket knows the process that made it
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                is_ours = struct.unpack("3i", peer)[0] == os.getppid()
            if is_ours:
                _sockets[process] = connection  # the number stays open for what this process may become (`exec`)
            else:
                connection.close()
    return _sockets.get(process)


def tell_launcher(message: FromRank) -> None:
    """Says something to the launcher, if there is one."""
    if (connection := launcher_socket()) is not None:
        with suppress(OSError):  # the launcher is gone, and this process ends with it
            connection.sendall(encode(message))
