"""Launchers of several machines: who may join, and what ends with one of them."""

from __future__ import annotations

import secrets
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest

from core.base.errors import ConfigError
from core.rendezvous.job_secret import signature
from core.training.launch import follower, joining, lines, nodes
from core.training.launch.__main__ import main
from core.training.launch.follower import Follower
from core.training.launch.joining import Job, Joining, LostRankPolicy, signed_parts
from core.training.launch.lines import Connection, Events
from core.training.launch.messages import (
    RUN_STARTED,
    Challenge,
    Done,
    Generation,
    Hello,
    Over,
    Refused,
    Start,
    Step,
    Welcome,
    encode,
)
from core.training.launch.nodes import MACHINE
from core.training.launch.processes import SignalCount

HELLO = Hello(1, "second", "", 1, "replace", 3, "20260131-235959.000001", "", "", "", "")
TALKS = "import os, socket; s = socket.socket(fileno=int(os.environ['SHARDSTACK_LAUNCHER_FD'])); "
TALKS += """s.sendall(b'{"kind": "Done", "generation": 4}\\n')"""


class _First:
    """The first launcher of two machines, in this process; the other one follows in a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_nodes: int = 2, policy: str = "replace") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._monkeypatch, self._num_nodes, self._policy = monkeypatch, num_nodes, policy
        self.events, self.said = Events(), []
        self.signals, self.ended = SignalCount(), []
        self.start()
        monkeypatch.setenv(MACHINE, "second")

    def start(self) -> None:
        """Starts it, again if it ran before."""
        self._monkeypatch.setenv(MACHINE, "first")
        self.events = Events()
        self.joining = Joining(self.listener, self._num_nodes, self.job(), self.events, lambda *s: self.said.append(s))

    def job(self, policy: str = "", secret: bytes = b"") -> Job:
        return Job(LostRankPolicy(policy or self._policy, limit_s=0.5), "", "", secret)

    def follow(self, number: int, program: str = "", **job) -> threading.Thread:
        address = self.listener.getsockname()
        arguments = (number, 1, ["-c", program], address, {}, self.signals, replace(self.job(), **job))

        def run() -> None:
            try:
                self.ended.append(Follower(*arguments).follow())
            except ConfigError as error:
                self.ended.append(str(error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def say_hello(self, **other):
        """Joins as a launcher that does nothing more. Returns its end of the connection."""
        connection = socket.create_connection(self.listener.getsockname())
        said = []
        there = Connection(connection, Challenge | Welcome | Refused, said.append)
        self.wait(lambda: there.read() or said)
        hello = replace(HELLO, nonce=secrets.token_hex(16), **other)
        there.send(replace(hello, signature=signature(b"", *signed_parts(hello, said[0].nonce))))
        self.wait(lambda: there.read() or len(said) == 2)
        return connection

    def join(self):
        return self.joining.wait_for_all(SignalCount())

    def joined(self):
        self.events.wait(0.05)
        return self.joining.newcomers()

    def wait(self, condition) -> None:
        _wait(lambda: self.events.wait(0.05) or condition())


def _wait(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_machine_runs_what_the_first_launcher_says(monkeypatch):
    first = _First(monkeypatch)
    thread = first.follow(1, TALKS)
    (node,) = first.join()
    process = node.start(5, 0, {})
    first.wait(lambda: process.poll() is not None)
    assert first.said == [(5, Done(4))] and process.poll() == 0
    node.close(3)
    thread.join(60)
    assert first.ended == [3]


def test_ranks_end_with_the_first_launcher_and_wait_for_it(monkeypatch, capfd):
    first = _First(monkeypatch)
    first.follow(1, "import time; print('here', flush=True); time.sleep(600)")
    (node,) = first.join()
    process = node.start(0, 0, {RUN_STARTED: "20260131-235959.000001"})
    node.tell(0, Generation(number=7))
    assert first.joining.started == ""
    node.lines.end()
    assert process.poll() == -signal.SIGKILL
    first.start()
    (node,) = first.join()
    assert (first.joining.generation, first.joining.started) == (7, "20260131-235959.000001")
    first.listener.close()
    node.lines.end()
    _wait(lambda: first.ended)
    assert capfd.readouterr().err.count("was lost, and all ranks with it; waiting 0.5 s for it to start again") == 2
    assert "no launcher answers at" in first.ended[0]


HEARS = """
import os, signal, socket
launcher = socket.socket(fileno=int(os.environ["SHARDSTACK_LAUNCHER_FD"]))
say = lambda step: launcher.sendall(b'{"kind": "Step", "generation": 0, "seconds": 0, "step": %d}\\n' % step)
signal.signal(signal.SIGTERM, lambda *_: say(1))
say(0)
while launcher.recv(1000):
    say(2)
"""


def test_a_signal_to_all_launchers_reaches_a_rank_once(monkeypatch):
    first = _First(monkeypatch)
    thread = first.follow(1, HEARS)
    (node,) = first.join()
    process = node.start(0, 0, {})
    first.wait(lambda: len(first.said) == 1)
    first.signals.number, first.signals.count = signal.SIGTERM, 1
    first.wait(lambda: len(first.said) == 2)
    process.send_signal(signal.SIGTERM)
    node.tell(0, Over())
    first.wait(lambda: len(first.said) == 3)
    process.send_signal(signal.SIGTERM)  # a second one
    first.wait(lambda: len(first.said) == 4)
    assert first.said == [(0, Step(0, step, 0.0)) for step in (0, 1, 2, 1)]
    node.close(0)
    thread.join(60)


@pytest.fixture
def hurried(monkeypatch):
    """Launchers say that they are alive ten times a second, and are lost after a second of silence."""
    monkeypatch.setattr(lines, "_BEAT_S", 0.1)
    monkeypatch.setattr(lines, "SILENCE_S", 1.0)


def test_a_launcher_that_falls_silent_is_lost(monkeypatch, hurried):
    first = _First(monkeypatch)
    with first.say_hello():
        (node,) = first.join()
        assert first.joining.generation == 3
        process = node.start(0, 0, {})
        first.wait(lambda: node.is_lost)
        assert process.poll() == -signal.SIGKILL and node.why == "its launcher did not answer for 1 s"


def test_a_first_launcher_that_falls_silent_is_lost(monkeypatch, hurried, capfd):
    first = _First(monkeypatch)
    first.follow(1)
    first.join()
    time.sleep(1.5)  # it reads nothing, and says nothing
    first.signals.count = 3
    _wait(lambda: first.ended)
    assert "was lost (its launcher did not answer for 1 s), and all ranks with it" in capfd.readouterr().err


def test_launchers_that_are_alive_stay_together(monkeypatch, hurried):
    first = _First(monkeypatch)
    thread = first.follow(1, "import time; time.sleep(1.5)")
    (node,) = first.join()
    process = node.start(0, 0, {})
    first.wait(lambda: process.poll() is not None)
    assert process.poll() == 0 and not node.is_lost
    node.close(0)
    thread.join(60)


def test_a_process_that_does_not_end_loses_its_machine(monkeypatch):
    monkeypatch.setattr(nodes, "KILL_S", 0.3)
    first = _First(monkeypatch)
    with first.say_hello():
        (node,) = first.join()
        process = node.start(0, 0, {})
        process.end()
        assert process.poll() == -signal.SIGKILL and node.is_lost


GARBAGE = (
    b"not json\n",
    b"[1]\n",
    b'{"kind": "Ended", "worker": 77, "code": 0}\n',
    b'{"kind": "Ended", "worker": 0, "code": "x"}\n',
    b'{"kind": "Ended", "worker": 0, "code": 0, "more": 1}\n',
    b'{"kind": "Said", "worker": 0, "message": {"kind": "Step", "generation": 0, "step": 1}}\n',
    b'{"kind": "Said", "worker": 0, "message": {"kind": "Sizes", "generation": 0, "sizes": "abc"}}\n',
    b'{"kind": "Start", "worker": 0, "place": 0, "environment": {}}\n',
    b"\xff\n",
    b"[" * 70_000 + b"\n",
    b"x" * (1 << 21),
)


def test_a_line_that_is_no_message_loses_its_machine_alone(monkeypatch):
    first = _First(monkeypatch)
    for line in GARBAGE:
        with first.say_hello() as connection:
            first.wait(lambda: first.joining._newcomers)
            (node,) = first.joining.newcomers()
            process = node.start(0, 0, {})
            threading.Thread(target=connection.sendall, args=(b'{"kind": "Beat"}\n' + line,), daemon=True).start()
            first.wait(lambda node=node: node.is_lost)
            assert process.poll() == -signal.SIGKILL and node.why.startswith("its line 3 "), line
    assert first.said == []


def test_strangers_hold_nobody_up(monkeypatch):
    first = _First(monkeypatch)
    monkeypatch.setattr(joining, "HELLO_S", 1.0)
    address = first.listener.getsockname()
    silent = [socket.create_connection(address) for _ in range(joining._MOST_STRANGERS)]
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000, b'{"kind": "Challenge", "nonce": "0"}\n', b"{}\n"):
        silent.append(socket.create_connection(address))
        silent[-1].sendall(line)
    thread = first.follow(1)
    (node,) = first.join()
    assert len(first.joining._strangers) <= joining._MOST_STRANGERS
    first.wait(lambda: all(not stranger.is_stranger for stranger in first.joining._strangers))
    node.close(0)
    thread.join(60)
    for connection in silent:
        connection.close()


class _Impostor:
    """Listens where the first launcher does, and says to each that connects what it is given."""

    def __init__(self, *messages) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._messages = messages
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection = self.listener.accept()[0]
            for message in self._messages:
                connection.sendall(message if isinstance(message, bytes) else encode(message))
            while self._messages and connection.recv(1 << 16):
                pass  # until the other end has had enough
            connection.close()


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ((b"SSH-2.0-OpenSSH_9.6\r\n",), "its line 1 is no message"),
        ((Welcome(""),), "its line 1 has other fields than a Challenge"),
        ((Challenge("0"), Welcome("0" * 64)), "its line 2 does not show that it knows the job's secret"),
        ((Challenge("0"), Start(0, 0, {})), "its line 2 is none of Welcome, Refused"),
        ((), "it hung up"),
    ],
    ids=["ssh", "unasked", "no secret", "starts at once", "closes"],
)
def test_who_answers_in_the_place_of_the_first_runs_nothing(monkeypatch, tmp_path, capfd, messages, said):
    monkeypatch.setattr(follower, "JOIN_S", 1.0)
    first = _First(monkeypatch)
    first.listener = _Impostor(*messages).listener
    first.follow(1, f"open({str(tmp_path / 'ran')!r}, 'w')", secret=b"secret")
    _wait(lambda: first.ended)
    assert "is not the first launcher of this job: " in first.ended[0]
    assert said in capfd.readouterr().err and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_PRELOAD", "PATH", "PYTHONSTARTUP", "SHARDSTACK_COPIES_FOLDER"])
def test_no_variable_from_elsewhere_runs_code(monkeypatch, tmp_path, capfd, name):
    first = _First(monkeypatch)
    first.follow(1, f"open({str(tmp_path / 'ran')!r}, 'w')")
    (node,) = first.join()
    process = node.start(0, 0, {name: str(tmp_path)})
    said = []
    first.wait(lambda: said.append(capfd.readouterr().err) or "was lost (its line 3 has {'" + name in "".join(said))
    first.signals.count = 3
    _wait(lambda: first.ended)
    assert process.poll() == -signal.SIGKILL and not (tmp_path / "ran").exists()


def test_a_launcher_joins_again_before_its_loss_is_seen(monkeypatch):
    first, joined = _First(monkeypatch), []
    thread = first.follow(1)
    (node,) = first.join()
    process = node.start(0, 0, {})
    first.follow(1)
    first.wait(lambda: joined.extend(first.joining.newcomers()) or first.ended)
    assert not joined and "--node-rank 1 runs already" in first.ended.pop()
    node.lines.connection.shutdown(socket.SHUT_WR)  # the other end sees it; nothing reads this one
    monkeypatch.setattr(node.lines, "read", lambda _=0.0: False)
    first.wait(lambda: joined.extend(first.joining.newcomers()) or joined or first.ended)
    assert not first.ended and node.is_lost and process.poll() == -signal.SIGKILL
    joined[0].close(0)
    first.wait(lambda: not thread.is_alive())
    assert first.ended == [0]


def test_only_a_restarted_launcher_shrinks_to_those_that_join(monkeypatch, capfd):
    monkeypatch.setattr(joining, "JOIN_S", 1.0)
    first = _First(monkeypatch, 4, "shrink")
    with first.say_hello(policy="shrink", generation=-1):
        with pytest.raises(ConfigError, match=r"2, 3\] did not join in 1 s; start one a node"):
            first.join()
        with first.say_hello(policy="shrink", node=2, machine="third"):
            assert [node.number for node in first.join()] == [1, 2]
    assert "the launchers of nodes [3] did not join in 0.5 s; the ranks start without them" in capfd.readouterr().err


def test_launchers_that_do_not_belong_together_are_refused(monkeypatch, capfd):
    first = _First(monkeypatch, num_nodes=3)
    (thread, node) = first.follow(2), None
    while node is None:
        node = next(iter(first.joined()), None)
    for job, said in (
        (
            {"policy": LostRankPolicy("shrink", limit_s=0.5)},
            "--on-lost-rank is shrink, and the first launcher has rep",
        ),
        ({"run": "17"}, "it is of run '17', and the first launcher of run ''"),
        ({"command": "0"}, "its program or the program's arguments differ"),
        ({"secret": b"another"}, "its secret is not that of the first launcher"),
        ({}, "nodes 2 and 1 are one machine"),
    ):
        first.follow(1, **job)
        first.wait(lambda: first.ended)
        assert f"the first launcher refuses this one: {said}" in first.ended.pop()
    assert "a launcher of --node-rank 1 was refused: nodes 2 and 1" in capfd.readouterr().err
    node.close(0)
    thread.join(60)


SECOND = ("--nnodes", "2", "--node-rank", "1", "--on-lost-rank", "replace")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--node-rank", "2", "--nnodes", "2"], "nodes count from 0"),
        (["--nnodes", "2"], "to restart all ranks use torchrun"),
        (["--nproc-per-node", "0"], "it takes 1 to 1024"),
        (["--spare-processes", "100000", "--on-lost-rank", "replace"], "it takes 0 to 1024"),
        (["--lost-rank-timeout", "inf"], "--lost-rank-timeout is inf; it takes 0.001 to 1000000000"),
        (["--master-port", "99999"], "it takes 1 to 65535"),
        (["--secret-file", ""], "--secret-file is empty"),
        ([*SECOND, "--spare-processes", "1"], "is for the launcher of --node-rank 0"),
        (["--on-lost-rank", "shrink", "--lost-rank-timeout", "0"], "it takes 0.001 to 1000000000"),
        (["--spare-processes", "1"], "without --on-lost-rank replace or shrink"),
        (["--on-lost-rank", "replace", "--spare-processes", "-1"], "it takes 0 to 1024"),
        (["--on-lost-rank", "grow"], "invalid choice"),
    ],
)
def test_settings_of_machines_that_contradict_are_refused(capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        main([*flags, "program.py"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
