"""The launcher of a machine that is not the first: it runs ranks as the first launcher says."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...base.errors import ConfigError
from ...base.job_secret import is_signed, signature
from .joining import JOIN_S, Job, signed_parts
from .lines import HELLO_S, Events, Lines
from .messages import (
    RUN_STARTED,
    Challenge,
    End,
    Ended,
    FromFirst,
    FromRank,
    Generation,
    Hello,
    MessageError,
    Refused,
    Said,
    Signal,
    Start,
    Tell,
    Welcome,
)
from .nodes import ThisNode, machine_name
from .processes import Process, SignalCount, kill, say

_POLL_S = 0.2


def follow(
    number: int,
    num_ranks: int,
    command: Sequence[str],
    address: tuple[str, int],
    copies: Mapping[str, str],
    signals: SignalCount,
    job: Job,
) -> int:
    """Runs ranks on this machine as the first launcher, at `address`, says. Returns the exit status.

    When the first launcher is lost, ends the ranks, and waits for it to start again, here or elsewhere: the copies of
    their state stay in this machine's memory, and the next ranks continue from them.

    Raises:
        ConfigError: there is no first launcher, it refuses this one, or does not know the job's secret.
    """
    launcher = secrets.token_hex(16)
    hello = Hello(
        number,
        machine_name(),
        launcher,
        num_ranks,
        job.policy.kind,
        -1,
        "",
        job.run,
        job.command,
        nonce="",
        signature="",
    )
    limit_s, has_joined = JOIN_S, False
    while True:
        follower = _Follower(hello, command, copies, signals)
        first = _join(address, hello, job, signals, limit_s, follower.begin, may_refuse=not has_joined)
        status = None if first is None else follower.run(first)
        if status is not None or first is None or signals.count:
            return 128 + signals.number if status is None else status
        hello = replace(hello, generation=follower.generation, started=follower.started)
        limit_s, has_joined = job.policy.limit_s, True
        say(
            f"the launcher of node 0 at {address[0]}:{address[1]} was lost{_because(first.why)}, and all ranks with "
            f"it; waiting {limit_s:g} s for it to start again, to continue from the copies in memory (else from the "
            "checkpoint)"
        )


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _join(
    address: tuple[str, int],
    hello: Hello,
    job: Job,
    signals: SignalCount,
    limit_s: float,
    begin: Callable[[Lines], None],
    *,
    may_refuse: bool,
) -> Lines | None:
    """Returns the connection to the first launcher once both know each other, or None after a signal.

    Args:
        begin: takes the connection from there on.
        may_refuse: whether one that does not prove that it is of this job may end this launcher. Otherwise the true
            one is waited for: who took its port while it was lost is nobody to believe.
    """
    deadline, said = time.monotonic() + limit_s, set[str]()
    where = f"{address[0]}:{address[1]}"
    while not signals.count:
        try:
            connection = socket.create_connection(address, timeout=HELLO_S)
        except OSError as error:
            failure = f"no launcher answers at {where} ({error})"
        else:
            meeting = _Meeting(connection, hello, job, begin)
            failure = meeting.failure(signals, may_refuse=may_refuse)
            if not failure:
                return meeting.lines
            failure = f"who answers at {where} is not the first launcher of this job: {failure}"
            if failure not in said and not signals.count:
                said.add(failure)
                say(f"{failure}; looking for it for {max(deadline - time.monotonic(), 0.0):.0f} s more")
        if time.monotonic() > deadline:
            raise ConfigError(f"{failure}; start the one of --node-rank 0 there")
        time.sleep(_POLL_S)
    return None


class _Meeting:
    """A connection to what may be the first launcher."""

    def __init__(self, connection: socket.socket, hello: Hello, job: Job, begin: Callable[[Lines], None]) -> None:
        self._job, self._begin = job, begin
        self._hello = replace(hello, nonce=secrets.token_hex(16))
        # What came; `_take` sets both, once.
        self._is_asked = False
        self._answer: Welcome | Refused | None = None
        self.lines = Lines(connection, Challenge | Welcome | Refused, self._take, HELLO_S)

    def failure(self, signals: SignalCount, *, may_refuse: bool) -> str:
        """Waits for the answer. Returns why it is none, or nothing if both ends know each other.

        Raises:
            ConfigError: the first launcher refuses this one.
        """
        while not (self._answer or self.lines.is_over or signals.count):
            self.lines.read(_POLL_S)
            self.lines.look_at_time()
        answer = self._answer
        if isinstance(answer, Welcome):
            return ""
        if isinstance(answer, Refused) and (may_refuse or self._is_signed("refused", answer)):
            raise ConfigError(f"the first launcher refuses this one: {answer.reason}")
        self.lines.connection.close()
        return self.lines.why or "it ended the connection"

    def _is_signed(self, what: str, answer: Welcome | Refused) -> bool:
        more = [answer.reason] if isinstance(answer, Refused) else []
        return is_signed(answer.signature, self._job.secret, what, self._hello.nonce, *more)

    def _take(self, message: Challenge | Welcome | Refused) -> None:
        if isinstance(message, Challenge) and not self._is_asked:
            self._is_asked = True
            signed = signature(self._job.secret, *signed_parts(self._hello, message.nonce))
            self.lines.send(replace(self._hello, signature=signed))
        elif self._is_asked and isinstance(message, Refused):
            self._answer = message
        elif self._is_asked and isinstance(message, Welcome) and self._is_signed("welcome", message):
            self._answer = message
            self._begin(self.lines)
        else:
            raise MessageError("does not show that it knows the job's secret")


class _Follower:
    """Ranks of this machine, which start and end as the first launcher says, until that is lost."""

    def __init__(self, hello: Hello, command: Sequence[str], copies: Mapping[str, str], signals: SignalCount) -> None:
        self._events, self._signals = Events(), signals
        # The first launcher, once it is known; `begin` sets it.
        self._first: Lines | None = None
        self._node = ThisNode(hello.node, hello.num_ranks, command, copies, self._events, self._pass_on)
        # Ranks that have not ended, and the exit status, once the first launcher says that all is over. `_take` sets
        # both, and `run` removes ranks.
        self._processes: dict[int, Process] = {}
        self._status: int | None = None
        # Signals to this launcher that were passed on, and by worker those of the first: a rank gets what both get
        # once. `run` counts the former, `_take` the latter.
        self._passed_on, self._from_first = 0, dict[int, int]()
        self.generation = hello.generation
        """The last generation that was announced to a rank here. `_take` sets it."""
        self.started = hello.started
        """`RUN_STARTED` of the last rank that started here. `_take` sets it."""

    def begin(self, first: Lines) -> None:
        """Does what the first launcher says from now on."""
        self._first = first
        self._events.add(first)
        first.welcome(FromFirst, self._take)

    def run(self, first: Lines) -> int | None:
        """Returns the exit status, or None if the first launcher was lost, or at a third signal."""
        try:
            while not (self._status is not None or first.is_over or self._signals.count > 2):
                self._events.wait(_POLL_S)
                for worker, process in list(self._processes.items()):
                    if (code := process.poll()) is not None:
                        del self._processes[worker]
                        if code:
                            process.end()
                        first.send(Ended(worker, code))
                if self._passed_on < self._signals.count:
                    self._passed_on = self._signals.count
                    for worker, process in self._processes.items():
                        if self._from_first[worker] < self._passed_on:
                            process.send_signal(self._signals.sent)
        finally:
            kill(self._processes.values())
        return self._status

    def _take(self, message: Start | Tell | Signal | End) -> None:
        """Does what the first launcher says."""
        if isinstance(message, End):
            self._status = message.status
        elif isinstance(message, Start):
            if message.worker in self._from_first:
                raise MessageError(f"starts worker {message.worker} again")
            self._from_first[message.worker] = self._passed_on
            self.started = message.environment.get(RUN_STARTED, self.started)
            self._processes[message.worker] = self._node.start(message.worker, message.place, message.environment)
        elif message.worker not in self._from_first:
            raise MessageError(f"is for worker {message.worker}, which was not started here")
        elif isinstance(message, Tell):
            if isinstance(message.message, Generation):
                self.generation = message.message.number
            self._node.tell(message.worker, message.message)
        elif message.worker in self._processes:
            if message.number == 9:
                self._processes[message.worker].end()
                return
            self._from_first[message.worker] += 1
            if self._from_first[message.worker] > self._passed_on:
                self._processes[message.worker].send_signal(message.number)

    def _pass_on(self, worker: int, message: FromRank) -> None:
        if self._first is not None:
            self._first.send(Said(worker, message))
