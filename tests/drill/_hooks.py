"""What the drill puts into a launcher and its ranks, which are forked from it: faults of their own, at a signal."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from contextlib import suppress
from typing import Any

from core.training.launch import supervisor
from core.training.launch.lines import Connection
from core.training.launch.link import launcher_socket

HANG, LEAVE, BABBLE = signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN + 1
"""A rank hangs, ends with status 0, or sends its launcher a line that is no message. A launcher does the last to the
first one."""
START_LIMIT_S = 15.0
"""In the place of two minutes for a generation's first step: ranks are forked, and nothing compiles."""
_SAID: tuple[Any, ...] = (
    *(None, 1, [], {}, "End", {"kind": "Done"}, {"kind": "Done", "generation": 1e99}, {"kind": "Over"}, [[[[[[]]]]]]),
    {"kind": "Ended", "worker": 2**31 - 1, "code": 0},
    {"kind": "Ended", "worker": 0, "code": 10**40},
    {"kind": "Said", "worker": 10**6, "message": {"kind": "Done", "generation": 0}},
    {"kind": "Said", "worker": 0, "message": {"kind": "Step", "generation": 0, "step": 2.5, "seconds": 0.0}},
    {"kind": "Start", "worker": 0, "place": 0, "environment": {"LD_PRELOAD": "x"}},
    {"kind": "Step", "generation": -5, "step": 1, "seconds": 1.0},
    {"kind": "Step", "generation": 0, "step": 1, "seconds": float("nan")},
    {"kind": "Where", "generation": 0, "calls": {"x": [1]}},
    {"kind": "Began", "more": 1},
)


def garbage(draw: random.Random) -> bytes:
    """Returns a line that neither a launcher nor a rank says."""
    kind = draw.randrange(4)
    if kind == 0:
        return bytes(draw.choices(range(1, 256), k=draw.randrange(1, 300))) + b"\xff\n"
    if kind == 1:
        return b"[" * draw.choice((100, 100_000)) + b"\n"
    if kind == 2 and draw.random() < 0.5:
        return b"x" * (1 << 21)  # without an end
    return json.dumps(draw.choice(_SAID)).encode() + b"\n"


def prepare() -> None:
    """Runs in a launcher before its `main`."""
    supervisor._START_LIMIT_S = START_LIMIT_S  # type: ignore[attr-defined]
    launcher, expect = os.getpid(), Connection.expect
    first: list[socket.socket] = []

    def noted(lines: Connection, *arguments: Any, is_known: bool = False) -> None:
        if is_known:
            first[:] = [lines.connection]
        expect(lines, *arguments, is_known=is_known)

    def babble(*_: object) -> None:
        connection = (first or [None])[0] if os.getpid() == launcher else launcher_socket()
        if connection is not None:
            with suppress(OSError):
                connection.sendall(garbage(random.Random()))
        elif os.getpid() != launcher:
            os._exit(0)  # before its first message

    Connection.expect = noted  # type: ignore[method-assign]
    signal.signal(BABBLE, babble)
    signal.signal(HANG, lambda *_: None if os.getpid() == launcher else time.sleep(10_000))
    signal.signal(LEAVE, lambda *_: None if os.getpid() == launcher else os._exit(0))
