"""The group of a sender and its receivers, and the store of their messages.

The first rank of the trainer's group and all receivers form a group of their own, on a store of its own. A round::

    header  sender -> receivers   names, shapes, dtypes, version, base
    vote    receivers -> sender   what does not fit is refused before the first byte
    bucket  sender -> receivers   names, shapes and dtypes of a bucket, which is broadcast once all trainer ranks have
                                  finished its gather, while they gather the next one; after the last bucket a hash,
                                  or why none follows
    done    receivers -> sender   the new version is in place, or what failed

All but the tensors goes through the store, as JSON. Nothing that is received is unpickled or run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import WeightsError
from ..base.text import rank_list
from ..dist_checkpointing.gathering import ParamMeta

Backend = Literal["gloo", "nccl"]

_ROW_BYTES = 8 * 4093
"""Bytes of a row of 64-bit words, the columns of which are added for a hash. A prime number of words: tensors of usual
sizes that change places change columns."""


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

    def broadcast(self, memory: Tensor) -> Callable[[], object]:
        """Starts to send bytes to the receivers, or to receive them. Returns what waits for them."""
        return self.group.broadcast([memory], dist.BroadcastOptions()).wait if len(memory) else bool

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


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def new_hash(header: Mapping[str, Any]) -> Any:
    return hashlib.sha256("{kind} {version} {base}".format_map(header).encode())


def update_hash(digest: Any, memory: Tensor) -> None:
    """Adds the column sums of bytes to a hash: a hash of all of them would take longer than sending them does."""
    end = len(memory) - len(memory) % _ROW_BYTES
    digest.update(memory[end:].cpu().numpy().data)
    if end:  # modulo 2^64
        digest.update(memory[:end].view(-1, _ROW_BYTES).view(torch.int64).sum(0).cpu().numpy().data)


def as_json(metas: Iterable[ParamMeta]) -> list[Any]:
    return [[meta.name, dtype_name(meta.dtype), list(meta.shape)] for meta in metas]


def from_json(value: Iterable[Any]) -> list[ParamMeta]:
    return [ParamMeta(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in value]


def bytes_of(metas: Iterable[ParamMeta]) -> int:
    return sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in metas)


def views_of(memory: Tensor, metas: Sequence[ParamMeta]) -> list[Tensor]:
    """Returns the tensors of a bucket as views of its bytes, where those of large elements come first: all are
    aligned."""
    order = sorted(range(len(metas)), key=lambda place: -metas[place].dtype.itemsize)
    parts = memory.split([bytes_of([metas[place]]) for place in order]) if order else ()
    views = {place: part.view(metas[place].dtype) for place, part in zip(order, parts, strict=True)}
    return [views[place].view(meta.shape) for place, meta in enumerate(metas)]
