"""Machines that run ranks: this one, and those of other launchers, which do as the first launcher says.

Each process of a rank has a socket to the launcher of its machine, and each other launcher one to the first. Both ends
write JSON, an object a line. Between launchers:

    other -> first   {"node": 1, "machine": "...", "launcher": "...", "num_ranks": 8, "policy": "shrink",
                      "generation": -1, "started": ""}
                     joins; again after either was lost, with the last generation and `RUN_STARTED`
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
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from .entry import RUN_STARTED, STARTED_FORMAT
from .generations import LAUNCHER_FD
from .processes import LocalProcess, Process, SignalCount, kill, say, start_rank

MACHINE = "SHARDSTACK_MACHINE"
"""Environment variable: the name of this machine, in the place of the kernel's id of its boot."""

POLICIES = ("restart", "replace", "shrink")

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


@dataclass(frozen=True)
class LostRankPolicy:
    """What survivors of a lost rank do."""

    kind: str = "restart"
    """``restart``: all ranks end. ``replace``: a new process takes its place. ``shrink``: the others go on with fewer
    ranks, as many as the program can run on. Processes beyond that wait as spares."""
    limit_s: float = 600.0
    """Seconds without a step after which the ranks that hold up the others are killed. Must exceed the longest step,
    validation and save. Also how long a lost machine is waited for."""
    spares: int = 0
    """Processes that start, and wait to take the place of a lost rank."""


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

    def __init__(self, number: int, num_ranks: int, launcher: str, lines: Lines, events: Events, take: Take) -> None:
        self.number, self.num_ranks, self.launcher = number, num_ranks, launcher
        self.lines, self._take = lines, take
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

    def give_up(self) -> None:
        """Takes the machine for lost: its launcher has ended this connection, though this end does not see it."""
        self.lines.is_over = True
        with suppress(OSError):
            self.lines.connection.shutdown(socket.SHUT_RDWR)  # so that `Events` closes it

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
        listener: where they connect; None if there is one machine.
        num_nodes: how many machines there are, this one, number 0, included.
        policy: of ``replace`` or ``shrink``, the same on all.
    """

    def __init__(self, listener: socket.socket | None, num_nodes: int, policy: LostRankPolicy) -> None:
        self._listener, self._num_nodes, self._policy = listener, num_nodes, policy
        # Machines by number, and their names; a lost one stays until it joins again.
        self._nodes: dict[int, OtherNode] = {}
        self._machines = {0: machine_name()}
        self.generation = -1
        """The last generation that one of them knows, under a first launcher that was lost. `read` sets it."""
        self.started = ""
        """`RUN_STARTED` of that launcher. `read` sets it."""

    def read(self, events: Events, take: Take) -> Iterator[OtherNode]:
        """Takes in those who wait to join."""
        while self._listener is not None and select.select([self._listener], [], [], 0)[0]:
            connection = self._listener.accept()[0]
            messages: list[dict[str, Any]] = []
            lines = Lines(connection, messages.append)
            try:
                lines.read(_HELLO_S)
                hello = messages[0]
                number, machine, num_ranks = int(hello["node"]), hello["machine"], int(hello["num_ranks"])
                launcher, policy = hello["launcher"], hello["policy"]
                generation, started = int(hello["generation"]), hello["started"]
                if started:  # which becomes the name of a folder
                    datetime.strptime(started, STARTED_FORMAT)
            except (LookupError, TypeError, ValueError, OverflowError, RecursionError):  # no launcher of ours
                connection.close()
                continue
            before = self._nodes.get(number)
            if before is not None and before.launcher == launcher:
                before.give_up()
            if refusal := self._refusal(number, machine, num_ranks, policy):
                lines.send({"refused": refusal})
                connection.close()
                continue
            self.generation, self.started = max(self.generation, generation), self.started or started
            _keep_alive(connection)
            self._machines[number] = machine
            self._nodes[number] = OtherNode(number, num_ranks, launcher, lines, events, take)
            yield self._nodes[number]

    def wait_for_all(self, events: Events, take: Take, signals: SignalCount) -> list[OtherNode]:
        """Waits until every machine has joined, and returns those that did.

        If the first launcher was lost, the others look for this one: under ``shrink`` those that join within
        `LostRankPolicy.limit_s` go on without the rest.

        Raises:
            ConfigError: one did not come.
        """
        begun = time.monotonic()
        while (missing := sorted(set(range(1, self._num_nodes)) - self._nodes.keys())) and not signals.count:
            goes_on = self._policy.kind == "shrink" and self.generation >= 0
            limit_s = min(_JOIN_S, self._policy.limit_s) if goes_on else _JOIN_S
            if time.monotonic() > begun + limit_s:
                lacking = f"the launchers of nodes {missing} did not join in {limit_s:g} s"
                if not goes_on:
                    raise ConfigError(f"{lacking}; start one a node")
                say(f"{lacking}; the ranks start without them")
                break
            if not list(self.read(events, take)):
                time.sleep(_POLL_S)
        return list(self._nodes.values())

    def _refusal(self, number: int, machine: str, num_ranks: int, policy: str) -> str:
        if not 0 < number < self._num_nodes:
            return f"--node-rank is {number}, and the first launcher has --nnodes {self._num_nodes}"
        if number in self._nodes and not self._nodes[number].is_lost:
            return f"--node-rank {number} runs already; give each launcher a number of its own"
        if not 0 < num_ranks <= _MOST_RANKS:
            return f"--nproc-per-node is {num_ranks}; a machine runs 1 to {_MOST_RANKS} ranks"
        if policy != self._policy.kind:
            kind = self._policy.kind
            return f"--on-lost-rank is {policy}, and the first launcher has {kind}; give all launchers the same"
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
    policy: LostRankPolicy,
) -> int:
    """Runs ranks on this machine as the first launcher, at `address`, says. Returns the exit status.

    When the first launcher is lost, ends the ranks, and waits for it to start again, here or elsewhere: the copies of
    their state stay in this machine's memory, and the next ranks continue from them.

    Raises:
        ConfigError: there is no first launcher, or it refuses this one.
    """
    hello = {"node": number, "machine": machine_name(), "num_ranks": num_ranks, "policy": policy.kind}
    hello |= {"launcher": uuid.uuid4().hex, "generation": -1, "started": ""}
    limit_s = _JOIN_S
    while True:
        follower = _Follower(_connect(address, signals, limit_s), hello, command, copies, signals)
        status = follower.run()
        if status is not None or signals.count:
            return 128 + signals.number if status is None else status
        hello |= {"generation": follower.generation, "started": follower.started}
        limit_s = policy.limit_s
        say(
            f"the launcher of node 0 at {address[0]}:{address[1]} was lost, and all ranks with it; waiting "
            f"{limit_s:g} s for it to start again, to continue from the copies in memory (else from the checkpoint)"
        )


class _Follower:
    """Ranks of this machine, which start and end as the first launcher says, until that is lost."""

    def __init__(
        self,
        first: socket.socket,
        hello: Mapping[str, Any],
        command: Sequence[str],
        copies: Mapping[str, str],
        signals: SignalCount,
    ) -> None:
        self._events, self._copies, self._signals = Events(), copies, signals
        self._first = Lines(first, self._take)
        self._first.send(hello)
        self._events.add(self._first)
        self._node = ThisNode(hello["node"], hello["num_ranks"], command, self._events, self._pass_on)
        # Ranks that have not ended, and the exit status, once the first launcher says that all is over. `_take` sets
        # both, and `run` removes ranks.
        self._processes: dict[int, LocalProcess] = {}
        self._status: int | None = None
        # Signals to this launcher that were passed on, and by worker those of the first: a rank gets what both get
        # once. `run` counts the former, `_take` the latter.
        self._passed_on, self._from_first = 0, dict[int, int]()
        self.generation = hello["generation"]
        """The last generation that was announced to a rank here. `_take` sets it."""
        self.started = hello["started"]
        """`RUN_STARTED` of the last rank that started here. `_take` sets it."""

    def run(self) -> int | None:
        """Returns the exit status, or None if the first launcher was lost, or at a third signal."""
        try:
            while not (self._status is not None or self._first.is_over or self._signals.count > 2):
                self._events.wait(_POLL_S)
                for worker in [worker for worker, process in self._processes.items() if process.poll() is not None]:
                    process = self._processes.pop(worker)
                    if process.returncode:
                        process.end()
                    self._first.send({"worker": worker, "ended": process.returncode})
                if self._passed_on < self._signals.count:
                    self._passed_on = self._signals.count
                    for worker, process in self._processes.items():
                        if self._from_first[worker] < self._passed_on:
                            process.send_signal(self._signals.sent)
        finally:
            kill(self._processes.values())
        return self._status

    def _take(self, line: dict[str, Any]) -> None:
        """Does what the first launcher says."""
        worker = line.get("worker", -1)
        if "refused" in line:
            raise ConfigError(line["refused"])
        if "over" in line:
            self._status = line["over"]
        elif "start" in line:
            self._from_first[worker] = self._passed_on
            environment = {**line["environment"], **self._copies}
            self.started = environment.get(RUN_STARTED, self.started)
            self._processes[worker] = self._node.start(worker, line["start"], environment)
        elif "tell" in line:
            self.generation = line["tell"].get("number", self.generation)
            self._node.tell(worker, line["tell"])
        elif worker in self._processes:
            if line["signal"] == signal.SIGKILL:
                self._processes[worker].end()
                return
            self._from_first[worker] += 1
            if self._from_first[worker] > self._passed_on:
                self._processes[worker].send_signal(line["signal"])

    def _pass_on(self, worker: int, message: dict[str, Any]) -> None:
        self._first.send({"worker": worker, "message": message})


def _connect(address: tuple[str, int], signals: SignalCount, limit_s: float) -> socket.socket:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            connection = socket.create_connection(address, timeout=_HELLO_S)
            _keep_alive(connection)
            return connection
        except OSError as error:
            if signals.count:
                raise SystemExit(128 + signals.number) from None
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no launcher answers at {address[0]}:{address[1]} ({error}); start the one of --node-rank 0 there"
                ) from None
            time.sleep(_POLL_S)
