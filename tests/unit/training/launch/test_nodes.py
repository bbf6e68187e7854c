"""Launchers of several machines: who may join, and what ends with one of them."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from core.base.errors import ConfigError
from core.training.launch import nodes
from core.training.launch.__main__ import main
from core.training.launch.nodes import MACHINE, Events, Joining, Lines, LostRankPolicy, follow
from core.training.launch.processes import SignalCount

MANY = b'{"node": 1, "machine": "", "num_ranks": 1000000, "policy": "replace", "generation": 0}'
TALKS = "import os, socket; socket.socket(fileno=int(os.environ['SHARDSTACK_LAUNCHER_FD'])).sendall(b'{\"at\": 1}\\n')"


class _First:
    """The first launcher of two machines, in this process; the other one follows in a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_nodes: int = 2) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        monkeypatch.setenv(MACHINE, "first")
        self.joining, self.events, self.said = Joining(self.listener, num_nodes, "replace"), Events(), []
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

    def join(self):
        return self.joining.wait_for_all(self.events, lambda *said: self.said.append(said), SignalCount())

    def wait(self, condition) -> None:
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until
            self.events.wait(0.05)


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
    process = node.start(0, 0, {})
    node.tell(0, {"number": 7})
    node.lines.connection.shutdown(socket.SHUT_RDWR)
    first.wait(lambda: node.is_lost)
    assert process.poll() == -signal.SIGKILL
    monkeypatch.setenv(MACHINE, "first")
    first.joining = Joining(first.listener, 2, "replace")  # of the launcher that starts again
    (node,) = first.join()
    assert first.joining.generation == 7
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
    with nodes._connect(first.listener.getsockname(), SignalCount(), 60.0) as connection:
        Lines(connection, print).send(
            {"node": 1, "machine": "second", "num_ranks": 1, "policy": "replace", "generation": 3}
        )
        (node,) = first.join()
        assert first.joining.generation == 3
        for end in (connection, node.lines.connection):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_strangers_and_launchers_of_one_machine_are_refused(monkeypatch):
    first, joined = _First(monkeypatch, num_nodes=3), []
    for line in (b"GET / HTTP/1.1", b'{"node": Infinity, "machine": "", "num_ranks": 1}', b"[" * 100_000, MANY):
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
