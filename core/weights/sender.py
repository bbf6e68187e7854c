"""Sends weights to receivers in processes of their own, in rounds that a receiver takes whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from ..base import checked_json
from ..base.errors import CheckpointError, ShardstackError, WeightsError
from ..base.text import first_line
from ..dist_checkpointing.gathering import ParamMeta
from .link import Backend, Link
from .messages import Failure, Full, Patch, as_json, hash_bucket, new_hash, plain
from .patches import PatchStream, WeightPatch
from .stream import WeightStream

T = TypeVar("T")
_Bucket = Iterable[tuple[str, Tensor]]
"""Tensors by name, which are made when they are asked for."""

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
        address: ``host:port`` where that rank listens and receivers meet it, or a store that all of them share. Where
            other machines reach it, all need the secret of the job: see `shardstack.rendezvous.job_secret`.
        num_receivers: receivers, which all have to come.
        patches: keep what was sent, for `send_patch`: a copy of each rank's pieces in the dtype of the wire.
        limit_s: seconds that a receiver may take for an answer or a bucket, before it counts as lost.
        backend: of the group with the receivers.

    Raises:
        WeightsError: on all ranks: receivers did not come in time, the address cannot be used, or a secret is missing.
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
        self.stream, self.ranks = stream, stream.ranks
        self.sends = self.ranks.rank == stream.receivers[0]
        # Knows what the receivers have, where patches are sent.
        self._patches = PatchStream(stream) if patches else None
        # Rounds so far, failed ones included, and the hash that names the version of all receivers: "" before the
        # first round, and after one that failed, since only some of them may have taken it.
        self._round, self._state = 0, ""
        # Bytes of the last round's buckets, on the rank that sends. Each round sets it.
        self.sent_bytes = 0
        # Wait until the tensors of a bucket have arrived, while the next one is gathered. `_send_bucket` adds them,
        # `_finish_bucket` calls and drops them, and with them the tensors.
        self._waits: list[Callable[[], object]] = []
        # The connections to the receivers, on the rank that sends; None elsewhere.
        self._link = self._on_sender(lambda: Link(address, 0, num_receivers, limit_s, backend))

    def _on_sender(self, run: Callable[[], T]) -> T | None:
        """Runs something on the rank that sends, and raises its error on all ranks."""
        try:
            return self.ranks.on_all(lambda: run() if self.sends else None)
        except CheckpointError as error:
            raise WeightsError(str(error)) from error

    def send(self, version: int) -> None:
        """Sends all weights. Receivers have them when it returns.

        Raises:
            WeightsError: on all ranks, with the receivers that are lost or refused. Training may go on; the receivers
                keep the version that they had.
        """
        if self._patches is not None:
            self._patches.restart()
        self._send_round(Full(version, as_json(self.stream.metadata())), self.stream.buckets())

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
        self._send_round(Patch(version, self._state), map(_parts, self._patches.changes()))
        self._patches.acknowledge()

    def _send_round(self, header: Full | Patch, buckets: Iterator[_Bucket]) -> None:
        self.stream.check_between_steps()  # before receivers wait for a round
        self._round += 1
        self._state, self.sent_bytes = "", 0
        key, digest, failure, number = f"round/{self._round}", new_hash(checked_json.as_json(header)), "", 0
        self._on_sender(lambda: self._open(key, header))
        for number, bucket in enumerate(buckets, 1):  # to the end in any case: the other ranks gather along
            if self.sends and not failure:
                try:
                    self._send_bucket(key, number - 1, bucket, digest, header.kind)
                except ShardstackError as error:
                    failure = str(error)

        def close() -> None:
            if failure:
                raise WeightsError(failure)
            self._finish_bucket(key, number)
            link = self._connected()
            link.write(f"{key}/bucket/{number}", digest.hexdigest())
            link.check_answers(f"{key}/done", "confirm the weights")

        self._on_sender(close)
        self._state = digest.hexdigest()

    def _connected(self) -> Link:
        if self._link is None or self._link.group is None:
            raise WeightsError("receivers of weights were lost before; make a new WeightSender once they are back")
        return self._link

    def _open(self, key: str, header: Full | Patch) -> None:
        link = self._connected()
        link.write(f"{key}/header", header)
        try:
            link.check_answers(f"{key}/vote", "accept the weights")
        except WeightsError as error:
            link.write(f"{key}/bucket/0", Failure(plain(str(error))))
            raise

    def _send_bucket(self, key: str, number: int, bucket: _Bucket, digest: Any, kind: str) -> None:
        """Waits until the bucket before has arrived, and starts to send one."""
        self._finish_bucket(key, number)
        link, sent = self._connected(), [(name, tensor.contiguous()) for name, tensor in bucket]
        metas = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent]
        link.write(f"{key}/bucket/{number}", as_json(metas))
        self._waits = [link.broadcast(tensor) for _, tensor in sent]
        hash_bucket(digest, kind, sent)
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sent)

    def _finish_bucket(self, key: str, number: int) -> None:
        """Waits until the bucket before number `number` has arrived."""
        link = self._connected()
        try:
            link.finish(self._waits)
        except RuntimeError as error:
            link.close()  # or receivers that are not lost would wait for bytes, and not answer
            link.write(f"{key}/bucket/{number}", Failure("the connection to another receiver was lost"))
            link.check_answers(f"{key}/done", "take the weights", _ANSWER_S)
            raise WeightsError(f"weights could not be sent within the limit ({first_line(error)})") from error


def _parts(patches: Iterable[WeightPatch]) -> _Bucket:
    return [(patch.name, part) for patch in patches for part in (patch.indices, patch.values)]
