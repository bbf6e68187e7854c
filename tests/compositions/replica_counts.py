"""Tokens of experts on all replicas, counted in one process: what a loss that balances experts over replicas reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.base.recomputation import noted
from core.transformer.moe.router import TopKRouter


class ReplicaCounts:
    """Makes routers read the tokens of each expert on all replicas, of a step's micro-batches up to one.

    The replicas of a wrapped training run the micro-batches at one place of their steps at the same time. Here they
    run one after the other: `look_ahead` first runs the forwards of all, and counts.

    Args:
        module: the model, whose routers this changes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._looks_ahead = False
        self._earlier: dict[nn.Module, Tensor | float] = {}
        """Of the places before, in this step."""
        self._here: dict[nn.Module, list[Tensor]] = {}
        """Of the place, for each call of a router in a forward."""
        self._calls: Counter[nn.Module] = Counter()
        """Calls in the forward under way."""
        for router in module.modules():
            if isinstance(router, TopKRouter):
                router._count_on_replicas = partial(self._count, router)  # type: ignore[method-assign]

    def begin_step(self) -> None:
        self._earlier, self._here = {}, {}

    def begin_forward(self) -> None:
        self._calls.clear()

    def look_ahead(self, forwards: Sequence[Callable[[], Any]]) -> None:
        """Runs the forwards of all replicas at a place, and counts their tokens."""
        for router, counts in self._here.items():
            self._earlier[router] = self._earlier.get(router, 0.0) + torch.stack(counts).sum(0)
        self._here, self._looks_ahead = defaultdict(list), True
        try:
            for forward in forwards:
                forward()
        except BaseException:
            self._here = {}  # nothing is counted of a place that failed
            raise
        finally:
            self._looks_ahead = False

    def _count(self, router: nn.Module, own: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the place of `TopKRouter._count_on_replicas`."""
        call = noted(partial(self._next_call, router))  # the same in a recomputation
        assert call is not None
        here = self._here.get(router, [])
        if self._looks_ahead:
            if call == len(here):
                self._here[router].append(own.clone())
            else:
                here[call] += own
            return torch.zeros_like(own), own
        if not here:
            return torch.zeros_like(own), own  # of an evaluation, whose losses nothing trains
        total = self._earlier.get(router, 0.0) + torch.stack(here[: call + 1]).sum(0)
        return torch.zeros_like(own), total * (own.sum() / total.sum())

    def _next_call(self, router: nn.Module) -> int:
        self._calls[router] += 1
        return self._calls[router] - 1
