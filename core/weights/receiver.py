"""Receives weights, for tests and for servers of one's own, over a group and a store that sender and receivers share.

The first rank of the trainer's group and all receivers form a group of their own, on a store of its own. A round::

    header  sender -> receivers   names, shapes, dtypes, version, base
    vote    receivers -> sender   what does not fit is refused before the first byte
    bucket  sender -> receivers   names, shapes and dtypes of a bucket, whose tensors are broadcast once all trainer
                                  ranks have finished its gather, while they gather the next one; after the last bucket
                                  a hash, or why none follows
    done    receivers -> sender   the new version is in place, or what failed

All but the tensors goes through the store, as JSON. Nothing that is received is unpickled or run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import WeightsError
from ..base.text import first_line, rank_list
from ..comm.messages import as_bytes
from ..dist_checkpointing.gathering import ParamMeta
from .patches import WeightPatch

Backend = Literal["gloo", "nccl"]

_ROW_BYTES = 8 * 4093
"""Bytes of a row of 64-bit words, the columns of which are added for a hash. A prime number of words: tensors of usual
sizes that change places change columns."""


class WeightReceiver:
    """Receives weights, and keeps the newest complete version. For tests, and for servers of one's own.

    Args:
        address: ``host:port`` of the sender, or the store.
        index: this receiver among `num_receivers`, from 0.
        expected: what this receiver can take; None takes what comes, or what `into` has.
        into: contiguous tensors by name, such as a server's own, which full rounds are received into, without the
            memory of a second version. A round that fails leaves some of them new, and no version, until the next full
            one. None receives each version into new memory, next to the last one.
        limit_s, backend: as of `WeightSender`.
        device: where weights are kept; of `into` it is theirs.

    Raises:
        WeightsError: the sender was not there in time, or a tensor of `into` is not contiguous.
    """

    def __init__(
        self,
        address: str | Store,
        index: int,
        num_receivers: int,
        *,
        expected: Sequence[ParamMeta] | None = None,
        into: Mapping[str, Tensor] | None = None,
        limit_s: float = 300.0,
        backend: Backend = "gloo",
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= index < num_receivers:
            raise WeightsError(f"a receiver's index is {index} of {num_receivers}; give 0 to {num_receivers - 1}")
        self._into = into or {}  # fixed
        scattered = [name for name, tensor in self._into.items() if not tensor.is_contiguous()]
        if scattered:
            raise WeightsError(
                f"{scattered[0]} of into is not contiguous; give memory that bytes can be received into"
            )
        if into is not None:
            expected = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in into.items()]
        self._link = Link(address, index + 1, num_receivers, limit_s, backend)
        self.device = next((tensor.device for tensor in self._into.values()), torch.device(device))
        self._expected = None if expected is None else {meta.name: meta for meta in expected}
        # The newest complete version and its tensors, which `receive` replaces at the end of a round; None and empty
        # before the first, and with `into` from the first bytes of a round. A patch writes into them after its last
        # byte was checked.
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
                of the version before, or with `into` of none.
        """
        key, link = f"round/{self._round + 1}", self._link
        header = link.read(f"{key}/header", limit_s)
        if header is None:
            raise WeightsError("no round of weights began in time; look at the trainer's output")
        self._round += 1
        link.write(f"{key}/vote/{link.rank}", self._refusal(header))
        digest, version = new_hash(header), int(header["version"])
        into = self._into if header["kind"] == "full" else {}
        try:
            received, sent = self._take(key, digest, into)
            if sent != digest.hexdigest():
                raise RuntimeError("the bytes that arrived are not those that were sent")
        except RuntimeError as error:
            link.write(f"{key}/done/{link.rank}", first_line(error))
            raise WeightsError(
                f"version {version} of the weights was not received ({first_line(error)}); "
                + ("send all of them again" if into else "the last one stays")
            ) from error
        if header["kind"] == "patch":
            for (name, indices), (_, values) in zip(received[::2], received[1::2], strict=True):
                WeightPatch(name, indices, values).apply(self.weights[name])
        else:
            self.weights = dict(received)
        self.version, self._state = version, sent
        link.write(f"{key}/done/{link.rank}", "")
        return version

    def _refusal(self, header: Mapping[str, Any]) -> str:
        if header["kind"] == "patch":
            if header["base"] == self._state:
                return ""
            return f"the patch is of another base than version {self.version}, which is here; send all weights"
        sent = {meta.name: meta for meta in from_json(header["tensors"])}
        expected = sent if self._expected is None else self._expected
        for name in sorted(sent.keys() | expected.keys()):
            if name not in sent or name not in expected:
                return f"{name} is not {'sent' if name not in sent else 'known here'}"
            if sent[name] != expected[name]:
                return f"{name} comes as {_shown(sent[name])}, and is {_shown(expected[name])} here"
        return ""

    def _take(self, key: str, digest: Any, memory: Mapping[str, Tensor]) -> tuple[list[tuple[str, Tensor]], str]:
        """Returns what comes in a round, in given memory or in its own, and the hash that comes after it."""
        received, last, number = list[tuple[str, Tensor]](), list[Tensor](), 0
        while isinstance(head := self._link.read(f"{key}/bucket/{number}"), list):
            metas = from_json(head)
            if memory:
                self.version, self._state, self.weights = None, "", {}
            empty = partial(torch.empty, device=self.device)
            tensors = [memory[m.name] if memory else empty(m.shape, dtype=m.dtype) for m in metas]
            waits = [self._link.broadcast(tensor) for tensor in tensors]
            for tensor in last:  # while these arrive
                update_hash(digest, tensor)
            for wait in waits:
                wait()
            received += zip((meta.name for meta in metas), tensors, strict=True)
            last, number = tensors, number + 1
        if not isinstance(head, str):
            raise RuntimeError(head["failure"] if head else "the sender was lost")
        for tensor in last:
            update_hash(digest, tensor)
        return received, head


def _shown(meta: ParamMeta) -> str:
    return f"{dtype_name(meta.dtype)} {list(meta.shape)}"


class Link:
    """The group of the sender, rank 0, and the receivers, from 1, with the store of their messages."""

    def __init__(self, meeting: str | Store, rank: int, num_receivers: int, limit_s: float, backend: Backend) -> None:
        self.limit = timedelta(seconds=limit_s)
        self.rank, self.num_receivers = rank, num_receivers
        device = "cuda" if backend == "nccl" else "cpu"
        try:
            self.store = _store(meeting, rank == 0, self.limit) if isinstance(meeting, str) else meeting
            self.store.set_timeout(self.limit)
            # The connections. `close` sets it to None, once a receiver is lost.
            self.group = _group(PrefixStore("weights", self.store), rank, num_receivers + 1, self.limit, backend)
            self.broadcast(torch.zeros(1, device=device))()  # connects, or fails here
        except (RuntimeError, dist.DistError) as error:
            who = "the sender and the other receivers" if rank else f"{num_receivers} receivers"
            raise WeightsError(f"{who} did not meet in {limit_s:g} s ({first_line(error)})") from error

    def broadcast(self, tensor: Tensor) -> Callable[[], object]:
        """Starts to send a contiguous tensor to the receivers, or to receive it. Returns what waits for it."""
        return self.group.broadcast([as_bytes(tensor)], dist.BroadcastOptions()).wait if tensor.numel() else bool

    def close(self) -> None:
        """Ends the connections, so that ranks that wait for bytes fail at once. Messages can still be read."""
        self.group = None

    def write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str, limit_s: float | None = None) -> Any:
        """Returns a value that another rank writes. None if it does not within the limit, by default the link's."""
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
            self.close()
            raise WeightsError(
                f"receivers of weights did not {what} within the limit: {rank_list(lost)}; look at their output, and "
                "make a new WeightSender once they are back"
            )
        refused = [f"receiver {receiver}: {answer}" for receiver, answer in answers.items() if answer]
        if refused:
            raise WeightsError(f"receivers of weights did not {what}: {'; '.join(refused)}")


def _group(store: Store, rank: int, size: int, limit: timedelta, backend: Backend) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _store(address: str, is_sender: bool, limit: timedelta) -> Store:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise WeightsError(f"the address of a stream of weights is {address!r}; give host:port")
    return TCPStore(host, int(port), is_master=is_sender, timeout=limit, wait_for_workers=False)


def new_hash(header: Mapping[str, Any]) -> Any:
    return hashlib.sha256("{kind} {version} {base}".format_map(header).encode())


def update_hash(digest: Any, tensor: Tensor) -> None:
    """Adds the column sums of a contiguous tensor's bytes to a hash: a hash of all of them would take longer than
    sending them does."""
    memory = as_bytes(tensor.clone() if tensor.storage_offset() * tensor.itemsize % 8 else tensor)  # words are aligned
    end = len(memory) - len(memory) % _ROW_BYTES
    digest.update(memory[end:].cpu().numpy().data)
    if end:  # modulo 2^64
        digest.update(memory[:end].view(-1, _ROW_BYTES).view(torch.int64).sum(0).cpu().numpy().data)


def as_json(metas: Iterable[ParamMeta]) -> list[Any]:
    return [[meta.name, dtype_name(meta.dtype), list(meta.shape)] for meta in metas]


def from_json(value: Iterable[Any]) -> list[ParamMeta]:
    return [ParamMeta(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in value]
