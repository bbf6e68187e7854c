"""Receives weights, for tests and for servers of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import WeightsError
from .link import Backend, Link, first_line, new_hash
from .patches import WeightPatch
from .stream import ParamMeta

_Meta = tuple[torch.dtype, Sequence[int]]


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
        refusal = self._refusal(header)
        link.write(f"{key}/vote/{link.rank}", refusal)
        if refusal or not link.read(f"{key}/begins"):
            raise WeightsError(
                f"the round of weights did not begin: {refusal or 'another receiver refused or is lost'}"
            )
        digest = new_hash(header)
        try:
            commit = (self._take_patch if header["kind"] == "patch" else self._take_all)(key, header, digest)
            sent = link.read(f"{key}/hash")
            if sent is None:
                raise RuntimeError("its hash did not come within the limit")
        except RuntimeError as error:
            link.write(f"{key}/done/{link.rank}", "the connection was lost")
            raise WeightsError(
                f"the sender of weights was lost ({first_line(error)}); the last version stays"
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
        metas: dict[str, _Meta] = {name: (DTYPES[dtype], shape) for name, dtype, shape in header["tensors"]}
        received: dict[str, Tensor] = {}
        for names in header["buckets"]:
            received |= zip(names, self._bucket([metas[name] for name in names], digest), strict=True)
        return lambda: setattr(self, "weights", received)

    def _take_patch(self, key: str, header: Mapping[str, Any], digest: Any) -> Callable[[], None]:
        patches: list[WeightPatch] = []
        for number in range(header["num_buckets"]):
            heads = self._link.read(f"{key}/bucket/{number}")
            if heads is None:
                raise RuntimeError("no further bucket came within the limit")
            metas = [(dtype, [n]) for name, n, kind in heads for dtype in (DTYPES[kind], self.weights[name].dtype)]
            parts = self._bucket(metas, digest)
            names = [name for name, _, _ in heads]
            patches += [WeightPatch(*patch) for patch in zip(names, parts[::2], parts[1::2], strict=True)]

        def commit() -> None:
            for patch in patches:
                patch.apply(self.weights[patch.name])

        return commit

    def _bucket(self, metas: Sequence[_Meta], digest: Any) -> list[Tensor]:
        """Receives a bucket, and returns its tensors in memory of their own."""
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in metas]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        if len(packed):
            self._link.broadcast(packed)
            digest.update(packed.cpu().numpy())
        parts = zip(packed.split(sizes), metas, strict=True) if sizes else ()
        return [part.clone().view(dtype).view(*shape) for part, (dtype, shape) in parts]


def _shown(meta: ParamMeta) -> str:
    return f"{dtype_name(meta.dtype)} {list(meta.shape)}"
