"""The messages of other ranks that a device waits for, as between pipeline stages.

The calls of NCCL return before a message is there, so that no error says which one did not come. The host that waits
for the device, or the listener of `record`, finds it here.
"""

from __future__ import annotations

import time
from collections import deque

import torch.distributed as dist

from ..base._torch_compat import group_time_limit
from . import streams


class AwaitedMessage:
    """A message that the work on the current stream waits for, from here to `end`.

    Args:
        text: what this rank does, for the error.
        group: whose time limit holds.
    """

    def __init__(self, text: str, group: dist.ProcessGroup) -> None:
        self.text, self._limit_s = text, group_time_limit(group).total_seconds()
        # The points before and behind the wait. The second is None until `end`.
        self._before: streams.Event = streams.record_event()
        self._behind: streams.Event | None = None
        # Seconds of the monotonic clock at which the device was first seen to wait; None before. `is_late` sets it.
        self._seen_at: float | None = None
        while _messages and _messages[0].has_come:
            _messages.popleft()
        _messages.append(self)

    def end(self) -> None:
        """The wait is queued: what follows on the stream needs the message."""
        self._behind = streams.record_event()

    @property
    def has_come(self) -> bool:
        return self._behind is not None and self._behind.query()

    def is_late(self, margin_s: float) -> bool:
        """Returns whether the device has waited nearly as long as the backend lets it: up to `margin_s` less."""
        if self.has_come or not self._before.query():
            return False
        self._seen_at = self._seen_at or time.monotonic()
        return time.monotonic() - self._seen_at > self._limit_s - min(margin_s, self._limit_s / 10)


_messages: deque[AwaitedMessage] = deque(maxlen=4096)
"""The oldest first. The main thread appends, and drops those that have come. The listener's thread looks at a copy."""


def late_message(margin_s: float) -> AwaitedMessage | None:
    """Returns the message that the device has waited for too long, or None."""
    return next((message for message in list(_messages) if message.is_late(margin_s)), None)
