"""Readers of messages that come over a connection, given to them as files: one for each kind of message."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from core.base import checked_json
from core.base.errors import ConfigError, WeightsError
from core.training.launch import messages as said
from core.training.launch.follower import Follower
from core.training.launch.joining import Job, LostRankPolicy
from core.training.launch.lines import Connection
from core.training.launch.nodes import OtherNode
from core.training.launch.processes import SignalCount
from core.training.launch.supervisor import Supervisor
from core.weights import WeightReceiver
from core.weights import receiver as receiving
from core.weights.messages import Bucket, Failure, Full, Patch, as_json, hash_bucket, new_hash, parse_message
from tests.fuzz.readers import Reader

_WEIGHTS = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
_CHANGED = [("b", torch.tensor([0, 5], dtype=torch.int32)), ("b", torch.ones(2, dtype=torch.bfloat16))]
_ROUNDS = {"full": list(_WEIGHTS.items()), "patch": _CHANGED}


def _metas(parts: list[tuple[str, Tensor]]) -> list[receiving.ParamMeta]:
    return [receiving.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in parts]


def _header(kind: str, base: str) -> dict[str, Any]:
    return checked_json.as_json(Full(1, as_json(_metas(_ROUNDS["full"]))) if kind == "full" else Patch(1, base))


def _end(header: dict[str, Any], kind: str) -> str:
    digest = new_hash(header)
    hash_bucket(digest, kind, _ROUNDS[kind])
    return digest.hexdigest()


def _make_weights(folder: Path) -> None:
    state = _end(_header("full", ""), "full")
    for kind, base in (("full", ""), ("patch", state)):
        header = _header(kind, base)
        parts = {"header": header, "0": as_json(_metas(_ROUNDS[kind])), "1": _end(header, kind)}
        for name, value in parts.items():
            (folder / f"{kind}_{name}.json").write_text(json.dumps(value))
    (folder / "failure.json").write_text(json.dumps(checked_json.as_json(Failure("a rank was lost"))))


class _Files:
    """A link whose messages are the files of a round, and whose tensors are the honest ones where they fit."""

    rank = 1
    group = finish = close = answer = comes = staticmethod(lambda *arguments: True)

    def __init__(self, folder: Path) -> None:
        self.folder, self.kind, self.parts = folder, "full", list[Tensor]()

    def read(self, key: str, expected: Any) -> Any:
        if key.endswith("header"):
            self.parts = [tensor for _, tensor in _ROUNDS[self.kind]]
        return parse_message((self.folder / f"{self.kind}_{key.split('/')[-1]}.json").read_bytes(), expected)

    def broadcast(self, tensor: Tensor) -> Any:
        sent = self.parts.pop(0) if self.parts else tensor
        if sent.shape == tensor.shape and sent.dtype == tensor.dtype:
            tensor.copy_(sent)
        return bool


def _read_weights(folder: Path) -> None:
    """Gives a receiver a full round and a patch, and holds it to its promise.

    Raises:
        WeightsError: a message was refused, which is not an error of another type underneath.
    """
    files = _Files(folder)
    with mock.patch.object(receiving, "Link", lambda *arguments: files):
        receiver = WeightReceiver("", 0, 1, expected=_metas(_ROUNDS["full"]))
    for files.kind in _ROUNDS:
        before = {name: tensor.clone() for name, tensor in receiver.weights.items()}
        try:
            receiver.receive()
        except WeightsError as error:
            assert isinstance(error.__cause__, (WeightsError, FileNotFoundError)), repr(error.__cause__)
            assert str(error).isprintable() and len(str(error)) < 4000
            assert receiver.weights.keys() == before.keys()
            assert all(torch.equal(tensor, before[name]) for name, tensor in receiver.weights.items())
        assert _metas([*receiver.weights.items()]) in (_metas(_ROUNDS["full"]), [])
    for path in folder.glob("*.json"):
        parse_message(path.read_bytes(), Full | Patch | Bucket | Failure | str)


_ENVIRONMENT = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
_SAID: dict[str, list[said.Message]] = {
    "stranger": [said.Hello(1, "a", "b", 8, "shrink", -1, "20260131-235959.000001", "17", "ab", "cd", "ef")],
    "answer": [said.Refused("--node-rank is 9", ""), said.Welcome("0" * 64)],
    "first": [
        said.Beat(),
        said.Start(0, 0, _ENVIRONMENT),
        said.Tell(0, said.Generation(number=3, lost="rank 1 failed", limit_s=600.0)),
        said.Tell(0, said.AskWhere()),
        said.Signal(0, 15),
        said.End(0),
    ],
    "other": [
        said.Beat(),
        *(said.Said(0, message) for message in (said.Began(), said.Sizes(0, [1, 2]), said.Step(0, 7, 0.5))),
        *(said.Said(0, message) for message in (said.Where(0, {"dp": (3, True)}), said.Done(0), said.Leaves(0))),
        said.Ended(0, -9),
    ],
}


def _make_launchers(folder: Path) -> None:
    for name, messages in _SAID.items():
        (folder / f"{name}.jsonl").write_bytes(b"".join(map(said.encode, messages)))


class _Stays:
    """A process that does as it is told."""

    start = send_signal = end = tell = lambda *arguments: _Stays()

    def poll(self) -> None:
        return None


def _read_launchers(folder: Path) -> None:
    """Lets launchers take what the others say: as a stranger, a first launcher, and a machine that runs a rank.

    Raises:
        ConfigError: an end has ended the connection, with the line that it did not take, or was refused.
    """
    job, signals, ended = Job(LostRankPolicy("shrink"), "17", "ab", b"secret"), SignalCount(), []
    supervisor = Supervisor(job, 0, [], {}, None, 2, signals)
    stranger = _Connection(folder / "stranger.jsonl", said.Hello)
    stranger.expect(said.Hello, lambda hello: supervisor.joining._join(stranger, hello, "nonce"))
    answer, first = (_Connection(folder / f"{name}.jsonl", None) for name in ("answer", "first"))
    follower = Follower(1, 1, [], ("localhost", 1), {}, signals, job)
    follower._first, follower._node = answer, _Stays()
    answer.expect(said.Welcome | said.Refused, follower._take_answer)
    first.expect(said.FromFirst, follower._do)
    other = _Connection(folder / "other.jsonl", None)
    supervisor._start(OtherNode(1, 1, "", other, supervisor._take), 0)
    for end in (stranger, first, other, answer):
        with mock.patch("core.training.launch.joining.say"):
            end.take_all()
        ended.append(end.why)
        assert end.why.isprintable() and len(end.why) < 4000
    if any(ended):
        raise ConfigError("; ".join(filter(None, ended)))


class _Connection(Connection):
    """An end of a connection on which a file has come."""

    def __init__(self, path: Path, expected: Any) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(ours, expected, print)
        self._data = path.read_bytes()

    def send(self, message: said.Message) -> None:
        """What it answers is of no interest."""

    def take_all(self) -> None:
        self._theirs.setblocking(False)
        for start in range(0, len(self._data), 1 << 14):
            if not self.is_over:
                self._theirs.sendall(self._data[start : start + (1 << 14)])
                self.read()
        self._theirs.close()
        while self.read():
            pass
        self.connection.close()


READERS = {
    "weights messages": Reader(_make_weights, _read_weights, ("*.json",)),
    "launchers' messages": Reader(_make_launchers, _read_launchers, ("*.jsonl",)),
}
