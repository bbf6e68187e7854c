"""Sends weights to receivers in processes of their own, in rounds that a receiver takes whole or not at all.

The first rank of the trainer's group and all receivers form a group of their own, on a store of its own. A round::

    header   sender -> receivers   names, shapes, dtypes, version, base
    vote     receivers -> sender   what does not fit is refused before the first byte
    begins   sender -> receivers   all have agreed
    buckets  sender -> receivers   broadcast, each after all trainer ranks have finished its gather
    hash     sender -> receivers   of all bytes
    done     receivers -> sender   the new version is in place, or what failed

All but the buckets go through the store, as JSON. Nothing that is received is unpickled or run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import ShardstackError, WeightsError
from ..base.text import rank_list
from .patches import PatchStream, WeightPatch
from .stream import ParamMeta, WeightStream

Backend = Literal["gloo", "nccl"]
_ANSWER_S = 5.0
"""Seconds in which a receiver answers whose broadcast has failed; one that does not is the one that is lost."""
_LOST = "the connection was lost"


def _gloo(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, limit)


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _store(address: str, is_sender: bool, limit: timedelta) -> Store:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise WeightsError(f"the address of a stream of weights is {address!r}; give host:port")
    return TCPStore(host, int(port), is_master=is_sender, timeout=limit, wait_for_workers=False)


class _Link:
    """The group of the sender, rank 0, and the receivers, from 1, with the store of their messages."""

    def __init__(self, meeting: str | Store, rank: int, num_receivers: int, limit_s: float, backend: Backend) -> None:
        self.limit = timedelta(seconds=limit_s)
        self.rank, self.num_receivers = rank, num_receivers
        make, device = (_nccl, "cuda") if backend == "nccl" else (_gloo, "cpu")
        try:
            self.store = _store(meeting, rank == 0, self.limit) if isinstance(meeting, str) else meeting
            self.store.set_timeout(self.limit)
            self.group = make(PrefixStore("weights", self.store), rank, num_receivers + 1, self.limit)
            self.broadcast(torch.zeros(1, device=device))  # connects, or fails here
        except (RuntimeError, dist.DistError) as error:
            who = "the sender and the other receivers" if rank else f"{num_receivers} receivers"
            raise WeightsError(f"{who} did not meet in {limit_s:g} s ({_first_line(error)})") from error

    def broadcast(self, tensor: Tensor) -> None:
        self.group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str, limit_s: float | None = None) -> Any:
        """Returns a value that another rank writes; None if it does not within the limit, by default the link's."""
        try:
            self.store.wait([key], self.limit if limit_s is None else timedelta(seconds=limit_s))
            return json.loads(self.store.get(key))
        except (RuntimeError, dist.DistError):
            return None

    def check_answers(self, key: str, what: str, limit_s: float | None = None) -> None:
        """Raises unless every receiver has answered "", naming those that did not answer, or refused."""
        answers = {receiver: self.read(f"{key}/{receiver}", limit_s) for receiver in range(1, self.num_receivers + 1)}
        lost = [receiver for receiver, answer in answers.items() if answer is None]
        if lost:
            raise WeightsError(
                f"receivers of weights did not {what} within the limit: {rank_list(lost)}; look at their output, and "
                "make a new WeightSender once they are back"
            )
        refused = [f"receiver {receiver}: {answer}" for receiver, answer in answers.items() if answer]
        if refused:
            raise WeightsError(f"receivers of weights did not {what}: {'; '.join(refused)}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _new_hash(header: Mapping[str, Any]) -> Any:
    return hashlib.sha256("{kind} {version} {base}".format_map(header).encode())


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
        backend: of the group with the receivers.

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
        backend: Backend = "gloo",
    ) -> None:
        self.stream, self.ranks = stream, stream.tensors.ranks
        self.sends = self.ranks.rank == stream.tensors.receivers[0]
        # Knows what the receivers have, where patches are sent; fixed.
        self._patches = PatchStream(stream) if patches else None
        # Rounds so far, failed ones included, and the hash that names the version of all receivers: "" before the
        # first round, and after one that failed, since only some of them may have taken it.
        self._round, self._state = 0, ""
        # Bytes of the last round's buckets, on the rank that sends. Each round sets it.
        self.sent_bytes = 0
        # The group with the receivers, on the rank that sends; None elsewhere, and after a receiver was lost.
        self._link: _Link | None = None

        def connect() -> None:
            self._link = _Link(address, 0, num_receivers, limit_s, backend)

        self._agreed(connect)

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
        described = {"tensors": tensors, "buckets": self.stream.bucket_names()}
        self._send_round({"kind": "full", "version": version, "base": "", **described}, self._full_buckets())

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
        buckets = len(self.stream.tensors.bucket_names())
        header = {"kind": "patch", "version": version, "base": self._state, "num_buckets": buckets}
        self._send_round(header, self._patch_buckets(self._patches))
        self._patches.acknowledge()

    def _full_buckets(self) -> Iterator[tuple[None, Tensor]]:
        for bucket in self.stream.buckets():
            yield None, _packed([tensor for _, tensor in bucket]) if self.sends else torch.empty(0)

    def _patch_buckets(self, patches: PatchStream) -> Iterator[tuple[list[Any], Tensor]]:
        for bucket in patches.changes():
            heads = [[patch.name, len(patch.indices), dtype_name(patch.indices.dtype)] for patch in bucket]
            yield heads, _packed([part for patch in bucket for part in (patch.indices, patch.values)])

    def _send_round(self, header: Mapping[str, Any], buckets: Iterator[tuple[Any, Tensor]]) -> None:
        self._round += 1
        key, digest, failures = f"round/{self._round}", _new_hash(header), list[WeightsError]()
        self._state, self.sent_bytes = "", 0
        self._agreed(lambda: self._run(lambda link: self._open(link, key, header)))
        for number, (head, packed) in enumerate(buckets):  # to the end in any case: the other ranks gather along
            if self.sends and not failures:
                try:
                    self._run(partial(self._send_bucket, key, number, head, packed))
                    digest.update(packed.cpu().numpy())
                    self.sent_bytes += len(packed)
                except WeightsError as error:
                    failures.append(error)

        def close(link: _Link) -> None:
            for failure in failures:
                raise failure
            link.write(f"{key}/hash", digest.hexdigest())
            link.check_answers(f"{key}/done", "confirm the weights")

        self._agreed(lambda: self._run(close))
        self._state = digest.hexdigest()

    def _run(self, step: Callable[[_Link], None]) -> None:
        if self._link is None:
            raise WeightsError("receivers of weights were lost before; make a new WeightSender once they are back")
        try:
            step(self._link)
        except WeightsError as error:
            if "within the limit" in str(error):
                self._link = None
            raise

    def _open(self, link: _Link, key: str, header: Mapping[str, Any]) -> None:
        link.write(f"{key}/header", header)
        try:
            link.check_answers(f"{key}/vote", "accept the weights")
        except WeightsError:
            link.write(f"{key}/begins", False)
            raise
        link.write(f"{key}/begins", True)

    def _send_bucket(self, key: str, number: int, head: Any, packed: Tensor, link: _Link) -> None:
        if head is not None:
            link.write(f"{key}/bucket/{number}", head)
        try:
            if len(packed):
                link.broadcast(packed)
        except RuntimeError as error:
            link.check_answers(f"{key}/done", "take the weights", _ANSWER_S)
            raise WeightsError(f"weights could not be sent within the limit ({_first_line(error)})") from error


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
        backend: Backend = "gloo",
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= index < num_receivers:
            raise WeightsError(f"a receiver's index is {index} of {num_receivers}; give 0 to {num_receivers - 1}")
        self._link = _Link(address, index + 1, num_receivers, limit_s, backend)
        self.device = torch.device(device)
        self._expected = None if expected is None else {meta.name: meta for meta in expected}
        # The newest complete version and its tensors, which `receive` replaces at the end of a round; None and empty
        # before the first. A patch writes into them after its last byte was checked.
        self.version: int | None = None
        self.weights: dict[str, Tensor] = {}
        # Rounds so far, as the sender counts them, and the hash that names the version.
        self._round, self._state = 0, ""

    def receive(self, limit_s: float | None = None) -> int:
        """Waits for the next round, takes it, and returns its version.

        Args:
            limit_s: seconds to wait for a round to begin; None is the receiver's limit.

        Raises:
            WeightsError: no round in time, the sender was lost, the round was refused or damaged. `weights` are those
                of the version before.
        """
        key, link = f"round/{self._round + 1}", self._link
        header = link.read(f"{key}/header", limit_s)
        if header is None:
            raise WeightsError("no round of weights began in time; look at the trainer's output")
        self._round += 1
        refusal = self._refusal(header)
        link.write(f"{key}/vote/{link.rank}", refusal)
        if refusal or not link.read(f"{key}/begins"):
            raise WeightsError(
                f"the round of weights did not begin: {refusal or 'another receiver refused or is lost'}"
            )
        digest = _new_hash(header)
        try:
            commit = (self._take_patch if header["kind"] == "patch" else self._take_all)(key, header, digest)
            sent = link.read(f"{key}/hash")
            if sent is None:
                raise RuntimeError("its hash did not come within the limit")
        except RuntimeError as error:
            link.write(f"{key}/done/{link.rank}", _LOST)
            raise WeightsError(
                f"the sender of weights was lost ({_first_line(error)}); the last version stays"
            ) from error
        damage = "" if sent == digest.hexdigest() else "the bytes that arrived are not those that were sent"
        if not damage:
            commit()
            self.version, self._state = header["version"], digest.hexdigest()
        link.write(f"{key}/done/{link.rank}", damage)
        if damage:
            raise WeightsError(f"version {header['version']} of the weights is damaged: {damage}; the last one stays")
        return int(header["version"])

    def _refusal(self, header: Mapping[str, Any]) -> str:
        if header["kind"] == "patch":
            if header["base"] == self._state:
                return ""
            return f"the patch is of another base than version {self.version}, which is here; send all weights"
        sent = {name: ParamMeta(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in header["tensors"]}
        expected = sent if self._expected is None else self._expected
        for name in sorted(sent.keys() | expected.keys()):
            if name not in sent or name not in expected:
                return f"{name} is not {'sent' if name not in sent else 'known here'}"
            if sent[name] != expected[name]:
                return f"{name} comes as {_shown(sent[name])}, and is {_shown(expected[name])} here"
        return ""

    def _take_all(self, key: str, header: Mapping[str, Any], digest: Any) -> Callable[[], None]:
        metas = {name: (DTYPES[dtype], tuple(shape)) for name, dtype, shape in header["tensors"]}
        received: dict[str, Tensor] = {}
        for names in header["buckets"]:
            sizes = [math.prod(metas[name][1]) * metas[name][0].itemsize for name in names]
            for name, part in zip(names, self._bucket(sizes, digest), strict=True):
                received[name] = part.view(metas[name][0]).view(metas[name][1])
        return lambda: setattr(self, "weights", received)

    def _take_patch(self, key: str, header: Mapping[str, Any], digest: Any) -> Callable[[], None]:
        patches: list[WeightPatch] = []
        for number in range(header["num_buckets"]):
            heads = self._link.read(f"{key}/bucket/{number}")
            if heads is None:
                raise RuntimeError("no further bucket came within the limit")
            dtypes = [dtype for name, _, kind in heads for dtype in (DTYPES[kind], self.weights[name].dtype)]
            counts = [count for _, count, _ in heads for _ in range(2)]
            parts = self._bucket([n * dtype.itemsize for n, dtype in zip(counts, dtypes, strict=True)], digest)
            typed = [part.view(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
            names = [name for name, _, _ in heads]
            patches += [WeightPatch(*patch) for patch in zip(names, typed[::2], typed[1::2], strict=True)]

        def commit() -> None:
            for patch in patches:
                patch.apply(self.weights[patch.name])

        return commit

    def _bucket(self, sizes: Sequence[int], digest: Any) -> list[Tensor]:
        """Receives a bucket, and returns the bytes of each of its tensors in memory of its own."""
        if not sum(sizes):
            return [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in sizes]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._link.broadcast(packed)
        digest.update(packed.cpu().numpy())
        return [part.clone() for part in packed.split(list(sizes))]


def _shown(meta: ParamMeta) -> str:
    return f"{dtype_name(meta.dtype)} {list(meta.shape)}"
