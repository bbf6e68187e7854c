"""Sockets between launchers and ranks, on which messages come and go, and what a launcher waits for."""

from __future__ import annotations

import os
import select
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...base.checked_json import decode
from .messages import Beat, Message, MessageError, encode
from .processes import LocalProcess, is_ready

HELLO_S = 5.0
"""How long launchers wait for each other's first messages."""
SILENCE_S = 9.0
"""A machine whose launcher does not answer for so long is lost."""
_BEAT_S, _SEND_S = 2.0, 5.0
"""How often a launcher says that it is alive, and how long it waits for a socket that takes no more."""
_MOST_BYTES, _READ_BYTES = 1 << 20, 1 << 16
"""Most bytes of a line, and of what a stranger says before it is known."""


class Connection:
    """One end of a socket on which messages come and go. Its callback takes them when `read` is called.

    Args:
        expected: the types that may come, as a union; `expect` changes them.
        take: raises MessageError for a message that does not fit what was said before.
        limit_s: seconds in which the other end has to become known. None: it is from the start.
    """

    def __init__(
        self, connection: socket.socket, expected: Any, take: Callable[[Any], None], limit_s: float | None = None
    ) -> None:
        connection.settimeout(_SEND_S)
        self.connection = connection
        self._expected, self._take = expected, take
        # Bytes of a line that is not complete yet, and the number of those that were.
        self._partial, self._num_lines = b"", 0
        # When this end gives up a stranger; None once it is known, and for a rank.
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        # When the other end was heard, and this one has sent a beat; used once that is known.
        self._heard_at = self._beat_at = time.monotonic()
        self._beats = False
        self.is_over = False
        """Whether either end has ended the connection. Never cleared."""
        self.why = ""
        """Why this end has. Empty if the other one did."""

    @property
    def is_stranger(self) -> bool:
        """Whether it is not known yet who is at the other end."""
        return self._deadline is not None and not self.is_over

    def expect(self, expected: Any, take: Callable[[Any], None], *, is_known: bool = False) -> None:
        """Takes other messages from now on.

        Args:
            is_known: the other end is a launcher of the job, which says that it is alive from now on, as this one.
        """
        self._expected, self._take = expected, take
        if is_known:
            self._deadline, self._beats, self._heard_at = None, True, time.monotonic()

    def send(self, message: Message) -> None:
        try:
            self.connection.sendall(encode(message))
        except TimeoutError:  # a part of a line may have gone
            self.end(f"it took nothing more for {_SEND_S:g} s")
        except OSError:
            pass  # the other end has ended it, and what it said before is still to be read

    def end(self, why: str = "") -> None:
        """Ends the connection, for a reason that `why` has from now on."""
        self.why, self.is_over = self.why or why, True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def look_at_time(self) -> None:
        """Sends a beat if it is time, and ends a connection on which too little was said."""
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            self.end(f"it said nothing of use in {HELLO_S:g} s")
        if self._beats and now - self._heard_at > SILENCE_S:
            self.end(f"its launcher did not answer for {SILENCE_S:g} s")
        elif self._beats and now - self._beat_at > _BEAT_S:
            self._beat_at = now
            self.send(Beat())

    def read(self, seconds: float = 0.0) -> bool:
        """Takes messages that have come, after waiting for `seconds` at most. Returns whether anything has come."""
        if self.is_over or not is_ready(self.connection.fileno(), select.POLLIN, seconds):
            return False
        try:
            data = self.connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        self._heard_at = time.monotonic()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._num_lines += 1
            try:
                message = decode(line, self._expected)
                if not isinstance(message, Beat):
                    self._take(message)
            except MessageError as error:
                self.end(f"its line {self._num_lines} {error}")
            if self.is_over:
                return True
        if len(self._partial) > (_MOST_BYTES if self._deadline is None else _READ_BYTES):
            self.end(f"its line {self._num_lines + 1} has no end")
        if not data:
            self.end()
        return True


class Events(selectors.DefaultSelector):
    """Waits for lines of sockets, for those who connect, and for ends of processes."""

    def add(self, lines: Connection) -> None:
        self.register(lines.connection, selectors.EVENT_READ, lines)

    def add_listener(self, listener: socket.socket, accept: Callable[[], None]) -> None:
        self.register(listener, selectors.EVENT_READ, accept)

    def add_end(self, process: LocalProcess) -> None:
        with suppress(OSError, AttributeError):  # of Linux alone
            self.register(os.pidfd_open(process.pid), selectors.EVENT_READ)

    def wait(self, seconds: float) -> None:
        """Reads what comes in `seconds`, and returns once anything has. Call it every two seconds at least."""
        for key, _ in self.select(seconds):
            if key.data is None:  # a process has ended
                self.unregister(key.fileobj)
                os.close(key.fd)
            elif isinstance(key.data, Connection):
                key.data.read()
            else:
                key.data()
        for key in list(self.get_map().values()):
            if isinstance(key.data, Connection):
                key.data.look_at_time()
                if key.data.is_over:
                    self.unregister(key.fileobj)
                    key.data.connection.close()
