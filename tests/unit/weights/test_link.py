"""Senders and receivers that lie, and strangers at the port: a receiver keeps what it has, and answers."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base import checked_json
from core.base.errors import WeightsError
from core.rendezvous import job_secret
from core.weights import ParamMeta, WeightReceiver, WeightSender, WeightStream, link
from core.weights.link import Link
from core.weights.messages import Bucket, Failure, Full, Patch, as_json, hash_bucket, new_hash, parse_message
from core.weights.patches import WeightPatch
from tests._forked import FORKED

LIMIT_S = 20.0
GOOD = {"a": torch.arange(4.0), "b": torch.ones(4)}
PARTS = list[tuple[str, Tensor]]


def _metas(parts: PARTS) -> list[ParamMeta]:
    return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in parts]


def _pair(**options: Any) -> tuple[Link, WeightReceiver]:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(WeightReceiver, store, 0, 1, limit_s=LIMIT_S, **options)
        return Link(store, 0, 1, LIMIT_S, "gloo"), receiver.result()


def _serve(to: Link, number: int, header: Any, buckets: list[tuple[Any, PARTS]], end: Any = None) -> None:
    """Sends a round: buckets are what is announced, and what is broadcast and in the hash."""
    to.write(f"round/{number}/header", header)
    digest = new_hash(header)
    for place, (announced, parts) in enumerate(buckets):
        to.write(f"round/{number}/bucket/{place}", announced)
        for _, tensor in parts:
            to.broadcast(tensor)()
        hash_bucket(digest, header["kind"] if isinstance(header, dict) and "kind" in header else "", parts)
    to.write(f"round/{number}/bucket/{len(buckets)}", digest.hexdigest() if end is None else end)


def _full(version: int = 2, **more: Any) -> dict[str, Any]:
    return checked_json.as_json(Full(version, as_json(_metas([*GOOD.items()])))) | more


def _honest(parts: PARTS) -> tuple[Any, PARTS]:
    return as_json(_metas(parts)), parts


def _places(*places: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(places, dtype=dtype)


BUCKETS: dict[str, list[tuple[Any, PARTS]]] = {
    "a tensor is missing": [_honest([("a", GOOD["a"])])],
    "names are swapped": [_honest([("b", GOOD["a"]), ("a", GOOD["b"])])],
    "other names for the bytes": [(as_json(_metas([("b", GOOD["a"]), ("a", GOOD["b"])])), [*GOOD.items()])],
    "longer": [_honest([("a", torch.zeros(4)), ("b", torch.zeros(9))])],
    "other dtype of the same size": [_honest([("a", torch.zeros(4)), ("b", torch.zeros(4, dtype=torch.int32))])],
    "one more": [_honest([*GOOD.items(), ("c", torch.zeros(3))])],
    "one twice": [_honest([*GOOD.items()]), _honest([("a", torch.zeros(4))])],
    "huge": [([["a", "float32", [1 << 44]]], [])],
    "negative": [([["a", "float32", [-4]]], [])],
    "unknown dtype": [([["a", "evil", [4]]], [])],
    "no bucket": [({"x": 1}, [])],
    "half an entry": [([["a"]], [])],
}
PATCHES: dict[str, PARTS] = {
    "place after the end, in the second": [
        *[("b", _places(0)), ("b", torch.tensor([7.0])), ("a", _places(4)), ("a", torch.tensor([5.0]))]
    ],
    "negative place": [("a", _places(-1)), ("a", torch.tensor([5.0]))],
    "places descend": [("a", _places(2, 1)), ("a", torch.tensor([5.0, 6.0]))],
    "place twice": [("a", _places(1, 1)), ("a", torch.tensor([5.0, 6.0]))],
    "unknown name": [("c", _places(0)), ("c", torch.tensor([5.0]))],
    "two names": [("a", _places(0)), ("b", torch.tensor([5.0]))],
    "other dtype": [("a", _places(0)), ("a", torch.tensor([5.0], dtype=torch.float64))],
    "other lengths": [("a", _places(0, 1)), ("a", torch.tensor([5.0]))],
    "no values": [("a", _places(0))],
    "places that are no integers": [("a", torch.tensor([0.5])), ("a", torch.tensor([5.0]))],
    "places in two dimensions": [("a", _places(0).view(1, 1)), ("a", torch.tensor([[5.0]]))],
    "more places than elements": [("a", _places(0, 1, 2, 3, 3)), ("a", torch.zeros(5))],
    "no places": [("a", _places()), ("a", torch.zeros(0))],
    "tensor twice": [("a", _places(0)), ("a", torch.zeros(1)), ("a", _places(1)), ("a", torch.zeros(1))],
}
HEADERS: dict[str, Any] = {
    "empty header": {},
    "list": [1],
    "version is a text": _full(version="x"),
    "version is a truth value": _full(version=True),
    "dtype of the header": _full(tensors=[["a", "evil", [4]]]),
    "unknown kind": _full(kind="evil"),
    "a name twice in the header": _full(tensors=as_json(_metas([*GOOD.items(), ("a", GOOD["a"])]))),
    "more than a header has": _full(more=1),
    "name that steers a terminal": _full(tensors=[["\x1b[2J", "float32", [4]]]),
}
LIES = ["huge failure", "end of another round", *BUCKETS, *PATCHES, *HEADERS]


def _lie(name: str, to: Link, state: str) -> None:
    if name in HEADERS:
        _serve(to, 2, HEADERS[name], [])
    elif name in BUCKETS:
        _serve(to, 2, _full(), BUCKETS[name])
    elif name in PATCHES:
        header = checked_json.as_json(Patch(2, state))
        _serve(to, 2, header, [_honest(PATCHES[name])])
    else:
        end = state if name == "end of another round" else {"kind": "Failure", "reason": "\x1b[2J" + "x" * 10_000_000}
        _serve(to, 2, _full(), [_honest([*GOOD.items()])], end)


def _outcome(name: str, into: bool) -> tuple[str, str, bool, bool]:
    """Returns the error of a round that lies, what the sender is told, and whether the receiver is as it was before,
    or has nothing."""
    options = (
        {"into": {key: value.clone() for key, value in GOOD.items()}}
        if into
        else {"expected": _metas([*GOOD.items()])}
    )
    to, receiver = _pair(**options)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_serve, to, 1, _full(1), [_honest([*GOOD.items()])])
        receiver.receive()
        before = {key: value.clone() for key, value in receiver.weights.items()}
        state = receiver._state
        lying = pool.submit(_lie, name, to, state)
        message = ""
        try:
            receiver.receive()
        except WeightsError as error:
            message = str(error)
        with suppress(RuntimeError):
            lying.result()
        answers = [
            to.read(f"round/2/{step}/1", str) for step in ("vote", "done") if to.store.check([f"round/2/{step}/1"])
        ]
    same = all(torch.equal(receiver.weights.get(key, torch.empty(0)), value) for key, value in before.items())
    as_before = same and (receiver.version, receiver._state) == (1, state)
    return message, answers[-1], as_before, (receiver.version, receiver._state, receiver.weights) == (None, "", {})


def _tell_outcomes(into: bool, to: Connection) -> None:
    for name in LIES:
        to.send((name, _outcome(name, into)))


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, bool], tuple[str, str, bool, bool]]:
    """What becomes of each lie, in a process of its own for each kind of memory."""
    found = {}
    for into in (False, True):
        here, there = FORKED.Pipe(duplex=False)
        process = FORKED.Process(target=_tell_outcomes, args=(into, there))
        process.start()
        there.close()
        with suppress(EOFError):
            while here.poll(6 * LIMIT_S):
                name, outcome = here.recv()
                found[name, into] = outcome
        process.kill()
        process.join()
    return found


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_and_answered(name: str, into: bool, outcomes: Any):
    assert (name, into) in outcomes, "the receiver's process has ended"
    message, answer, as_before, has_nothing = outcomes[name, into]
    assert message and answer and answer[:20] in message
    assert len(message) < 2000 and message.isprintable()
    assert as_before or (into and has_nothing and name not in PATCHES and name not in HEADERS)


@pytest.mark.timeout(120)
def test_a_sender_learns_at_once_why_a_bucket_is_refused():
    store, model = dist.HashStore(), nn.Linear(3, 2)
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(WeightReceiver, store, 0, 2, limit_s=300.0)
        other = pool.submit(WeightReceiver, store, 1, 2, limit_s=300.0)
        sender = WeightSender(WeightStream(model, "module"), store, 2, limit_s=300.0)
        refusing = [pool.submit(receiver.result().receive) for receiver in (joining, other)]
        with (
            mock.patch("core.weights.sender.Full", lambda version, tensors: Full(version, tensors[::-1])),
            pytest.raises(WeightsError, match=r"receiver 1: a bucket has 'weight'.* in the place of 'bias'"),
        ):
            sender.send(0)
        for each in refusing:
            with pytest.raises(WeightsError, match="in the place of"):
                each.result()
        with pytest.raises(WeightsError, match="were lost before"):
            sender.send(1)
        with pytest.raises(WeightsError, match="make a new WeightReceiver"):
            joining.result().receive()


FAILURE = {"kind": "Failure", "reason": "x"}


class _LikeNccl:
    """A group whose `wait` returns at once, and whose broadcasts after the first end only where they are let."""

    def __init__(self, *settings: Any) -> None:
        self.num_broadcasts, self.is_aborted, self.environment = 0, False, os.environ.get(link._ON_FAILURE)

    def broadcast(self, *unused: Any) -> Any:
        self.num_broadcasts += 1
        ended = self.num_broadcasts == 1
        return mock.Mock(is_completed=lambda: ended or self.is_aborted, is_success=lambda: ended)

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def like_nccl(monkeypatch: pytest.MonkeyPatch) -> list[_LikeNccl]:
    """Puts groups in the place of NCCL's, on the CPU. Returns those that were made."""
    made: list[_LikeNccl] = []

    def make(*settings: Any) -> _LikeNccl:
        made.append(_LikeNccl())
        return made[-1]

    make.Options = mock.Mock  # type: ignore[attr-defined]
    monkeypatch.setattr(link.dist, "ProcessGroupNCCL", make, raising=False)
    monkeypatch.setitem(link._DEVICES, "nccl", "cpu")
    return made


def test_a_receiver_lost_under_nccl_is_named(like_nccl: list[_LikeNccl], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("core.weights.sender._ANSWER_S", 0.5)
    monkeypatch.setenv(link._ON_FAILURE, "3")
    store, model = dist.HashStore(), nn.Linear(3, 2)
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(WeightReceiver, store, 0, 1, limit_s=1.0, backend="nccl")
        sender = WeightSender(WeightStream(model, "module"), store, 1, limit_s=1.0, backend="nccl")
        receiver.result()._link.answer("round/1/vote")  # and nothing more: it is lost
    with pytest.raises(WeightsError, match=r"did not take the weights within the limit: rank 1; "):
        sender.send(0)
    assert all(group.environment == "0" for group in like_nccl) and os.environ[link._ON_FAILURE] == "3"
    assert [group.is_aborted for group in like_nccl].count(True) == 1  # no broadcast stays on the trainer's device
    with pytest.raises(WeightsError, match="were lost before"):
        sender.send(1)


def test_receivers_that_do_not_come_are_no_group_of_nccls(like_nccl: list[_LikeNccl]):
    with pytest.raises(WeightsError, match=r"2 receivers did not meet in 0.2 s"):
        Link(dist.HashStore(), 0, 2, 0.2, "nccl")
    assert not like_nccl  # whose first broadcast has no limit


@pytest.mark.parametrize("answer", ["\x1b[2J" + "x" * 10_000_000, ["x"], None, 7, FAILURE, "x\ny"])
def test_a_sender_believes_no_answer(answer: Any):
    to = mock.Mock(spec=Link, num_receivers=1, limit=timedelta(seconds=1), store=dist.HashStore())
    to.comes, to.read = lambda *arguments: Link.comes(to, *arguments), lambda *arguments: Link.read(to, *arguments)
    to.store.set("vote/1", json.dumps(answer))
    with pytest.raises(WeightsError, match="receiver 1: ") as caught:
        Link.check_answers(to, "vote", "accept the weights")
    assert len(str(caught.value)) < 2000 and str(caught.value).isprintable()


def test_a_patch_that_fails_half_way_leaves_no_version():
    to, receiver = _pair()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_serve, to, 1, _full(1), [_honest([*GOOD.items()])])
        receiver.receive()
        header = checked_json.as_json(Patch(2, receiver._state))
        parts = [(name, part) for name in GOOD for part in (_places(1), torch.tensor([9.0]))]
        apply, applied = WeightPatch.apply, []

        def fails(patch: WeightPatch, target: Tensor) -> None:
            applied.append(patch.name)
            if len(applied) == 2:
                raise MemoryError("no memory")
            apply(patch, target)

        pool.submit(_serve, to, 2, header, [_honest(parts)])
        with mock.patch.object(WeightPatch, "apply", fails), pytest.raises(WeightsError, match=r"no memory.*send all"):
            receiver.receive()
        assert (receiver.version, receiver._state, receiver.weights) == (None, "", {})
        assert "no memory" in to.read("round/2/done/1", str)
        pool.submit(_serve, to, 3, header, [])
        with pytest.raises(WeightsError, match="another base"):
            receiver.receive()
        pool.submit(_serve, to, 4, _full(4), [_honest([*GOOD.items()])])
        assert receiver.receive() == 4


def test_a_round_of_several_buckets_and_a_patch_are_taken():
    to, receiver = _pair(expected=_metas([*GOOD.items()]))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_serve, to, 1, _full(1), [([], []), *(_honest([part]) for part in GOOD.items())])
        assert receiver.receive() == 1
        header = checked_json.as_json(Patch(2, receiver._state))
        parts = [("b", _places(0, 3, dtype=torch.int64)), ("b", torch.tensor([7.0, 8.0]))]
        pool.submit(_serve, to, 2, header, [_honest(parts), ([], [])])
        assert receiver.receive() == 2 and receiver.weights["b"].tolist() == [7.0, 1.0, 1.0, 8.0]


def test_hashes_cover_names_shapes_and_versions():
    def of(header: dict[str, Any], parts: PARTS = ()) -> str:
        digest = new_hash(header)
        hash_bucket(digest, header["kind"], parts)
        return digest.hexdigest()

    one, other = (as_json(_metas([(name, torch.zeros(4))])) for name in "ab")
    patch = checked_json.as_json(Patch(1, ""))
    found = [of(_full(tensors=one)), of(_full(tensors=other)), of(_full(1)), of(_full(2))]
    found += [of(_full(tensors=[["a", dtype, shape]])) for dtype, shape in (("int32", [4]), ("float32", [2, 2]))]
    found += [of(patch, [part]) for part in (("a", torch.zeros(4)), ("b", torch.zeros(4)), ("a", torch.zeros(2, 2)))]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[" * 5000, b"1e999", b"9" * 40, b"null", b'{"kind": "Failure"}']
    + [
        json.dumps([["a", "int8", shape]]).encode()
        for shape in ([True], [1.0], [1 << 63], [0, 1 << 63], [1] * 65, "4")
    ]
    + [json.dumps(FAILURE | change).encode() for change in ({"reason": 1}, {"y": 1}, {"kind": "failure"})]
    + [b'"' + b"x" * (64 << 20) + b'"'],
    ids=lambda data: repr(data[:24]),
)
def test_what_is_no_message_is_refused(data: bytes):
    with pytest.raises(WeightsError, match=r"a message of weights (has|is) ") as caught:
        parse_message(data, Full | Patch | Bucket | Failure | str)
    assert len(str(caught.value)) < 1000


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _meet(address: str, secrets: tuple[bytes, bytes], limit_s: float, between: Callable[[], None] = bool) -> list[Any]:
    """Returns the links of a sender and a receiver with these secrets, or their errors."""

    def one(rank: int) -> Any:
        threading.current_thread().name = str(rank)
        try:
            if rank:
                between()
            return Link(address, rank, 1, limit_s, "gloo")
        except WeightsError as error:
            return error

    def secret_here(host: str) -> bytes:
        return secrets[int(threading.current_thread().name)] or job_secret.job_secret(host)

    with ThreadPoolExecutor(2) as pool, mock.patch.object(link, "job_secret", secret_here):
        return list(pool.map(one, range(2)))


SECRET, OTHER = b"a secret of sixteen", b"another secret of sixteen"


@pytest.mark.parametrize("secrets", [(SECRET, OTHER), (SECRET, b""), (b"", SECRET)])
def test_another_secret_is_refused_on_both_sides(secrets: tuple[bytes, bytes], port: int, no_secret: None):
    sender, receiver = _meet(f"127.0.0.1:{port}", secrets, 2.0)
    assert isinstance(sender, WeightsError) and "SHARDSTACK_JOB_SECRET" in str(sender) and "rank 1" in str(sender)
    assert isinstance(receiver, WeightsError) and "without the secret of the job" in str(receiver)


@pytest.fixture
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(job_secret.SECRET, raising=False)
    monkeypatch.delenv(job_secret.SECRET_FILE, raising=False)


def test_an_address_that_others_reach_takes_a_secret(port: int, no_secret: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_secret, "is_loopback", lambda host: False)
    for error in _meet(f"127.0.0.1:{port}", (b"", b""), 5.0):
        assert isinstance(error, WeightsError) and "other machines reach 127.0.0.1" in str(error)
    assert all(isinstance(found, Link) for found in _meet(f"127.0.0.1:{port}", (SECRET, SECRET), LIMIT_S))


def _listening() -> set[str]:
    """Returns the addresses at which this process listens, as the system writes them."""
    own = {path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_socket()}
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def test_a_sender_listens_at_its_address_alone(port: int, no_secret: None, monkeypatch: pytest.MonkeyPatch):
    for name in {name for _, name in socket.if_nameindex()} & {"eth0", "ens3", "enp1s0"}:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)  # the address says more
    before = _listening()
    links = _meet(f"127.0.0.1:{port}", (SECRET, SECRET), LIMIT_S)
    assert all(isinstance(found, Link) for found in links), links
    new = _listening() - before
    assert f"0100007F:{port:04X}" in new and len(new) > 1  # gloo's too
    assert all(address.startswith("0100007F:") for address in new), new


def _strangers(port: int) -> Iterator[socket.socket]:
    draw = random.Random(0)
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        draw.randbytes(4096),
        b"\x00" * 64,
        b"\x3c\x85\xf7\xbc" + b"\xff" * 64,
    ):
        stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
        with suppress(OSError):
            stranger.sendall(garbage)
        yield stranger


def test_strangers_at_the_port_stop_no_round(port: int, no_secret: None):
    there = []

    def come() -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
        there.extend([store, *_strangers(port)])
        store.set("round/1/header", json.dumps(_full(666)))

    to, from_ = _meet(f"127.0.0.1:{port}", (SECRET, SECRET), LIMIT_S, come)
    assert isinstance(to, Link) and isinstance(from_, Link), (to, from_)
    with mock.patch("core.weights.receiver.Link", lambda *arguments: from_):
        receiver = WeightReceiver("127.0.0.1:1", 0, 1)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(_serve, to, 1, _full(1), [_honest([*GOOD.items()])])
        there.extend(_strangers(port))
        assert receiver.receive() == 1 and sent.result() is None
    name = there[0].get("shardstack/round")[64:].decode()
    there[0].set(f"{name}/round/2/header", json.dumps(_full(666)))
    with pytest.raises(WeightsError, match="without the secret of the job"):
        receiver.receive()
    assert receiver.version == 1
    for stranger in there[1:]:
        stranger.close()
