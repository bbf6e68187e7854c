"""Receives weights, for tests and for servers of one's own, over a group and a store that sender and receivers share.

The first rank of the trainer's group and all receivers form a group of their own, on a store of its own. A round::

    header  sender -> receivers   names, shapes, dtypes, version, base
    vote    receivers -> sender   what does not fit is refused before the first byte
    bucket  sender -> receivers   names, shapes and dtypes of a bucket, whose tensors are broadcast once all trainer
                                  ranks have finished its gather, while they gather the next one; after the last bucket
                                  a hash, or why none follows
    done    receivers -> sender   the new version is in place, or what failed

All but the tensors goes through the store, as the messages of `messages.py`. Each bucket is compared with what the
header promises before memory is given to it. A receiver that refuses a bucket, whose bytes may be on their way, ends
the connection.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from ..base import checked_json
from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import WeightsError
from ..base.files import brief
from ..base.text import first_line, join_parts
from ..dist_checkpointing.gathering import ParamMeta
from .link import Backend, Link
from .messages import Bucket, Entry, Failure, Full, Patch, as_json, hash_bucket, new_hash, plain, update_hash
from .patches import WeightPatch

__all__ = ["Link", "WeightReceiver", "as_json", "new_hash", "update_hash"]

_Received = defaultdict[str, list[Tensor]]
"""Tensors of a round by name, in the order in which they came: of a patch places and values."""


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
        if scattered := [name for name, tensor in self._into.items() if not tensor.is_contiguous()]:
            raise WeightsError(
                f"{scattered[0]} of into is not contiguous; give memory that bytes can be received into"
            )
        if into is not None:
            expected = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in into.items()]
        self._link = Link(address, index + 1, num_receivers, limit_s, backend)
        self.device = next((tensor.device for tensor in self._into.values()), torch.device(device))
        self._expected = None if expected is None else _by_name(as_json(expected))
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
                of the version before. With `into`, or where it failed while a patch was written, there are none.
        """
        key, link, step = f"round/{self._round + 1}", self._link, "vote"
        if link.group is None:
            raise WeightsError("a round before ended the connection to the sender; make a new WeightReceiver")
        if not link.comes(f"{key}/header", limit_s):
            raise WeightsError("no round of weights began in time; look at the trainer's output")
        self._round += 1
        try:
            header: Full | Patch = link.read(f"{key}/header", Full | Patch)
            self._check(header)
            link.answer(f"{key}/vote")
            step, digest = "done", new_hash(checked_json.as_json(header))
            received, end = self._take(key, header, digest)
            self._put(header, received, end, digest.hexdigest())
        except Exception as error:  # of any type: the sender waits for an answer
            link.answer(f"{key}/{step}", first_line(error))
            if not self._state:
                self.version, self.weights = None, {}
            stays = "the last version stays" if self._state else "send all of them again"
            raise WeightsError(f"weights were not received ({plain(first_line(error))}); {stays}") from error
        link.answer(f"{key}/done")
        return header.version

    def _check(self, header: Full | Patch) -> None:
        """Raises for weights that cannot be taken here."""
        if isinstance(header, Patch):
            if not self._state or header.base != self._state:
                raise WeightsError(f"the patch is of another base than version {self.version}, which is here")
            return
        sent = _by_name(header.tensors)
        expected = sent if self._expected is None else self._expected
        for name in sorted(sent.keys() | expected.keys()):
            if name not in sent or name not in expected:
                raise WeightsError(f"{brief(name)} is not {'sent' if name not in sent else 'known here'}")
            if sent[name] != expected[name]:
                raise WeightsError(f"{_shown(sent[name])} is sent, and {_shown(expected[name])} is here")

    def _check_bucket(self, header: Full | Patch, entries: Bucket, received: _Received) -> None:
        """Raises for a bucket that does not go on with what the header promises after `received`."""
        if isinstance(header, Full):
            promised = header.tensors[len(received) : len(received) + len(entries)]
            if entries != promised:
                raise WeightsError(f"a bucket has {_shown(*entries)} in the place of {_shown(*promised)}")
            return
        pairs = zip(entries[::2], entries[1::2], strict=False)
        new = _by_name(entries).keys() - received.keys()
        if 2 * len(new) != len(entries) or not all(self._is_patch(*pair) for pair in pairs):
            raise WeightsError(f"a bucket has {_shown(*entries)}, which are no patches of what is here, each once")

    def _is_patch(self, places: Entry, values: Entry) -> bool:
        (name, dtype, shape), n = places, math.prod(places[2])
        target = self.weights.get(name, torch.empty(0))
        is_in_it = dtype in ("int32", "int64") and shape == [n] and 1 <= n <= target.numel()
        return is_in_it and values == (name, dtype_name(target.dtype), [n])

    def _take(self, key: str, header: Full | Patch, digest: Any) -> tuple[_Received, Failure | str]:
        """Returns what comes in a round, in given memory or in its own, and the message after it."""
        link, received, last, waits = self._link, _Received(list), list[tuple[str, Tensor]](), list[Any]()
        memory, number = self._into if isinstance(header, Full) else {}, 0
        try:
            while isinstance(message := link.read(f"{key}/bucket/{number}", Bucket | Failure | str), list):
                self._check_bucket(header, message, received)
                if memory:
                    self.version, self._state, self.weights = None, "", {}
                empty = partial(torch.empty, device=self.device)
                tensors = [memory[n] if memory else empty(shape, dtype=DTYPES[dtype]) for n, dtype, shape in message]
                waits += map(link.broadcast, tensors)
                hash_bucket(digest, header.kind, last)  # while these arrive
                link.finish(waits)
                last = [(name, tensor) for (name, _, _), tensor in zip(message, tensors, strict=True)]
                number += 1
                for name, tensor in last:
                    received[name].append(tensor)
            hash_bucket(digest, header.kind, last)
        except Exception:
            waits.clear()
            link.close()  # or the sender would wait for what is not received
            raise
        return received, message

    def _put(self, header: Full | Patch, received: _Received, end: Failure | str, digest: str) -> None:
        """Makes what was received the newest version, if it is whole."""
        if isinstance(end, Failure):
            raise WeightsError(end.reason)
        if end != digest or (isinstance(header, Full) and len(received) < len(header.tensors)):
            raise WeightsError("the bytes that arrived are not those that were sent")
        if isinstance(header, Full):
            self.weights = {name: tensor for name, (tensor,) in received.items()}
        else:
            patches = [WeightPatch(name, *parts) for name, parts in received.items()]
            for patch in patches:
                patch.check(self.weights[patch.name])
            self._state = ""  # until all are written: no patch fits weights of two versions
            for patch in patches:
                patch.apply(self.weights[patch.name])
        self.version, self._state = header.version, end


def _by_name(entries: Bucket) -> dict[str, Entry]:
    return {entry[0]: entry for entry in entries}


def _shown(*entries: Entry) -> str:
    texts = [f"{brief(name)} ({dtype} {shape})" for name, dtype, shape in entries]
    return join_parts(texts, 3, ", ") or "nothing more"
