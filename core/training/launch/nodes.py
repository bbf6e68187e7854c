"""Machines that run ranks: this one, and those of other launchers, which do as the first launcher says.

Each process of a rank has a socket to the launcher of its machine, and each other launcher one to the first. Both ends
write JSON, an object a line. Between launchers:

    other -> first   {"node": 1, "machine": "...", "num_ranks": 8, "policy": "shrink"}   joins; again after it was lost
                     {"worker": 3, "message": {...}}                   what a rank says
                     {"worker": 3, "ended": -9}
    first -> other   {"refused": "..."}
                     {"worker": 3, "start": 0, "environment": {...}}   in this place
                     {"worker": 3, "tell": {...}}                      to a rank
                     {"worker": 3, "signal": 15}                       9 ends what the rank has started too
                     {"over": 0}                                       the exit status
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from .generations import LAUNCHER_FD
from .processes import LocalProcess, Process, kill, say, start_rank
from .signals import SignalCount

MACHINE = "SHARDSTACK_MACHINE"
"""Environment variable: the name of this machine, in the place of the kernel's id of its boot."""

Take = Callable[[int, dict[str, Any]], None]
"""Takes what a rank says, given the number of its worker."""

_POLL_S = 0.2
"""How often a signal is looked for, and without pidfd the end of a process."""
_JOIN_S, _HELLO_S, _SEND_S = 600.0, 5.0, 5.0
"""How long launchers wait for each other at the start, for the first line, and for a socket that takes no more."""
_KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}
"""A machine that does not answer for nine seconds is lost."""
_MOST_RANKS = 1024
"""Of a machine: a stranger's number starts no more."""


class Lines:
    """One end of a socket on which JSON objects come and go. Its callback takes them when `read` is called."""

    def __init__(self, connection: socket.socket, take: Callable[[dict[str, Any]], None]) -> None:
        connection.settimeout(_SEND_S)
        self.connection, self.take = connection, take
        # Bytes of a line that is not complete yet.
        self._partial = b""
        # Whether the other end is closed; never cleared.
        self.is_over = False

    def send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # it has ended, which `read` sees
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self, seconds: float = 0.0) -> None:
        """Takes what has come, after waiting for it for so long."""
        if self.is_over or not select.select([self.connection], [], [], seconds)[0]:
            return
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            data = b""
        self.is_over = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self.take(json.loads(line))


class Events(selectors.DefaultSelector):
    """Waits for lines of sockets and for ends of processes."""

    def add(self, lines: Lines) -> None:
        self.register(lines.connection, selectors.EVENT_READ, lines)

    def add_end(self, process: LocalProcess) -> None:
        with suppress(OSError, AttributeError):  # of Linux alone
            self.register(os.pidfd_open(process.pid), selectors.EVENT_READ)

    def wait(self, seconds: float) -> None:
        """Reads what comes in `seconds`, and returns once anything has."""
        for key, _ in self.select(seconds):
            if key.data is None:  # a process has ended
                self.unregister(key.fileobj)
                os.close(key.fd)
                continue
            key.data.read()
            if key.data.is_over:
                self.unregister(key.fileobj)
                key.data.connection.close()


class ThisNode:
    """This machine: starts ranks, and gives what they say to `take`."""

    is_lost = False

    def __init__(self, number: int, num_ranks: int, command: Sequence[str], events: Events, take: Take) -> None:
        self.number, self.num_ranks = number, num_ranks
        self._command, self._events, self._take = command, events, take
        # Of each worker; `start` adds it.
        self._lines: dict[int, Lines] = {}

    def start(self, worker: int, place: int, environment: Mapping[str, str]) -> LocalProcess:
        """Starts the process of a worker, to be LOCAL_RANK `place`."""
        ours, theirs = socket.socketpair()
        variables = {**environment, "RANK": str(place), "LOCAL_RANK": str(place), LAUNCHER_FD: str(theirs.fileno())}
        with theirs:
            process = start_rank(self._command, variables, (theirs.fileno(),))
        lines = self._lines[worker] = Lines(ours, lambda message: self._take(worker, message))
        self._events.add(lines)
        self._events.add_end(process)
        return process

    def tell(self, worker: int, message: Mapping[str, Any]) -> None:
        """Sends a message to a worker."""
        self._lines[worker].send(message)

    def close(self, status: int) -> None:
        """Says the exit status to the machine's launcher, if that is another one."""


class OtherNode:
    """A machine of another launcher, which starts ranks there."""

    def __init__(self, number: int, num_ranks: int, lines: Lines, events: Events, take: Take) -> None:
        self.number, self.num_ranks, self.lines, self._take = number, num_ranks, lines, take
        self._processes: dict[int, _OtherProcess] = {}
        lines.take = self._take_line
        events.add(lines)

    @property
    def is_lost(self) -> bool:
        return self.lines.is_over

    def start(self, worker: int, place: int, environment: Mapping[str, str]) -> Process:
        self.lines.send({"worker": worker, "start": place, "environment": dict(environment)})
        process = self._processes[worker] = _OtherProcess(self, worker)
        return process

    def tell(self, worker: int, message: Mapping[str, Any]) -> None:
        self.lines.send({"worker": worker, "tell": dict(message)})

    def close(self, status: int) -> None:
        self.lines.send({"over": status})

    def _take_line(self, line: dict[str, Any]) -> None:
        if "ended" in line:
            self._processes[line["worker"]].code = line["ended"]
        else:
            self._take(line["worker"], line["message"])


class _OtherProcess:
    def __init__(self, node: OtherNode, worker: int) -> None:
        self._node, self._worker = node, worker
        # How it ended, as its launcher says; None before.
        self.code: int | None = None

    @property
    def returncode(self) -> int | None:
        return -signal.SIGKILL if self.code is None and self._node.is_lost else self.code

    def poll(self) -> int | None:
        if self.returncode is None:
            self._node.lines.read()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        self._node.lines.send({"worker": self._worker, "signal": sig})

    def end(self) -> None:
        self.send_signal(signal.SIGKILL)
        while self.returncode is None:
            self._node.lines.read(_POLL_S)


Node = ThisNode | OtherNode


class Joining:
    """Takes the launchers of other machines in, at the start and after one was lost.

    Args:
        listener: where they connect.
        num_nodes: how many machines there are, this one, number 0, included.
        policy: ``replace`` or ``shrink``, the same on all.
    """

    def __init__(self, listener: socket.socket, num_nodes: int, policy: str) -> None:
        self._listener, self._num_nodes, self._policy = listener, num_nodes, policy
        # Machines by number, and their names; a lost one stays until it joins again.
        self._nodes: dict[int, OtherNode] = {}
        self._machines = {0: machine_name()}

    def read(self, events: Events, take: Take) -> Iterator[OtherNode]:
        """Takes in those who wait to join."""
        while select.select([self._listener], [], [], 0)[0]:
            connection = self._listener.accept()[0]
            heard: list[dict[str, Any]] = []
            lines = Lines(connection, heard.append)
            try:
                lines.read(_HELLO_S)
                number, machine, num_ranks = int(heard[0]["node"]), heard[0]["machine"], int(heard[0]["num_ranks"])
                refused = self._refusal(number, machine, num_ranks, heard[0]["policy"])
            except (LookupError, TypeError, ValueError, OverflowError, RecursionError):  # no launcher of ours
                connection.close()
                continue
            if refused:
                lines.send({"refused": refused})
                connection.close()
                continue
            _keep_alive(connection)
            self._machines[number] = machine
            self._nodes[number] = OtherNode(number, num_ranks, lines, events, take)
            yield self._nodes[number]

    def wait_for_all(self, events: Events, take: Take, signals: SignalCount) -> list[OtherNode]:
        """Waits until every machine has joined, and returns those that did.

        Raises:
            ConfigError: one did not come.
        """
        deadline = time.monotonic() + _JOIN_S
        while (missing := sorted(set(range(1, self._num_nodes)) - self._nodes.keys())) and not signals.count:
            if time.monotonic() > deadline:
                raise ConfigError(f"the launchers of nodes {missing} did not join in {_JOIN_S:g} s; start one a node")
            select.select([self._listener], [], [], _POLL_S)
            for _ in self.read(events, take):
                pass
        return list(self._nodes.values())

    def _refusal(self, number: int, machine: str, num_ranks: int, policy: str) -> str:
        if not 0 < number < self._num_nodes:
            return f"--node-rank is {number}, and the first launcher has --nnodes {self._num_nodes}"
        if number in self._nodes and not self._nodes[number].is_lost:
            return f"--node-rank {number} runs already; give each launcher a number of its own"
        if not 0 < num_ranks <= _MOST_RANKS:
            return f"--nproc-per-node is {num_ranks}; a machine runs 1 to {_MOST_RANKS} ranks"
        if policy != self._policy:
            return (
                f"--on-lost-rank is {policy}, and the first launcher has {self._policy}; give all launchers the same"
            )
        same = [other for other, name in self._machines.items() if name == machine and other != number]
        if same:
            return (
                f"nodes {same[0]} and {number} are one machine, which would lose both copies of a rank's state; start "
                "one launcher a machine, with more --nproc-per-node"
            )
        return ""


def _keep_alive(connection: socket.socket) -> None:
    """Makes a connection end once the machine at its other end does not answer."""
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def machine_name() -> str:
    """Returns a name that no other machine has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return os.environ.get(MACHINE) or (boot.read_text().strip() if boot.exists() else socket.gethostname())


def follow(
    number: int,
    num_ranks: int,
    command: Sequence[str],
    address: tuple[str, int],
    copies: Mapping[str, str],
    signals: SignalCount,
    policy: str,
) -> int:
    """Runs ranks on this machine as the first launcher, at `address`, says. Returns the exit status.

    Raises:
        ConfigError: there is no first launcher, or it refuses this one.
    """
    first, events, status = Lines(_connect(address, signals), print), Events(), list[int]()
    processes: dict[int, LocalProcess] = {}
    # Signals to this launcher that were passed on, and by worker those of the first: a rank gets what both get once.
    passed_on, from_first = 0, dict[int, int]()
    node = ThisNode(
        number, num_ranks, command, events, lambda n, message: first.send({"worker": n, "message": message})
    )

    def take(line: dict[str, Any]) -> None:
        worker = line.get("worker", -1)
        if "refused" in line:
            raise ConfigError(line["refused"])
        if "over" in line:
            status.append(line["over"])
        elif "start" in line:
            from_first[worker] = passed_on
            processes[worker] = node.start(worker, line["start"], {**line["environment"], **copies})
        elif "tell" in line:
            node.tell(worker, line["tell"])
        elif worker in processes:
            if line["signal"] == signal.SIGKILL:
                processes[worker].end()
                return
            from_first[worker] += 1
            if from_first[worker] > passed_on:
                processes[worker].send_signal(line["signal"])

    first.take = take
    first.send({"node": number, "machine": machine_name(), "num_ranks": num_ranks, "policy": policy})
    events.add(first)
    try:
        while not (status or first.is_over or signals.count > 2):
            events.wait(_POLL_S)
            for worker in [worker for worker, process in processes.items() if process.poll() is not None]:
                process = processes.pop(worker)
                if process.returncode:
                    process.end()
                first.send({"worker": worker, "ended": process.returncode})
            if passed_on < signals.count:
                passed_on = signals.count
                for worker, process in processes.items():
                    if from_first[worker] < passed_on:
                        process.send_signal(signals.sent)
    finally:
        kill(processes.values())
    if not status and not signals.count:
        say(f"the launcher of node 0 at {address[0]}:{address[1]} has ended, and this node's ranks with it")
    return status[0] if status else 128 + signals.number if signals.count else 1


def _connect(address: tuple[str, int], signals: SignalCount) -> socket.socket:
    deadline = time.monotonic() + _JOIN_S
    while True:
        try:
            connection = socket.create_connection(address, timeout=_HELLO_S)
            _keep_alive(connection)
            return connection
        except OSError as error:
            if signals.count or time.monotonic() > deadline:
                raise ConfigError(
                    f"no launcher answers at {address[0]}:{address[1]} ({error}); start the one of --node-rank 0 there"
                ) from None
            time.sleep(_POLL_S)
