"""Sends weights to receivers in processes of their own, in rounds that a receiver takes whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from ..base.dtypes import dtype_name
from ..base.errors import ShardstackError, WeightsError
from .link import Backend, Link, first_line, new_hash
from .patches import PatchStream
from .stream import WeightStream

_Bucket = tuple[Any, list[int], Iterable[Tensor]]
"""What receivers have to know of a patch's bucket, or None, the bytes of each tensor, and the tensors."""

_ANSWER_S = 5.0
"""Seconds in which a receiver answers whose broadcast has failed. One that does not is the one that is lost."""


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
        self._link: Link | None = None

        def connect() -> None:
            self._link = Link(address, 0, num_receivers, limit_s, backend)

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

    def _full_buckets(self) -> Iterator[_Bucket]:
        num_bytes = {m.name: math.prod(m.shape) * m.dtype.itemsize for m in self.stream.metadata()}
        for names, bucket in zip(self.stream.bucket_names(), self.stream.buckets(), strict=True):
            yield None, [num_bytes[name] for name in names], (tensor for _, tensor in bucket)

    def _patch_buckets(self, patches: PatchStream) -> Iterator[_Bucket]:
        for bucket in patches.changes():
            heads = [[patch.name, len(patch.indices), dtype_name(patch.indices.dtype)] for patch in bucket]
            parts = [part for patch in bucket for part in (patch.indices, patch.values)]
            yield heads, [part.numel() * part.element_size() for part in parts], parts

    def _send_round(self, header: Mapping[str, Any], buckets: Iterator[_Bucket]) -> None:
        self._round += 1
        key, digest, failures = f"round/{self._round}", new_hash(header), list[WeightsError]()
        self._state, self.sent_bytes = "", 0
        self._agreed(lambda: self._run(lambda link: self._open(link, key, header)))
        for number, bucket in enumerate(buckets):  # to the end in any case: the other ranks gather along
            if self.sends and not failures:
                try:
                    self._run(partial(self._send_bucket, key, number, bucket, digest))
                except WeightsError as error:
                    failures.append(error)

        def close(link: Link) -> None:
            link.write(f"{key}/hash", digest.hexdigest())
            link.check_answers(f"{key}/done", "confirm the weights")

        def end() -> None:
            for failure in failures:
                raise failure
            self._run(close)

        self._agreed(end)
        self._state = digest.hexdigest()

    def _run(self, step: Callable[[Link], None]) -> None:
        if self._link is None:
            raise WeightsError("receivers of weights were lost before; make a new WeightSender once they are back")
        try:
            step(self._link)
        except WeightsError as error:
            if "within the limit" in str(error):
                self._link = None
            raise

    def _open(self, link: Link, key: str, header: Mapping[str, Any]) -> None:
        link.write(f"{key}/header", header)
        try:
            link.check_answers(f"{key}/vote", "accept the weights")
        except WeightsError:
            link.write(f"{key}/begins", False)
            raise
        link.write(f"{key}/begins", True)

    def _send_bucket(self, key: str, number: int, bucket: _Bucket, digest: Any, link: Link) -> None:
        head, num_bytes, tensors = bucket
        packed = _packed(tensors, num_bytes)
        if head is not None:
            link.write(f"{key}/bucket/{number}", head)
        try:
            if len(packed):
                link.broadcast(packed)
        except RuntimeError as error:
            link.close()  # or receivers that are not lost would wait for bytes, and not answer
            link.check_answers(f"{key}/done", "take the weights", _ANSWER_S)
            raise WeightsError(f"weights could not be sent within the limit ({first_line(error)})") from error
        digest.update(packed.cpu().numpy())
        self.sent_bytes += len(packed)


def _packed(tensors: Iterable[Tensor], num_bytes: Sequence[int]) -> Tensor:
    """Returns the bytes of tensors, one after the other. Each is dropped before the next is made."""
    packed = torch.empty(0, dtype=torch.uint8)
    start = 0
    for tensor, size in zip(tensors, num_bytes, strict=True):
        packed = packed if len(packed) else torch.empty(sum(num_bytes), dtype=torch.uint8, device=tensor.device)
        packed[start : start + size] = tensor.contiguous().view(-1).view(torch.uint8)
        start += size
    return packed
