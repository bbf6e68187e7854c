"""Sends weights to receivers in processes of their own, in rounds that a receiver takes whole or not at all.

The first rank of the trainer's group and all receivers form a group of their own, on a store of its own. A round::

    header (names, shapes, dtypes, version)   sender -> receivers, through the store
    vote                                      receivers -> sender: what does not fit is refused before the first byte
    buckets                                   broadcast, each after all trainer ranks have finished its gather
    hash of all bytes                         sender -> receivers
    done                                      receivers -> sender, after the new version is in place

Nothing that is received is unpickled or run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from ..dtypes import DTYPES, dtype_name
from ..errors import ShardstackError, WeightsError
from ..text import rank_list
from .patches import PatchStream, WeightPatch
from .stream import ParamMeta, WeightStream

Kind = Literal["full", "patch"]

_POLL = timedelta(milliseconds=200)


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


_BACKENDS: dict[str, Callable[[Store, int, int, timedelta], Any]] = {
    "gloo": lambda store, rank, size, limit: dist.ProcessGroupGloo(store, rank, size, limit),
    "nccl": _nccl,
}


def _store(address: str, is_sender: bool, limit: timedelta) -> Store:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise WeightsError(f"the address of a stream of weights is {address!r}; give host:port")
    return TCPStore(host, int(port), is_master=is_sender, timeout=limit, wait_for_workers=False)


class _Link:
    """The group of the sender, rank 0, and the receivers, from 1, with the store of their messages."""

    def __init__(self, meeting: str | Store, rank: int, num_receivers: int, limit_s: float, backend: str) -> None:
        self.limit = timedelta(seconds=limit_s)
        self.rank, self.num_receivers = rank, num_receivers
        try:
            self.store = _store(meeting, rank == 0, self.limit) if isinstance(meeting, str) else meeting
            self.store.set_timeout(self.limit)
            self.group = _BACKENDS[backend](PrefixStore("weights", self.store), rank, num_receivers + 1, self.limit)
            self.broadcast(torch.zeros(1, device="cuda" if backend == "nccl" else "cpu"))  # connects, or fails here
        except (RuntimeError, dist.DistError) as error:
            who = "the sender and the other receivers" if rank else f"{num_receivers} receivers"
            raise WeightsError(f"{who} did not meet in {limit_s:g} s ({_first_line(error)})") from error

    def broadcast(self, tensor: Tensor) -> None:
        self.group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str, limit: timedelta | None = None) -> Any:
        """Returns a value that another rank writes; None if it does not within the limit."""
        try:
            self.store.wait([key], self.limit if limit is None else limit)
            return json.loads(self.store.get(key))
        except (RuntimeError, dist.DistError):
            return None

    def answers(self, key: str) -> dict[int, Any]:
        """Returns each receiver's answer; None for one that does not answer within the limit."""
        return {receiver: self.read(f"{key}/{receiver}") for receiver in range(1, self.num_receivers + 1)}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class WeightSender:
    """Sends a stream's weights to receivers. Every rank of the trainer's group calls each method together.

        stream = WeightStream(model, dtype=torch.bfloat16, receivers=[0])
        sender = WeightSender(stream, "10.0.0.1:29600", num_receivers=2, patches=True)
        for step in ...:
            train()
            sender.send_patch(version=step)         # what changed, or all weights where receivers have no base

    Args:
        stream: its first receiver is the rank that sends.
        address: ``host:port`` where that rank listens and receivers meet it, or a store that all of them share.
        num_receivers: receivers, which all have to come.
        patches: keep what was sent, for `send_patch`: a copy of each rank's pieces in the dtype of the wire.
        limit_s: seconds that a receiver may take for an answer or a bucket, before it counts as lost.
        backend: ``gloo`` or ``nccl``, of the group with the receivers.

    Raises:
        WeightsError: on all ranks: receivers did not come in time.
    """

    def __init__(
        self,
        stream: WeightStream,
        address: str | Store,
        num_receivers: int,
        *,
        patches: bool = False,
        limit_s: float = 300.0,
        backend: Literal["gloo", "nccl"] = "gloo",
    ) -> None:
        self.stream, self.ranks = stream, stream.tensors.ranks
        self.sends = self.ranks.rank == stream.tensors.receivers[0]
        # The group with the receivers, on the rank that sends; None elsewhere, and after `close`.
        self._link: _Link | None = None
        # Knows what the receivers have, where patches are sent; fixed.
        self._patches = PatchStream(stream) if patches else None
        # Rounds so far, failed ones included, and the hash that names the version of all receivers: "" before the
        # first round, and after one that failed, since only some of them may have taken it.
        self._round, self._state = 0, ""
        # Bytes of the last round's buckets. `send` and `send_patch` set it, on the rank that sends.
        self.sent_bytes = 0
        self._agreed(lambda: self._connect(address, num_receivers, limit_s, backend))

    def _connect(self, address: str | Store, num_receivers: int, limit_s: float, backend: str) -> None:
        self._link = _Link(address, 0, num_receivers, limit_s, backend)

    def _agreed(self, run: Callable[[], None]) -> None:
        """Runs something on the rank that sends, and raises its error on all ranks."""
        message = ""
        try:
            if self.sends:
                run()
        except ShardstackError as error:
            message = str(error)
        failures = [text for text in self.ranks.all_gather(message) if text]
        if failures:
            raise WeightsError(failures[0])

    def send(self, version: int) -> None:
        """Sends all weights. Receivers have them when it returns.

        Raises:
            WeightsError: on all ranks, with the receivers that are lost or refused. Training may go on; the receivers
                keep the version that they had.
        """
        if self._patches is not None:
            self._patches.restart()
        tensors = [[meta.name, dtype_name(meta.dtype), list(meta.shape)] for meta in self.stream.metadata()]
        described = {"tensors": tensors, "buckets": self.stream.bucket_names(), "base": ""}
        self._send_round("full", version, described, self._full_buckets())

    def send_patch(self, version: int) -> None:
        """Sends what changed since the version that the receivers have, and all weights if they have none, or if the
        last round failed.

        Raises:
            ShardstackError: the sender was made without `patches`.
            WeightsError: as `send` does.
        """
        if self._patches is None:
            raise ShardstackError("send_patch was called on a WeightSender without patches; make it with patches=True")
        if not self._state:
            self.send(version)
            return
        described = {"base": self._state, "num_buckets": len(self.stream.tensors.bucket_names())}
        self._send_round("patch", version, described, self._patch_buckets(self._patches))
        self._patches.acknowledge()

    def _full_buckets(self) -> Iterator[tuple[None, Tensor]]:
        for bucket in self.stream.buckets():
            yield None, _packed([tensor for _, tensor in bucket]) if self.sends else torch.empty(0)

    def _patch_buckets(self, patches: PatchStream) -> Iterator[tuple[list[Any], Tensor]]:
        for bucket in patches.changes():
            heads = [[patch.name, len(patch.indices), dtype_name(patch.indices.dtype)] for patch in bucket]
            yield heads, _packed([part for patch in bucket for part in (patch.indices, patch.values)])

    def _send_round(
        self, kind: Kind, version: int, described: Mapping[str, Any], buckets: Iterator[tuple[Any, Tensor]]
    ) -> None:
        self._round += 1
        key = f"round/{self._round}"
        self._state, self.sent_bytes = "", 0
        self._agreed(lambda: self._open(key, {"kind": kind, "version": version, **described}))
        digest = _new_hash(kind, version, described["base"])
        failures: list[str] = []
        for number, (head, packed) in enumerate(buckets):  # to the end in any case: the other ranks gather along
            if self.sends and not failures:
                try:
                    self._send_bucket(f"{key}/bucket/{number}", head, packed, digest)
                except WeightsError as error:
                    failures.append(str(error))
        self._agreed(lambda: self._close(key, digest.hexdigest(), failures))
        self._state = digest.hexdigest()

    def _open(self, key: str, header: Mapping[str, Any]) -> None:
        link = self._connected()
        link.write(f"{key}/header", header)
        answers = link.answers(f"{key}/vote")
        link.write(f"{key}/begins", all(answer == "" for answer in answers.values()))
        self._check_answers(answers, "take the weights")

    def _send_bucket(self, key: str, head: Any, packed: Tensor, digest: Any) -> None:
        link = self._connected()
        if head is not None:
            link.write(key, head)
        if not len(packed):
            return
        try:
            link.broadcast(packed)
        except RuntimeError as error:
            states = {r: link.read(f"alive/{r}", _POLL) for r in range(1, link.num_receivers + 1)}
            self._link = None
            raise WeightsError(
                f"the connection to a receiver of weights was lost ({_first_line(error)}); the last that each "
                f"confirmed is {', '.join(f'{r}: {state}' for r, state in states.items())}; make a new WeightSender "
                "once they are back"
            ) from error
        digest.update(packed.cpu().numpy())
        self.sent_bytes += len(packed)

    def _close(self, key: str, digest: str, failures: Sequence[str]) -> None:
        if failures:
            raise WeightsError(failures[0])
        link = self._connected()
        link.write(f"{key}/hash", digest)
        self._check_answers(link.answers(f"{key}/done"), "confirm the weights")

    def _check_answers(self, answers: Mapping[int, Any], what: str) -> None:
        lost = [receiver for receiver, answer in answers.items() if answer is None]
        refusals = [
            f"receiver {receiver}: {answer}" for receiver, answer in answers.items() if answer not in (None, "")
        ]
        if lost:
            self._link = None
            raise WeightsError(
                f"receivers of weights did not {what} within the limit: {rank_list(lost)}; look at their output, and "
                "make a new WeightSender once they are back"
            )
        if refusals:
            raise WeightsError(f"weights were refused: {'; '.join(refusals)}")

    def _connected(self) -> _Link:
        if self._link is None:
            raise WeightsError("receivers of weights were lost before; make a new WeightSender once they are back")
        return self._link


def _new_hash(kind: str, version: int, base: str) -> Any:
    return hashlib.sha256(f"{kind} {version} {base}".encode())


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of tensors, one after the other."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


class WeightReceiver:
    """Receives weights, and keeps the newest complete version. For tests, and for servers of one's own.

    Args:
        address: ``host:port`` of the sender, or the store.
        index: this receiver among `num_receivers`, from 0.
        expected: what this receiver can take; None takes what comes.
        limit_s, backend: as of `WeightSender`.
        device: where weights are kept.

    Raises:
        WeightsError: the sender was not there in time.
    """

    def __init__(
        self,
        address: str | Store,
        index: int,
        num_receivers: int,
        *,
        expected: Sequence[ParamMeta] | None = None,
        limit_s: float = 300.0,
        backend: Literal["gloo", "nccl"] = "gloo",
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= index < num_receivers:
            raise WeightsError(f"a receiver's index is {index} of {num_receivers}; give 0 to {num_receivers - 1}")
        self._link = _Link(address, index + 1, num_receivers, limit_s, backend)
        self.device = torch.device(device)
        self._expected = None if expected is None else list(expected)
        # The newest complete version and its tensors, which `receive` replaces at the end of a round; None and empty
        # before the first. A patch writes into them after its last byte was checked.
        self.version: int | None = None
        self.weights: dict[str, Tensor] = {}
        # Rounds so far, as the sender counts them, and the hash that names the version.
        self._round, self._state = 0, ""

    def receive(self, limit_s: float | None = None) -> int:
        """Waits for the next round, takes it, and returns its version.

        Args:
            limit_s: seconds to wait for a round to begin; None waits for ever.

        Raises:
            WeightsError: no round in time, the sender was lost, the round was refused or damaged. `weights` are those
                of the version before.
        """
        key = f"round/{self._round + 1}"
        header = self._wait_for_header(key, limit_s)
        self._round += 1
        refusal = self._refusal(header)
        self._link.write(f"{key}/vote/{self._link.rank}", refusal)
        if refusal:
            raise WeightsError(f"weights were refused: {refusal}")
        if not self._link.read(f"{key}/begins"):
            raise WeightsError("the round of weights was ended before it began: another receiver refused, or is lost")
        digest = _new_hash(header["kind"], header["version"], header["base"])
        self._alive(f"the header of version {header['version']}")
        take = self._take_patch if header["kind"] == "patch" else self._take_all
        try:
            commit = take(key, header, digest)
        except RuntimeError as error:
            raise WeightsError(
                f"the sender of weights was lost ({_first_line(error)}); this receiver keeps version {self.version}"
            ) from error
        sent = self._link.read(f"{key}/hash")
        damage = "" if sent == digest.hexdigest() else "the bytes that arrived are not those that were sent"
        if not damage:
            commit()
            self.version, self._state = header["version"], digest.hexdigest()
        self._link.write(f"{key}/done/{self._link.rank}", damage)
        if damage:
            raise WeightsError(f"version {header['version']} of the weights is damaged: {damage}; version kept")
        return int(header["version"])

    def _wait_for_header(self, key: str, limit_s: float | None) -> dict[str, Any]:
        limit = self._link.limit if limit_s is None else timedelta(seconds=limit_s)
        while True:
            header = self._link.read(f"{key}/header", limit)
            if header is not None:
                return dict(header)
            if limit_s is not None or not self._sender_is_there():
                raise WeightsError(f"no weights came in {limit.total_seconds():g} s; look at the trainer's output")

    def _sender_is_there(self) -> bool:
        try:
            self._link.store.check(["alive"])
            return True
        except (RuntimeError, dist.DistError):
            return False

    def _alive(self, what: str) -> None:
        self._link.write(f"alive/{self._link.rank}", what)

    def _refusal(self, header: Mapping[str, Any]) -> str:
        if header["kind"] == "patch":
            if header["base"] == self._state:
                return ""
            return f"the patch is of another base than version {self.version}, which is here; send all weights"
        sent = {name: ParamMeta(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in header["tensors"]}
        expected = {meta.name: meta for meta in self._expected} if self._expected is not None else sent
        for name in sorted(sent.keys() | expected.keys()):
            if name not in sent or name not in expected:
                return f"{name} is {'not sent' if name not in sent else 'not known'} here"
            if sent[name] != expected[name]:
                return f"{name} comes as {_shown(sent[name])}, and is {_shown(expected[name])} here"
        return ""

    def _take_all(self, key: str, header: Mapping[str, Any], digest: Any) -> Callable[[], None]:
        metas = {name: (DTYPES[dtype], tuple(shape)) for name, dtype, shape in header["tensors"]}
        received: dict[str, Tensor] = {}
        for number, names in enumerate(header["buckets"]):
            sizes = [math.prod(metas[name][1]) * metas[name][0].itemsize for name in names]
            packed = self._bucket(sum(sizes), number, digest)
            for name, part in zip(names, packed.split(sizes), strict=True):
                received[name] = part.clone().view(metas[name][0]).view(metas[name][1])
        return lambda: setattr(self, "weights", received)

    def _take_patch(self, key: str, header: Mapping[str, Any], digest: Any) -> Callable[[], None]:
        patches: list[WeightPatch] = []
        for number in range(header["num_buckets"]):
            heads = self._link.read(f"{key}/bucket/{number}")
            if heads is None:
                raise RuntimeError("it sent no further bucket within the limit")
            sizes = [
                size
                for name, count, indices in heads
                for size in (count * DTYPES[indices].itemsize, count * self.weights[name].element_size())
            ]
            parts = iter(self._bucket(sum(sizes), number, digest).split(sizes) if sizes else ())
            for name, _, indices in heads:
                places, values = next(parts).clone(), next(parts).clone()
                patches.append(WeightPatch(name, places.view(DTYPES[indices]), values.view(self.weights[name].dtype)))
        return lambda: self._apply(patches)

    def _apply(self, patches: Sequence[WeightPatch]) -> None:
        for patch in patches:
            patch.apply(self.weights[patch.name])

    def _bucket(self, num_bytes: int, number: int, digest: Any) -> Tensor:
        packed = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if num_bytes:
            self._link.broadcast(packed)
            digest.update(packed.cpu().numpy())
        self._alive(f"bucket {number} of round {self._round}")
        return packed


def _shown(meta: ParamMeta) -> str:
    return f"{dtype_name(meta.dtype)} {list(meta.shape)}"
