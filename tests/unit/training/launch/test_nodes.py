"""Launchers of several machines: who may join, and what ends with one of them."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time

import pytest

from core.base.errors import ConfigError
from core.training.launch import nodes
from core.training.launch.__main__ import main
from core.training.launch.entry import RUN_STARTED
from core.training.launch.nodes import MACHINE, Events, Joining, Lines, LostRankPolicy, follow
from core.training.launch.processes import SignalCount

HELLO = {"node": 1, "machine": "second", "launcher": "", "num_ranks": 1, "policy": "replace", "generation": 3}
HELLO |= {"started": "20260131-235959.000001"}
MANY, ELSEWHERE = (json.dumps({**HELLO, **odd}).encode() for odd in ({"num_ranks": 10**6}, {"started": "../.."}))
TALKS = "import os, socket; socket.socket(fileno=int(os.environ['SHARDSTACK_LAUNCHER_FD'])).sendall(b'{\"at\": 1}\\n')"


class _First:
    """The first launcher of two machines, in this process; the other one follows in a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_nodes: int = 2, policy: str = "replace") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        monkeypatch.setenv(MACHINE, "first")
        self.joining = Joining(self.listener, num_nodes, LostRankPolicy(policy, limit_s=0.5))
        self.events, self.said = Events(), []
        monkeypatch.setenv(MACHINE, "second")
        self.signals, self.ended = SignalCount(), []

    def follow(self, number: int, program: str = "", policy: str = "replace") -> threading.Thread:
        address, lost = self.listener.getsockname(), LostRankPolicy(policy, limit_s=0.5)
        arguments = (number, 1, ["-c", program], address, {}, self.signals, lost)

        def run() -> None:
            try:
                self.ended.append(follow(*arguments))
            except ConfigError as error:
                self.ended.append(str(error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def say_hello(self, **other):
        """Joins as a launcher that does nothing more. Returns its end of the connection."""
        connection = nodes._connect(self.listener.getsockname(), SignalCount(), 60.0)
        Lines(connection, print).send({**HELLO, **other})
        return connection

    def join(self):
        return self.joining.wait_for_all(self.events, lambda *said: self.said.append(said), SignalCount())

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
    assert first.said == [(5, {"at": 1})] and process.returncode == 0
    node.close(3)
    thread.join(60)
    assert first.ended == [3]


def test_ranks_end_with_the_first_launcher_and_wait_for_it(monkeypatch, capfd):
    first = _First(monkeypatch)
    first.follow(1, "import time; print('here', flush=True); time.sleep(600)")
    (node,) = first.join()
    process = node.start(0, 0, {RUN_STARTED: "20260131-235959.000001"})
    node.tell(0, {"number": 7})
    assert first.joining.started == ""
    node.lines.connection.shutdown(socket.SHUT_RDWR)
    first.wait(lambda: node.is_lost)
    assert process.poll() == -signal.SIGKILL
    monkeypatch.setenv(MACHINE, "first")
    first.joining = Joining(first.listener, 2, LostRankPolicy("replace"))  # of the launcher that starts again
    (node,) = first.join()
    assert (first.joining.generation, first.joining.started) == (7, "20260131-235959.000001")
    first.listener.close()
    node.lines.connection.shutdown(socket.SHUT_RDWR)
    first.wait(lambda: first.ended)
    assert capfd.readouterr().err.count("was lost, and all ranks with it; waiting 0.5 s for it to start again") == 2
    assert "no launcher answers at" in first.ended[0]


HEARS = """
import os, signal, socket
launcher = socket.socket(fileno=int(os.environ["SHARDSTACK_LAUNCHER_FD"]))
signal.signal(signal.SIGTERM, lambda *_: launcher.sendall(b'{"heard": 1}\\n'))
launcher.sendall(b'{"ready": 1}\\n')
while launcher.recv(1000):
    launcher.sendall(b'{"told": 1}\\n')
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
    node.tell(0, {})
    first.wait(lambda: len(first.said) == 3)
    process.send_signal(signal.SIGTERM)  # a second one
    first.wait(lambda: len(first.said) == 4)
    assert [word for _, message in first.said for word in message] == ["ready", "heard", "told", "heard"]
    node.close(0)
    thread.join(60)


def test_both_ends_see_a_machine_that_does_not_answer(monkeypatch):
    first = _First(monkeypatch)
    with first.say_hello() as connection:
        (node,) = first.join()
        assert first.joining.generation == 3
        for end in (connection, node.lines.connection):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_launcher_joins_again_before_its_loss_is_seen(monkeypatch):
    first, joined = _First(monkeypatch), []
    thread = first.follow(1)
    (node,) = first.join()
    process = node.start(0, 0, {})
    first.follow(1)
    _wait(lambda: joined.extend(first.joining.read(first.events, print)) or first.ended)
    assert not joined and "--node-rank 1 runs already" in first.ended.pop()
    node.lines.connection.shutdown(socket.SHUT_WR)  # the other end sees it; nothing reads this one
    _wait(lambda: joined.extend(first.joining.read(first.events, print)) or joined or first.ended)
    assert not first.ended and node.is_lost and process.poll() == -signal.SIGKILL
    joined[0].close(0)
    first.wait(lambda: not thread.is_alive())
    assert first.ended == [0]


def test_only_a_restarted_launcher_shrinks_to_those_that_join(monkeypatch, capfd):
    monkeypatch.setattr(nodes, "_JOIN_S", 1.0)
    first = _First(monkeypatch, 4, "shrink")
    with first.say_hello(policy="shrink", generation=-1):
        with pytest.raises(ConfigError, match=r"2, 3\] did not join in 1 s; start one a node"):
            first.join()
        with first.say_hello(policy="shrink", node=2, machine="third"):
            assert [node.number for node in first.join()] == [1, 2]
    assert "the launchers of nodes [3] did not join in 0.5 s; the ranks start without them" in capfd.readouterr().err


def test_strangers_and_launchers_of_one_machine_are_refused(monkeypatch):
    first, joined = _First(monkeypatch, num_nodes=3), []
    for line in (
        b"GET / HTTP/1.1",
        b'{"node": Infinity, "machine": "", "num_ranks": 1}',
        b"[" * 100_000,
        MANY,
        ELSEWHERE,
    ):
        with socket.create_connection(first.listener.getsockname()) as stranger:
            stranger.sendall(line + b"\n")
            assert list(first.joining.read(first.events, print)) == []
    first.follow(1, policy="shrink")
    first.wait(lambda: list(first.joining.read(first.events, print)) or first.ended)
    assert "--on-lost-rank is shrink, and the first launcher has replace" in first.ended.pop()
    thread = first.follow(2)
    first.wait(lambda: joined.extend(first.joining.read(first.events, print)) or joined)
    first.follow(1)
    first.wait(lambda: list(first.joining.read(first.events, print)) or first.ended)
    assert "nodes 2 and 1 are one machine" in first.ended[0]
    joined[0].close(0)
    thread.join(60)


SECOND = ("--nnodes", "2", "--node-rank", "1", "--on-lost-rank", "replace")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--node-rank", "2", "--nnodes", "2"], "nodes count from 0"),
        (["--nnodes", "2"], "to restart all ranks use torchrun"),
        (["--nproc-per-node", "0"], "takes a positive number"),
        ([*SECOND, "--spare-processes", "1"], "is for the launcher of --node-rank 0"),
    ],
)
def test_settings_of_machines_that_contradict_are_refused(capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        main([*flags, "program.py"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
