"""Receives weights, for tests and for servers of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from ..base.dtypes import dtype_name
from ..base.errors import WeightsError
from ..dist_checkpointing.gathering import ParamMeta
from .link import Backend, Link, bytes_of, first_line, from_json, new_hash, update_hash, views_of
from .patches import WeightPatch


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
        self._link = Link(address, index + 1, num_receivers, limit_s, backend)
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
        link.write(f"{key}/vote/{link.rank}", self._refusal(header))
        digest, version = new_hash(header), int(header["version"])
        try:
            received, sent = self._take(key, digest)
            if sent != digest.hexdigest():
                raise RuntimeError("the bytes that arrived are not those that were sent")
        except RuntimeError as error:
            link.write(f"{key}/done/{link.rank}", first_line(error))
            raise WeightsError(
                f"version {version} of the weights was not received ({first_line(error)}); the last one stays"
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

    def _take(self, key: str, digest: Any) -> tuple[list[tuple[str, Tensor]], str]:
        """Returns what comes in a round, in memory of its own, and the hash that comes after it."""
        received, last, number = list[tuple[str, Tensor]](), torch.empty(0, dtype=torch.uint8), 0
        while isinstance(head := self._link.read(f"{key}/bucket/{number}"), list):
            metas = from_json(head)
            memory = torch.empty(bytes_of(metas), dtype=torch.uint8, device=self.device)
            wait = self._link.broadcast(memory)
            update_hash(digest, last)  # while these arrive
            wait()
            received += zip((meta.name for meta in metas), views_of(memory, metas), strict=True)
            last, number = memory, number + 1
        if not isinstance(head, str):
            raise RuntimeError(head["failure"] if head else "the sender was lost")
        update_hash(digest, last)
        return received, head


def _shown(meta: ParamMeta) -> str:
    return f"{dtype_name(meta.dtype)} {list(meta.shape)}"
