"""What the drill does to a run that keeps its survivors, one generator a kind.

Each causes something, and yields what the launcher has to say of it: the machine that says it and a pattern; None if
it says nothing. It goes on once that was said, and again once the run has made two more steps.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests.drill._hooks import BABBLE, HANG, LEAVE, garbage
from tests.drill.kept_run import Run
from tests.drill.launched import children, send

MEMORY = Path("/dev/shm")
_FILLER = MEMORY / "drill-filler"
_NODE_LOST = r"node 1 was lost with its ranks"
_KILLED = rf"was ended by SIGKILL|{_NODE_LOST}"

Event = Iterator[tuple[int, str] | None]


def kill(run: Run, draw: random.Random) -> Event:
    """Kills one or two ranks, or spares, and sometimes one more in the recovery."""
    victims = _victims(run, draw, 2 if draw.random() < 0.2 else 1)
    name = _named(run, victims, _KILLED)
    send(victims, signal.SIGKILL)
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0.05, 0.5))
        left = [pid for pid in run.processes() if pid not in victims]
        if len(left) > 1:
            send(draw.sample(left, 1), signal.SIGKILL)
    yield name


def stop(run: Run, draw: random.Random) -> Event:
    yield from _still(run, draw, signal.SIGSTOP)


def hang(run: Run, draw: random.Random) -> Event:
    yield from _still(run, draw, HANG)


def _still(run: Run, draw: random.Random, number: int) -> Event:
    victims = _victims(run, draw, 1, spares=False)
    send(victims, number)
    yield _named(run, victims, rf"did not answer for|held up the others for|made no step|SIGUSR1|{_NODE_LOST}")
    if not run.wait(lambda: not set(victims) & set(run.processes()), 30.0) and not run.has_ended:
        raise SystemExit(f"{run.folder}: {victims} were named, and are still there:\n{run.said()}")
    send(victims, signal.SIGCONT)  # it must not come back


def exit0(run: Run, draw: random.Random) -> Event:
    """A rank ends with status 0 at some moment."""
    victims = _victims(run, draw, 1, spares=False)
    send(victims, LEAVE)
    yield _named(run, victims, r"ended with status 0 before its program had|SIGUSR2")


def babble(run: Run, draw: random.Random) -> Event:
    """A rank says to its launcher what no rank does."""
    victims = _victims(run, draw, 1, spares=False)
    send(victims, BABBLE)
    yield _named(run, victims, rf"says what no rank does|ended with status 0|{_KILLED}")


def damage(run: Run, draw: random.Random) -> Event:
    """Damages files of copies while no rank runs, and kills one."""
    victims, before = _victims(run, draw, 1), run.processes()
    send(before, signal.SIGSTOP)
    files = [path for path in MEMORY.glob("shardstack-copies-*/generation_*/**/*") if path.is_file()]
    for path in draw.sample(files, min(len(files), draw.choice((1, 1, 1, 2, 5, 12)))):
        with suppress(FileNotFoundError):
            _damage(path, draw)
    name = _named(run, victims, rf"was ended by SIG|{_NODE_LOST}")
    send(victims, signal.SIGKILL)
    send(before, signal.SIGCONT)
    yield name


def _damage(path: Path, draw: random.Random) -> None:
    size = path.stat().st_size
    how = draw.choice(("flip", "flip", "flip", "truncate", "delete", "zero", "append", "folder"))
    print(f"  {how}: {path}, {size} bytes", file=sys.stderr, flush=True)
    if how == "delete":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "append":
        with path.open("ab") as file:
            file.write(b"\x00" * draw.randrange(1, 100))
    elif how == "truncate":
        os.truncate(path, draw.randrange(size) if size else 0)
    elif size:
        with path.open("r+b") as file:
            at = draw.randrange(size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ (1 << draw.randrange(8))]) if how == "flip" else b"\0" * min(64, size - at))


def full(run: Run, draw: random.Random) -> Event:
    """Fills the memory up for a while, and kills a rank in it."""
    _fill(draw.choice((0, 0, 4096, draw.randrange(1 << 21))))
    try:
        time.sleep(draw.uniform(0.0, 0.5))
        victims = _victims(run, draw, 1)
        name = _named(run, victims, _KILLED)
        send(victims, signal.SIGKILL)
        yield name
        if draw.random() < 0.5:
            yield None
    finally:
        _FILLER.unlink(missing_ok=True)


def _fill(leave: int) -> None:
    with _FILLER.open("wb") as file:
        size = 0
        while True:
            state = os.statvfs(MEMORY)
            free = state.f_bavail * state.f_frsize
            if free <= leave:
                return
            with suppress(OSError):  # ranks take some of it
                os.posix_fallocate(file.fileno(), size, free - leave)
                size += free - leave


def output(run: Run, draw: random.Random) -> Event:
    """Goes away with the pipes that all write to, or does not read them for a while, and kills a rank."""
    pauses = draw.random() < 0.3
    for of_node in run.outputs:
        of_node.fill() if pauses else of_node.close()
    time.sleep(draw.uniform(0.0, 0.5))
    send(_victims(run, draw, 1), signal.SIGKILL)
    if pauses:  # ranks wait until they can write
        time.sleep(draw.uniform(0.0, 4.0))
        for of_node in run.outputs:
            of_node.open()
    yield None
    for of_node in run.outputs:
        of_node.open()


def freeze(run: Run, draw: random.Random) -> Event:
    """Stops the second machine, with its ranks or its launcher alone, until it was named; then it comes back, or is
    started again."""
    launcher = run.launchers[1].pid
    frozen = [launcher, *(children(launcher) if draw.random() < 0.75 else [])]
    send(frozen, signal.SIGSTOP)
    yield 0, _NODE_LOST
    if draw.random() < 0.7:
        time.sleep(draw.uniform(0.0, 2.0))
        draw.shuffle(frozen)
        send(frozen, signal.SIGCONT)
    else:
        send([launcher], signal.SIGKILL)
        _start_again(run, 1)


def pause(run: Run, draw: random.Random) -> Event:
    """Stops the second machine for less than any limit."""
    frozen = [run.launchers[1].pid, *children(run.launchers[1].pid)]
    send(frozen, signal.SIGSTOP)
    time.sleep(draw.uniform(0.1, 3.0))
    send(frozen, signal.SIGCONT)
    yield None


def machine(run: Run, draw: random.Random) -> Event:
    """Kills a launcher, which ends its ranks, and starts it again."""
    node = 0 if draw.random() < 0.4 else 1
    send([run.launchers[node].pid], signal.SIGKILL)
    time.sleep(draw.choice((0.0, draw.uniform(0.0, 2.0))))
    if node == 0:
        _start_again(run, 0)
        yield 1, r"the launcher of node 0 at .* was lost"
    else:
        yield 0, _NODE_LOST
        if run.policy == "replace" or draw.random() < 0.5:
            _start_again(run, 1)


def babbling_machine(run: Run, draw: random.Random) -> Event:
    """The second launcher says to the first one what no launcher does."""
    send([run.launchers[1].pid], BABBLE)
    yield 0, _NODE_LOST + r" \(its line \d+ "


def strangers(run: Run, draw: random.Random) -> Event:
    """Connects to the first launcher's port, says nothing of use, and stays; sometimes kills a rank then."""
    until = time.monotonic() + draw.uniform(1.0, 12.0)
    for _ in range(draw.choice((1, 5, 64, 80))):
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", run.port), timeout=5.0)
            run.strangers.append((until, connection))
            connection.sendall(_of_a_stranger(draw))
            if draw.random() < 0.1:  # a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if draw.random() < 0.5:
        victims = _victims(run, draw, 1)
        name = _named(run, victims, _KILLED)
        send(victims, signal.SIGKILL)
        yield name
    else:
        said = len(run.outputs[0].text)
        yield None
        yield None
        if losses := [line for line in run.outputs[0].text[said:].splitlines() if _is_loss(line)]:
            raise SystemExit(f"{run.folder}: strangers have lost ranks: {losses}\n{run.said()}")


def _of_a_stranger(draw: random.Random) -> bytes:
    hello = {
        "kind": "Hello",
        "node": 1,
        "machine": "c",
        "launcher": "x",
        "num_ranks": 1,
        "policy": "replace",
        "generation": 2**31 - 1,
        "started": "",
        "run": "",
        "command": "0" * 64,
        "nonce": "0" * 32,
        "signature": "0" * 64,
    }
    return draw.choice(
        (
            b"",
            b"",
            b"",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            garbage(draw)[:60_000],
            json.dumps(hello).encode() + b"\n",
        )
    )


def _is_loss(line: str) -> bool:
    return any(part in line for part in ("was ended by", "was killed", "was lost", "takes its place", "going on with"))


def _start_again(run: Run, node: int) -> None:
    run.wait(lambda: run.launchers[node].poll() is not None, 10.0)
    run.start_again(node)


def _victims(run: Run, draw: random.Random, most: int, *, spares: bool = True) -> list[int]:
    active, pids = list(run.active()), run.processes()
    among = pids if spares and draw.random() < 0.1 else active or pids
    return draw.sample(among, min(most, max(len(pids) - 1, 1), len(among)))


def _named(run: Run, victims: Sequence[int], pattern: str) -> tuple[int, str] | None:
    """Returns what is said of the loss of the processes: nothing if they are spares."""
    active = run.active()
    return (0, pattern) if any(pid in active for pid in victims) else None


ONE_MACHINE: dict[Callable[[Run, random.Random], Event], int] = {
    kill: 12, stop: 1, hang: 1, exit0: 2, babble: 2, damage: 4, full: 3, output: 2
}  # fmt: skip
"""Kinds, and how often each is drawn."""
TWO_MACHINES = ONE_MACHINE | {freeze: 2, pause: 1, machine: 3, babbling_machine: 3, strangers: 4}
