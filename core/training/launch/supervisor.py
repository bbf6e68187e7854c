"""The launcher's part of keeping survivors: sees a lost rank, kills one that hangs, and forms the next generation.

A generation is a set of ranks with one process group. What the launcher and each process say is in `messages`.

A rank counts as lost once its process has ended without having said that its program had, with any status. One that
hangs or is stopped is killed first, so that it cannot come back into a group that has gone on.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...base.text import rank_list
from .entry import CRASH_STATUS, INTERRUPTED_STATUS, RUN_ERROR_STATUS, USER_ERROR_STATUS
from .joining import Job, Joining
from .lines import Events
from .messages import AskWhere, Began, Done, FromRank, Generation, Leaves, Over, Sizes, ToRank, Where
from .nodes import Node, ThisNode
from .processes import SignalCount, how_it_ended, kill, say

_POLL_S = 0.2
"""How often a signal and the limit are looked for. What processes do is seen at once."""
_TOGETHER_S = 0.05
"""Ranks lost within this time count as lost together."""
_ANSWER_S = 3.0
"""Time for a rank to say where it is. One that is stopped does not."""
_MOST_LOSSES = 10
"""Losses without a step that is further than those before, which end the ranks."""
_LEAVE_S = 30.0
"""How long a rank may stay after another one has ended, before a line names it."""
_MOST_TEXT = 2000
_START_LIMIT_S = 120.0
"""The least limit before a generation's first step: processes start, and the first step may compile."""
_FINAL = (USER_ERROR_STATUS, RUN_ERROR_STATUS, INTERRUPTED_STATUS)
"""Exit statuses of errors that all ranks have: no replacement would fare better."""


class Worker:
    """A process that is a rank, or waits to be one."""

    def __init__(
        self, node: Node, number: int, place: int, environment: Mapping[str, str], *, says_done: bool
    ) -> None:
        # Its machine, and its LOCAL_RANK there, and so its GPU. A spare takes over the place of the rank that it
        # replaces, if that was on its machine.
        self.node, self.place, self._number = node, place, number
        self.process = node.start(number, place, environment)
        # Its rank in the current generation; None while it waits as a spare.
        self.rank: int | None = None
        # Its answer to the last question where it is; None until it comes.
        self.where: Mapping[str, tuple[int, bool]] | None = None
        # Why the launcher killed it; empty if it did not.
        self.killed_for = ""
        # Whether its program says when it has ended, whether it has for the current generation, and when its process
        # was about to end. The supervisor sets all three, as the process says.
        self.says_done, self.is_done, self.left_at = says_done, False, float("inf")

    def tell(self, message: ToRank) -> None:
        self.node.tell(self._number, message)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_lost(self) -> bool:
        code = self.process.poll()
        if self.is_done and self.left_at < float("inf") and self.killed_for:
            return False  # its exit hung, after all that it had to do
        return code is not None and (code != 0 or (self.says_done and not self.is_done))

    @property
    def status(self) -> int:
        """Exit status of a lost worker as the launcher takes it, or minus the signal that ended the worker. Else 0."""
        return (self.process.poll() or CRASH_STATUS) if self.is_lost else 0

    def why(self) -> str:
        if self.node.is_lost:
            reason = f" ({self.node.why})" if self.node.why else ""
            return f"node {self.node.number} was lost with its ranks{reason}"
        return self.killed_for or how_it_ended(self.rank or 0, self.process.poll() or 0)


class Supervisor:
    """Keeps the survivors of lost ranks in their processes, over restarts of all ranks too.

    Args:
        num_ranks: to start on this machine.
        command: a command line that begins with a script or ``-m module``.
        variables: of this machine, for its ranks.
        listener: where launchers of other machines join; None if there is one machine.
        num_nodes: how many machines there are.
        signals: to this launcher.
    """

    def __init__(
        self,
        job: Job,
        num_ranks: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        listener: socket.socket | None,
        num_nodes: int,
        signals: SignalCount,
    ) -> None:
        self._policy, self._signals = job.policy, signals
        self._events = Events()
        # The machines that were not lost, in the order of their numbers at the start.
        self._nodes: list[Node] = [ThisNode(0, num_ranks, command, variables, self._events, self._take)]
        self.joining = Joining(listener, num_nodes, job, self._events, self._take)
        # Number of the current generation, which never repeats, also after a restart of all ranks.
        self.number = -1
        # All processes by the number of their worker, ended ones too; `_start` adds one. The living ones, spares too,
        # and those of the current generation by rank; `watch` sets both.
        self._by_number: list[Worker] = []
        self._workers: list[Worker] = []
        self._active: list[Worker] = []
        # Environment of processes; `watch` sets it.
        self._environment: Mapping[str, str] = {}
        # Numbers of ranks that the program can run on, as it said; None before, and if it takes any.
        self._sizes: list[int] | None = None
        # Whether a rank said that the program has ended on all.
        self._is_over = False
        # The furthest step so far, losses since it, and when a rank last went on (`time.monotonic`).
        self._furthest, self._losses = -(2**63), 0
        self._last_news = 0.0
        # Whether the current generation has made a step, and whether a long one was warned about.
        self._has_stepped, self._has_warned = False, False
        # The first rank of it that has ended well, and when; `_look_at_exits` sets both, and says once who stays.
        self._first_end: tuple[int, float] | None = None
        self._has_named = False

    def join(self) -> None:
        """Waits for the launchers of the other machines.

        Raises:
            ConfigError: one did not come.
        """
        self._nodes += sorted(self.joining.wait_for_all(self._signals), key=lambda node: node.number)
        self.number = self.joining.generation

    def watch(self, environment: Mapping[str, str]) -> Sequence[Worker]:
        """Starts the ranks, and returns them when none of them will be replaced any more: all have ended,
        a signal came, or ranks were lost that the policy cannot make up for.

        Args:
            environment: added to that of this process.
        """
        self._environment, self._is_over = environment, False
        self._furthest, self._losses = -(2**63), 0
        if lost_nodes := [node.number for node in self._nodes if node.is_lost]:
            say(f"the ranks start without nodes {lost_nodes}, which were lost")
        self._nodes = [node for node in self._nodes if not node.is_lost]
        self._workers = []
        members = [self._start(node, place) for node in self._nodes for place in range(node.num_ranks)]
        for place in range(self._policy.spares):
            self._start(self._nodes[0], self._nodes[0].num_ranks + place)
        try:
            self._announce(members, "", 0.0)
            while not self._signals.count and not all(worker.has_ended for worker in self._active):
                self.read(_POLL_S)
                if any(worker.is_lost for worker in self._active):
                    if self._policy.kind == "restart" or not self._make_up_for_lost():
                        break
                elif self._policy.kind != "restart" and not self._is_over:
                    limit_s = self._policy.limit_s if self._has_stepped else max(self._policy.limit_s, _START_LIMIT_S)
                    if time.monotonic() - self._last_news > limit_s:
                        self._kill_hanging()
        finally:
            kill(worker.process for worker in self._workers if worker not in self._active)
        return self._active

    def end_processes(self) -> None:
        """Kills every process that is left."""
        kill(worker.process for worker in self._workers)

    @property
    def has_ranks(self) -> bool:
        """Whether a machine is left that runs ranks."""
        return any(node.num_ranks for node in self._nodes if not node.is_lost)

    def close(self, status: int) -> None:
        """Says the exit status to the launchers of other machines."""
        for node in self._nodes:
            node.close(status)

    def _start(self, node: Node, place: int) -> Worker:
        says_done = self._policy.kind != "restart"
        worker = Worker(node, len(self._by_number), place, self._environment, says_done=says_done)
        self._by_number.append(worker)
        self._workers.append(worker)
        return worker

    def _announce(self, members: list[Worker], lost_text: str, lost_at: float) -> None:
        """Gives every member its place in the next generation. Without members all leave the one before, and wait."""
        self.number += 1
        for worker in members:  # a new member takes the lowest place on its machine that is free
            places = {other.place for other in members if other.node is worker.node and other is not worker}
            if worker.rank is None and (worker.place in places or worker.place >= worker.node.num_ranks):
                worker.place = min(set(range(worker.node.num_ranks)) - places, default=worker.place)
        self._active, self._has_stepped, self._last_news = members, False, time.monotonic()
        self._first_end, self._has_named = None, False
        for worker in self._workers:
            worker.is_done = False
            worker.rank = members.index(worker) if worker in members else None
            place = Generation(
                number=self.number,
                rank=-1 if worker.rank is None else worker.rank,
                local_rank=worker.place,
                world_size=len(members),
                local_world_size=sum(member.node is worker.node for member in members),
                node=worker.node.number,
                lost=lost_text[:_MOST_TEXT],
                lost_at=lost_at,
                policy=self._policy.kind,
                limit_s=self._policy.limit_s,
            )
            worker.tell(place)

    def read(self, seconds: float) -> None:
        """Reads what the processes say, for `seconds` at most, and starts spares on machines that have joined."""
        self._events.wait(seconds)
        for node in self.joining.newcomers():
            self._nodes = [*(other for other in self._nodes if not other.is_lost), node]
            say(f"node {node.number} has joined")
            for place in range(node.num_ranks):
                self._start(node, place)
        self._look_at_exits()

    def _look_at_exits(self) -> None:
        """Names ranks that stay long after another one has ended, and kills those that hang after their program."""
        now, staying = time.monotonic(), [worker for worker in self._active if not worker.has_ended]
        ended = [worker for worker in self._active if worker not in staying and not worker.is_lost]
        if self._first_end is None and ended:
            self._first_end = ended[0].rank or 0, now
        if self._first_end and staying and not self._has_named and now - self._first_end[1] > _LEAVE_S:
            self._has_named = True
            say(
                f"{rank_list([worker.rank or 0 for worker in staying])} has not ended {_LEAVE_S:g} s after rank "
                f"{self._first_end[0]} had; it may hang in its exit, or do more work; a second signal ends it"
            )
            for worker in ended if self._policy.kind != "restart" and not self._is_over else []:
                worker.is_done = False  # it left before the generation, in which the others wait for it
        for worker in staying:
            if self._has_named and now - worker.left_at > self._policy.limit_s:
                worker.killed_for = (
                    f"rank {worker.rank} hung in its exit for {self._policy.limit_s:g} s and was killed"
                )
                say(worker.killed_for)
                worker.process.end()

    def _take(self, number: int, message: FromRank) -> None:
        worker = self._by_number[number]
        if isinstance(message, Began):
            worker.says_done = True
        elif isinstance(message, Leaves):
            worker.left_at = time.monotonic()
            worker.is_done |= message.generation < 0 or self._is_over
        elif isinstance(message, Where):
            worker.where = message.calls
        elif message.generation == self.number:
            self._last_news = time.monotonic()
            if isinstance(message, Done):
                self._is_over = worker.is_done = True
            elif isinstance(message, Sizes):
                self._sizes = message.sizes
            else:
                self._has_stepped = True
                if message.step > self._furthest:
                    self._furthest, self._losses = message.step, 0
                if message.seconds > self._policy.limit_s / 2 and not self._has_warned:
                    self._has_warned = True
                    say(
                        f"warning: a step took {message.seconds:.1f} s, and --lost-rank-timeout is "
                        f"{self._policy.limit_s:g} s, after which a rank counts as lost; raise it to several steps"
                    )

    def _make_up_for_lost(self) -> bool:
        """Forms the next generation without the ranks that were lost. Returns whether there is one."""
        time.sleep(_TOGETHER_S)
        self.read(0.0)
        before, losses = self._active, [worker for worker in self._active if worker.is_lost]
        self._end_lost()
        why = "; ".join(dict.fromkeys(worker.why() for worker in losses))
        if self._is_over:  # nothing is left to compute: the survivors only leave
            say(f"{why}, after the program had ended on all ranks")
            if any(worker.status > 0 for worker in losses):  # it failed at something else, such as an export
                return False
            self._active = [worker for worker in self._active if worker not in losses]
            for worker in self._active:
                worker.tell(Over())
            return True
        self._losses += 1
        if losses == before or any(worker.process.poll() in _FINAL for worker in losses):
            if all(worker.killed_for for worker in losses):
                say(f"{why}; raise --lost-rank-timeout if a step takes longer")
            return False
        if self._losses > _MOST_LOSSES:
            say(f"{why}; {_MOST_LOSSES} losses without a further step: no rank is replaced any more")
            return False
        if self._policy.kind == "replace":
            if not self._have_processes(before, why):
                return False
            self._end_lost()  # more of them, while it waited
            members, spares = list(before), self._spares(before)
            ranks = [rank for rank, worker in enumerate(before) if worker not in self._workers]
            for rank in sorted(ranks, key=lambda rank: not before[rank].node.is_lost):  # no process can start there
                members[rank] = self._replacement(before[rank], spares)
            doing = "a spare process takes its place" if self._policy.spares else "a new process takes its place"
        else:
            able = [worker for worker in before if worker not in losses] + self._spares(before)
            size = max((n for n in self._sizes or [len(able)] if n <= len(able)), default=0)
            if size == 0:
                say(f"{why}; the program cannot run on {len(able)} ranks or fewer")
                return False
            members, doing = _spread(able, size), f"going on with {size} of {len(able)} ranks that are left"
        say(f"{why}; {doing}")
        self._announce(members, why, time.time())
        return True

    def _end_lost(self) -> None:
        losses = [worker for worker in self._workers if worker.is_lost]
        for worker in losses:
            worker.process.end()  # what it has started
        self._workers = [worker for worker in self._workers if worker not in losses]

    def _spares(self, members: Sequence[Worker]) -> list[Worker]:
        return [worker for worker in self._workers if worker not in members and not worker.is_lost]

    def _have_processes(self, members: Sequence[Worker], why: str) -> bool:
        """Waits for lost machines to join again, unless spares of others take their ranks. Returns whether there are
        as many processes as ranks."""
        deadline, is_waiting = time.monotonic() + self._policy.limit_s, False
        while True:
            on_lost = [worker for worker in members if worker.is_lost and worker.node.is_lost]
            if len(on_lost) <= len(self._spares(members)):
                return True
            nodes = sorted({worker.node.number for worker in on_lost})
            if not is_waiting:
                is_waiting = True
                say(f"{why}; waiting {self._policy.limit_s:g} s for the launchers of nodes {nodes} to start again")
                self._announce([], why, time.time())
            if time.monotonic() > deadline or self._signals.count or all(worker.is_lost for worker in members):
                say(f"no launcher of nodes {nodes} came, and there is no spare process; use shrink, or start it again")
                self._active = list(members)
                return False
            self.read(_POLL_S)

    def _replacement(self, absent: Worker, spares: list[Worker]) -> Worker:
        near = [worker for worker in spares if worker.node is absent.node]
        if not near and not (spares and absent.node.is_lost):
            return self._start(absent.node, absent.place)  # on a machine that is lost it counts as lost at once
        worker = (near or spares)[0]
        spares.remove(worker)
        return worker

    def _kill_hanging(self) -> None:
        """Kills the ranks that do not answer. Without any, those that others wait for, or else all."""
        waited_s = time.monotonic() - self._last_news
        for worker in self._active:
            worker.where = None
            worker.tell(AskWhere())
        deadline = time.monotonic() + _ANSWER_S
        while any(worker.where is None for worker in self._active) and time.monotonic() < deadline:
            self.read(_POLL_S)
        hanging = [worker for worker in self._active if worker.where is None]
        why = "did not answer"
        if not hanging:
            hanging, why = behind([worker.where or {} for worker in self._active], self._active), "held up the others"
        if not hanging:
            hanging, why = list(self._active), "made no step, as no other rank did"
        for worker in hanging:
            worker.killed_for = f"rank {worker.rank} {why} for {waited_s:.0f} s (--lost-rank-timeout) and was killed"
        kill(worker.process for worker in hanging)
        self._last_news = time.monotonic()


def _spread(able: Sequence[Worker], size: int) -> list[Worker]:
    """Returns so many of the workers, in their order. Each machine keeps one, if they are enough: it reads the copies
    there."""
    turns = [sum(other.node is worker.node for other in able[:i]) for i, worker in enumerate(able)]
    return [able[i] for i in sorted(sorted(range(len(able)), key=turns.__getitem__)[:size])]


def behind(positions: Sequence[Mapping[str, Sequence[Any]]], ranks: Sequence[Any]) -> list[Any]:
    """Returns the ranks that others wait for: they have called fewer collectives than others of a group, in no group
    more, and wait in none.

    Args:
        positions: of each rank, by group: the number of its calls, and whether it waits in one.
    """
    most: dict[str, int] = {}
    for position in positions:
        for group, (calls, _) in position.items():
            most[group] = max(most.get(group, 0), calls)
    held_up = {group for position in positions for group, (_, waits) in position.items() if waits}
    ranks_behind = []
    for position, rank in zip(positions, ranks, strict=True):
        is_behind = any(calls < most[group] for group, (calls, _) in position.items() if group in held_up)
        if is_behind and not any(waits for _, waits in position.values()):
            ranks_behind.append(rank)
    return ranks_behind
