"""Launchers of other machines join the first one, at the start and after either was lost.

Whoever connects is a stranger until both ends have proved that they know the job's secret. Strangers are read along
with everything else that the first launcher waits for: none holds it up, and only so many are there at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...base.errors import ConfigError
from ...base.files import brief
from ...rendezvous.job_secret import is_signed, signature
from .lines import HELLO_S, Connection, Events
from .messages import MOST_RANKS, Challenge, Hello, Refused, Welcome, encode
from .nodes import OnMessage, OtherNode, machine_name
from .processes import SignalCount, say

JOIN_S = 600.0
"""How long launchers wait for each other at the start."""
_POLL_S = 0.2
_MOST_STRANGERS = 64
"""Connections whose other end has not said who it is. The oldest one makes room: ours say it at once."""
_RUN_NAMES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "OAR_JOB_ID")
"""Environment variables in which schedulers number a job."""


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


@dataclass(frozen=True)
class Job:
    """What all launchers of a job have in common."""

    policy: LostRankPolicy
    run: str
    """The scheduler's number of the job, or what ``--run-id`` says. Empty without both."""
    command: str
    """A hash of the command of the ranks."""
    secret: bytes

    @classmethod
    def of(cls, policy: LostRankPolicy, command: Sequence[str], secret: bytes, run: str) -> Job:
        run = run or next((os.environ[name] for name in _RUN_NAMES if os.environ.get(name)), "")
        if not (run.isprintable() and len(run) < 1000):
            raise ConfigError(f"--run-id is {brief(run)}; give a short text of one line")
        return cls(policy, run, hashlib.sha256(json.dumps(list(command)).encode()).hexdigest(), secret)


def signed_parts(hello: Hello, challenge: str) -> tuple[str, str, bytes]:
    """Returns what the signature of a `Hello` is of: all of the rest, and what the first launcher has chosen."""
    return "hello", challenge, encode(replace(hello, signature=""))


class Joining:
    """Takes the launchers of other machines in.

    Args:
        listener: where they connect; None if there is one machine.
        num_nodes: how many machines there are, this one, number 0, included.
        events: of the first launcher, which waits for them.
        take: takes what their ranks say.
    """

    def __init__(
        self, listener: socket.socket | None, num_nodes: int, job: Job, events: Events, take: OnMessage
    ) -> None:
        self._listener, self._num_nodes, self._job, self._events, self._take = listener, num_nodes, job, events, take
        # Connections that have not said who they are, the oldest first. `_accept` adds one, and drops those that are.
        self._strangers: list[Connection] = []
        # Machines by number, and their names; a lost one stays until it joins again.
        self._nodes: dict[int, OtherNode] = {}
        self._machines = {0: machine_name()}
        # Why launchers were refused, each said once. `_refuse` adds it.
        self._refusals: set[str] = set()
        # Those that joined since `newcomers` was called last.
        self._newcomers: list[OtherNode] = []
        self.generation = -1
        """The last generation that a joined launcher knows, under a first launcher that was lost. `_join` sets it."""
        self.started = ""
        """`RUN_STARTED` of that launcher. `_join` sets it."""
        if listener is not None:
            listener.setblocking(False)
            events.add_listener(listener, self._accept)

    def newcomers(self) -> list[OtherNode]:
        """Returns the machines that joined since the last call."""
        joined, self._newcomers = self._newcomers, []
        return joined

    def wait_for_all(self, signals: SignalCount) -> list[OtherNode]:
        """Waits until every machine has joined, and returns those that did.

        If the first launcher was lost, the others look for this one: under ``shrink`` those that join within
        `LostRankPolicy.limit_s` go on without the rest.

        Raises:
            ConfigError: one did not come.
        """
        begun = time.monotonic()
        while (missing := sorted(set(range(1, self._num_nodes)) - self._nodes.keys())) and not signals.count:
            goes_on = self._job.policy.kind == "shrink" and self.generation >= 0
            limit_s = min(JOIN_S, self._job.policy.limit_s) if goes_on else JOIN_S
            if time.monotonic() > begun + limit_s:
                lacking = f"the launchers of nodes {missing} did not join in {limit_s:g} s"
                if not goes_on:
                    raise ConfigError(f"{lacking}; start one a node")
                say(f"{lacking}; the ranks start without them")
                break
            self._events.wait(_POLL_S)
        self.newcomers()
        return [*self._nodes.values()]

    def _accept(self) -> None:
        """Asks those who connect who they are."""
        with suppress(OSError):  # no connection is left, or too many files are open
            while self._listener is not None:
                self._ask(self._listener.accept()[0])

    def _ask(self, connection: socket.socket) -> None:
        self._strangers = [lines for lines in self._strangers if lines.is_stranger]
        if len(self._strangers) >= _MOST_STRANGERS:
            self._strangers.pop(0).end("others connected")
        challenge = secrets.token_hex(16)
        lines = Connection(connection, Hello, lambda hello: self._join(lines, hello, challenge), HELLO_S)
        self._strangers.append(lines)
        self._events.add(lines)
        lines.send(Challenge(challenge))

    def _join(self, lines: Connection, hello: Hello, challenge: str) -> None:
        if not is_signed(hello.signature, self._job.secret, *signed_parts(hello, challenge)):
            refusal = "its secret is not that of the first launcher; give all launchers the same one"
            self._refuse(lines, hello, refusal, "")
            return
        before = self._nodes.get(hello.node)
        if before is not None and before.launcher == hello.launcher:
            before.lines.end("its launcher joined again")
        if refusal := self._refusal(hello):
            self._refuse(lines, hello, refusal, signature(self._job.secret, "refused", hello.nonce, refusal))
            return
        self.generation = max(self.generation, hello.generation)
        self.started = self.started or hello.started
        lines.send(Welcome(signature(self._job.secret, "welcome", hello.nonce)))
        self._machines[hello.node] = hello.machine
        node = self._nodes[hello.node] = OtherNode(hello.node, hello.num_ranks, hello.launcher, lines, self._take)
        self._newcomers.append(node)

    def _refuse(self, lines: Connection, hello: Hello, reason: str, signed: str) -> None:
        lines.send(Refused(reason, signed))
        lines.end(reason)
        if reason not in self._refusals and len(self._refusals) < _MOST_STRANGERS:
            self._refusals.add(reason)
            say(f"a launcher of --node-rank {hello.node} was refused: {reason}")

    def _refusal(self, hello: Hello) -> str:
        number, kind = hello.node, self._job.policy.kind
        if not 0 < number < self._num_nodes:
            return f"--node-rank is {number}, and the first launcher has --nnodes {self._num_nodes}"
        if number in self._nodes and not self._nodes[number].is_lost:
            return f"--node-rank {number} runs already; give each launcher a number of its own"
        if not 0 < hello.num_ranks <= MOST_RANKS:
            return f"--nproc-per-node is {hello.num_ranks}; a machine runs 1 to {MOST_RANKS} ranks"
        if hello.policy != kind:
            return f"--on-lost-rank is {hello.policy}, and the first launcher has {kind}; give all launchers the same"
        if hello.run != self._job.run:
            return f"it is of run {hello.run!r}, and the first launcher of run {self._job.run!r}; give each job a port"
        if hello.command != self._job.command:
            return "its program or the program's arguments differ from the first launcher's; give all the same"
        if same := [other for other, name in self._machines.items() if name == hello.machine and other != number]:
            return (
                f"nodes {same[0]} and {number} are one machine, which would lose both copies of a rank's state; start "
                "one launcher a machine, with more --nproc-per-node"
            )
        return ""
