"""Launchers of several machines: who may join, and what ends with one of them."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from core.base.errors import ConfigError
from core.training.launch.__main__ import main
from core.training.launch.nodes import MACHINE, Events, Joining, follow
from core.training.launch.signals import SignalCount

TALKS = "import os, socket; socket.socket(fileno=int(os.environ['SHARDSTACK_LAUNCHER_FD'])).sendall(b'{\"at\": 1}\\n')"


class _First:
    """The first launcher of two machines, in this process; the other one follows in a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_nodes: int = 2) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        monkeypatch.setenv(MACHINE, "first")
        self.joining, self.events, self.said = Joining(self.listener, num_nodes), Events(), []
        monkeypatch.setenv(MACHINE, "second")
        self.ended = []

    def follow(self, number: int, program: str = "") -> threading.Thread:
        arguments = (number, 1, ["-c", program], self.listener.getsockname(), {}, SignalCount())

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


def test_ranks_end_with_the_first_launcher(monkeypatch, capfd):
    first = _First(monkeypatch)
    thread = first.follow(1, "import time; print('here', flush=True); time.sleep(600)")
    (node,) = first.join()
    process = node.start(0, 0, {})
    node.lines.connection.shutdown(socket.SHUT_RDWR)
    first.wait(lambda: node.is_lost)
    assert process.poll() == -signal.SIGKILL
    thread.join(60)
    assert first.ended == [1]
    assert "the launcher of node 0" in capfd.readouterr().err


def test_strangers_and_launchers_of_one_machine_are_refused(monkeypatch):
    first, joined = _First(monkeypatch, num_nodes=3), []
    with socket.create_connection(first.listener.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n\n")
        assert list(first.joining.read(first.events, print)) == []
    thread = first.follow(2)
    first.wait(lambda: joined.extend(first.joining.read(first.events, print)) or joined)
    first.follow(1)
    first.wait(lambda: list(first.joining.read(first.events, print)) or first.ended)
    assert "nodes 2 and 1 are one machine" in first.ended[0]
    joined[0].close(0)
    thread.join(60)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--node-rank", "2", "--nnodes", "2"], "nodes count from 0"),
        (["--nnodes", "2"], "to restart all ranks use torchrun"),
        (["--nproc-per-node", "0"], "takes a positive number"),
    ],
)
def test_settings_of_machines_that_contradict_are_refused(capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        main([*flags, "program.py"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
