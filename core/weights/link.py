"""The connections of a sender of weights and its receivers: a group of their own, and a store for their messages."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from ..base.checked_json import as_json
from ..base.errors import ConfigError, WeightsError
from ..base.text import first_line, join_parts, rank_list
from ..comm.lane import wait_until
from ..comm.messages import as_bytes
from ..rendezvous.environment import MOST_PORT
from ..rendezvous.job_secret import SECRET, SECRET_FILE, job_secret, listen
from ..rendezvous.launchers import fresh_store
from ..rendezvous.signed_store import SignedStore
from .messages import parse_message, plain

Backend = Literal["gloo", "nccl"]
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class Link:
    """The group of the sender, rank 0, and the receivers, from 1, with the store of their messages.

    Args:
        meeting: ``host:port``, at which the sender listens, and all prove that they have the secret of the job
            (`shardstack.rendezvous.job_secret`); or a store, which is used as it is.
        limit_s: seconds to meet, and for each message and tensor.

    Raises:
        WeightsError: they did not meet in time, or one of them has another secret.
    """

    def __init__(self, meeting: str | Store, rank: int, num_receivers: int, limit_s: float, backend: Backend) -> None:
        self.limit = timedelta(seconds=limit_s)
        self.rank, self.num_receivers, self._backend = rank, num_receivers, backend
        place = ("", 0)
        if isinstance(meeting, str):
            host, _, port = meeting.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) <= MOST_PORT:
                raise WeightsError(f"the address of a stream of weights is {meeting!r}; give host:port")
            place = host.strip("[]"), int(port)
        try:
            if isinstance(meeting, str):
                # Torch's stores on top of it do not keep a store that is written in Python alive.
                self._signed = _signed_store(place, rank == 0, self.limit)
                meeting = fresh_store(self._signed, rank, num_receivers + 1, self.limit)
            self.store = meeting
            self.store.set_timeout(self.limit)
            store = PrefixStore("weights", self.store)
            # All are there: NCCL would wait for them without a limit.
            store.set(f"here/{rank}", "")
            store.wait([f"here/{other}" for other in range(num_receivers + 1)], self.limit)
            # The connections. `close` sets it to None, once another rank is lost, or this one out of step with them.
            self.group = _group(store, rank, num_receivers + 1, self.limit, backend, place[0])
            # Connects, or fails here.
            self.broadcast(torch.zeros(1, device=_DEVICES[backend]))()
        except ConfigError as error:
            raise WeightsError(str(error)) from None
        except (RuntimeError, OSError) as error:
            who = "the sender and the other receivers" if rank else f"{num_receivers} receivers"
            reason = first_line(error).partition("; ")[0]
            same = f", and give all of them the same {SECRET} or {SECRET_FILE}" if place[0] else ""
            raise WeightsError(
                f"{who} did not meet in {limit_s:g} s ({reason}); look at their output{same}"
            ) from error

    def broadcast(self, tensor: Tensor) -> Callable[[], object]:
        """Starts to send a contiguous tensor to the receivers, or to receive it. Returns what waits for it.

        Gloo ends the process that waits for fewer bytes than come: receivers call it for tensors of announced sizes.
        """
        if not tensor.numel():
            return bool
        return partial(self._wait, self.group.broadcast([as_bytes(tensor)], dist.BroadcastOptions()))

    def _wait(self, work: dist.Work) -> None:
        """Waits on the host until a broadcast has ended. NCCL's own `wait` returns before.

        Raises:
            RuntimeError: it failed, or another rank did not take part within the limit.
        """
        if not wait_until(work.is_completed, self.limit.total_seconds()):
            raise RuntimeError(f"no bytes for {self.limit.total_seconds():g} s")
        work.wait()
        if not work.is_success():
            raise RuntimeError("the connection failed")

    @staticmethod
    def finish(waits: list[Callable[[], object]]) -> None:
        """Waits for broadcasts. Keeps none of them, failed or not: while one is kept, `close` ends no connection."""
        try:
            while waits:
                waits.pop(0)()
        finally:
            waits.clear()

    def close(self) -> None:
        """Ends the connections, so that ranks that wait for bytes fail at once. Messages can still be read."""
        if self.group is not None and self._backend == "nccl":
            self.group.abort()  # a broadcast would stay on the device, and what is queued behind it
        self.group = None

    def write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(as_json(value) if is_dataclass(value) else value))

    def answer(self, key: str, reason: str = "") -> None:
        """Tells the sender that something is accepted, or why not. If it is lost, the next message to be read will
        not come."""
        with suppress(RuntimeError):
            self.write(f"{key}/{self.rank}", plain(reason))

    def comes(self, key: str, limit_s: float | None = None) -> bool:
        """Returns whether another rank writes a message within the limit, by default the link's."""
        try:
            self.store.wait([key], self.limit if limit_s is None else timedelta(seconds=limit_s))
        except RuntimeError:
            return False
        return True

    def read(self, key: str, expected: Any) -> Any:
        """Returns a message that another rank writes.

        Raises:
            WeightsError: none came in time, or what came is not as expected, or of somebody without the secret.
        """
        if not self.comes(key):
            raise WeightsError("the sender was lost")
        try:
            data = bytes(self.store.get(key))
        except RuntimeError as error:
            raise WeightsError(first_line(error)) from None
        return parse_message(data, expected)

    def check_answers(self, key: str, what: str, limit_s: float | None = None) -> None:
        """Raises unless every receiver has answered "", naming those that did not answer, or refused."""
        lost, refused = list[int](), dict[int, str]()
        for receiver in range(1, self.num_receivers + 1):
            try:
                if self.comes(f"{key}/{receiver}", limit_s):
                    refused[receiver] = self.read(f"{key}/{receiver}", str)
                else:
                    lost.append(receiver)
            except WeightsError as error:
                refused[receiver] = str(error)
        if lost:
            self.close()
            raise WeightsError(
                f"receivers of weights did not {what} within the limit: {rank_list(lost)}; look at their output, and "
                "make a new WeightSender once they are back"
            )
        if reasons := [f"receiver {receiver}: {reason}" for receiver, reason in refused.items() if reason]:
            raise WeightsError(f"receivers of weights did not {what}: {join_parts(reasons, 8)}")


def _group(store: Store, rank: int, size: int, limit: timedelta, backend: Backend, host: str) -> Any:
    if backend == "nccl":
        return _group_of_nccl(store, rank, size, limit)
    if not host:  # listens at GLOO_SOCKET_IFNAME, if that is set
        return dist.ProcessGroupGloo(store, rank, size, limit)
    group: Any = dist.ProcessGroupGloo
    options = group._Options()
    options._timeout = limit
    family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:  # the address that this machine reaches `host` from
        way.connect(place)  # sends nothing
        options._devices = [group.create_device(hostname=str(way.getsockname()[0]))]
    return group(store, rank, size, options)


_ON_FAILURE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that torch reads as it makes a group of NCCL's: by default a broadcast that fails, or takes too
long, ends the process, on the sender the trainer's. With 0 it is left to `Link`."""

_changes_environment = threading.Lock()
"""Held while the variable is changed."""


def _group_of_nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    group: Any = dist.ProcessGroupNCCL
    options = group.Options()
    options._timeout = limit
    with _changes_environment:
        before = os.environ.get(_ON_FAILURE)
        os.environ[_ON_FAILURE] = "0"
        try:
            return group(store, rank, size, options)
        finally:
            del os.environ[_ON_FAILURE]
            if before is not None:
                os.environ[_ON_FAILURE] = before


def _signed_store(place: tuple[str, int], is_sender: bool, limit: timedelta) -> SignedStore:
    """Returns the store at the sender. Where the job needs no secret, that is an empty one."""
    secret, listener = job_secret(place[0]), listen(place).detach() if is_sender else None
    store = TCPStore(*place, is_master=is_sender, timeout=limit, wait_for_workers=False, master_listen_fd=listener)
    return SignedStore(store, secret)
