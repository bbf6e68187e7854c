"""The launcher of a machine that is not the first: it runs ranks as the first launcher says."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...base.errors import ConfigError
from ...rendezvous.job_secret import is_signed, signature
from . import messages
from .joining import JOIN_S, Job, signed_parts
from .lines import HELLO_S, Connection, Events
from .messages import Challenge, MessageError, Refused, Welcome
from .nodes import ThisNode, machine_name
from .processes import Process, SignalCount, kill, say

_POLL_S = 0.2


class Follower:
    """Ranks of this machine, which start and end as the first launcher says, and end with it.

    Args:
        number: of this machine.
        num_ranks: that it can run.
        command: a command line that begins with a script or ``-m module``.
        address: of the first launcher.
        variables: of this machine, for its ranks.
        signals: to this launcher.
    """

    def __init__(
        self,
        number: int,
        num_ranks: int,
        command: Sequence[str],
        address: tuple[str, int],
        variables: Mapping[str, str],
        signals: SignalCount,
        job: Job,
    ) -> None:
        self._address, self._signals, self._job = address, signals, job
        self._events = Events()
        self._node = ThisNode(
            number, num_ranks, command, variables, self._events, lambda *said: self._first.send(messages.Said(*said))
        )
        # How this launcher joins: `_meet` sets the nonce for each connection, `_do` the last generation that was
        # announced to a rank here, and `RUN_STARTED` of the last one that started here.
        self._hello = messages.Hello(
            number, machine_name(), secrets.token_hex(16), num_ranks, job.policy.kind, -1, "", job.run, job.command, ""
        )
        # The connection to the first launcher, or to what may be it, and what that has answered to the hello. `_meet`
        # and `_take_answer` set them.
        self._first: Connection
        self._answer: Welcome | Refused | None = None
        # Ranks that have not ended, and the exit status, once the first launcher says that all is over. `_do` sets
        # both, and `_run` removes ranks.
        self._processes: dict[int, Process] = {}
        self._status: int | None = None
        # Signals to this launcher that were passed on, and by worker those of the first: a rank gets what both get
        # once. `_run` counts the former, `_do` the latter, and `_meet` forgets them.
        self._passed_on, self._from_first = 0, dict[int, int]()

    def follow(self) -> int:
        """Runs ranks as the first launcher says. Returns the exit status.

        When the first launcher is lost, ends the ranks, and waits for it to start again, here or elsewhere: the copies
        of their state stay in this machine's memory, and the next ranks continue from them.

        Raises:
            ConfigError: there is no first launcher, it refuses this one, or does not know the job's secret.
        """
        limit_s = JOIN_S
        while self._status is None and (first := self._find_first(limit_s)) is not None:
            self._run(first)
            if self._status is None and not self._signals.count:
                limit_s, why = self._job.policy.limit_s, f" ({first.why})" if first.why else ""
                say(
                    f"the launcher of node 0 at {self._address[0]}:{self._address[1]} was lost{why}, and all ranks "
                    f"with it; waiting {limit_s:g} s for it to start again, to continue from copies or the checkpoint"
                )
        return 128 + self._signals.number if self._status is None else self._status

    def _find_first(self, limit_s: float) -> Connection | None:
        """Returns the connection to the first launcher once both know each other, or None after a signal.

        Raises:
            ConfigError: it is not there in time, or refuses this one.
        """
        deadline, where, said = time.monotonic() + limit_s, f"{self._address[0]}:{self._address[1]}", set[str]()
        while not self._signals.count:
            try:
                first = self._meet(socket.create_connection(self._address, timeout=HELLO_S))
            except OSError as error:
                failure = f"no launcher answers at {where} ({error})"
            else:
                if isinstance(self._answer, Welcome):
                    return first
                failure = f"who answers at {where} is not the first launcher of this job: {first.why or 'it hung up'}"
                if failure not in said and not self._signals.count:
                    said.add(failure)
                    say(f"{failure}; looking for it for {max(deadline - time.monotonic(), 0.0):.0f} s more")
            if time.monotonic() > deadline:
                raise ConfigError(f"{failure}; start the one of --node-rank 0 there")
            time.sleep(_POLL_S)
        return None

    def _meet(self, connection: socket.socket) -> Connection:
        """Says who this is, and waits for the answer. Returns the connection, which has ended if there is none."""
        self._answer, self._from_first = None, {}
        self._hello = replace(self._hello, nonce=secrets.token_hex(16))
        self._first = first = Connection(connection, Challenge, self._take_challenge, HELLO_S)
        self._events.add(first)
        while not (self._answer or first.is_over or self._signals.count):
            self._events.wait(_POLL_S)
        return first

    def _take_challenge(self, challenge: Challenge) -> None:
        signed = signature(self._job.secret, *signed_parts(self._hello, challenge.nonce))
        self._first.send(replace(self._hello, signature=signed))
        self._first.expect(Welcome | Refused, self._take_answer)

    def _take_answer(self, answer: Welcome | Refused) -> None:
        """Believes a welcome that is signed with the job's secret. A refusal ends a launcher that has not joined yet
        in any case, later only if it is signed: another program may have taken the port of a lost first launcher."""
        secret, nonce = self._job.secret, self._hello.nonce
        if isinstance(answer, Welcome) and is_signed(answer.signature, secret, "welcome", nonce):
            self._answer = answer
            self._first.expect(messages.FromFirst, self._do, is_known=True)
        elif isinstance(answer, Refused) and (
            self._hello.generation < 0 or is_signed(answer.signature, secret, "refused", nonce, answer.reason)
        ):
            raise ConfigError(f"the first launcher refuses this one: {answer.reason}")
        else:
            raise MessageError("does not show that it knows the job's secret")

    def _run(self, first: Connection) -> None:
        """Runs ranks until all is over, the first launcher was lost, or a third signal came."""
        try:
            while not (self._status is not None or first.is_over or self._signals.count > 2):
                self._events.wait(_POLL_S)
                for worker, process in list(self._processes.items()):
                    if (code := process.poll()) is not None:
                        del self._processes[worker]
                        if code:
                            process.end()  # what it has started
                        first.send(messages.Ended(worker, code))
                if self._passed_on < self._signals.count:
                    self._passed_on = self._signals.count
                    for worker, process in self._processes.items():
                        if self._from_first[worker] < self._passed_on:
                            process.send_signal(self._signals.sent)
        finally:
            kill(self._processes.values())
            self._processes.clear()

    def _do(self, message: Any) -> None:
        """Does what the first launcher says."""
        match message:
            case messages.End(status):
                self._status = status
            case messages.Start(worker, place, environment) if worker not in self._from_first:
                self._from_first[worker] = self._passed_on
                self._hello = replace(self._hello, started=environment.get(messages.RUN_STARTED, self._hello.started))
                self._processes[worker] = self._node.start(worker, place, environment)
            case messages.Tell(worker, what) if worker in self._from_first:
                if isinstance(what, messages.Generation):
                    self._hello = replace(self._hello, generation=what.number)
                self._node.tell(worker, what)
            case messages.Signal(worker, number) if worker in self._from_first:
                if worker not in self._processes:
                    return
                if number == 9:
                    self._processes[worker].end()
                    return
                self._from_first[worker] += 1
                if self._from_first[worker] > self._passed_on:
                    self._processes[worker].send_signal(number)
            case _:
                raise MessageError(f"is about worker {message.worker} out of turn")
