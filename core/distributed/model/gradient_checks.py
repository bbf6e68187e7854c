"""Checks gradients before they are reduced with those of other ranks, so that an error can name the rank at fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ...base.errors import ShardstackError
from ...comm.host_read import HostRead

LARGE_FACTOR = 10.0
"""A gradient's norm is large if it reaches this multiple of the largest norm of its first steps."""

OBSERVED_STEPS = 100
"""First steps, in which the largest norm of each gradient is recorded and none is large."""


class GradientChecks:
    """Raises on gradients that are not finite, or are far larger than in the first steps.

    Large means `LARGE_FACTOR` times the largest L2 norm that this rank has seen of the same parameter's gradient in
    its first `OBSERVED_STEPS` steps, the rule of Megatron-LM's option of this name.
    """

    def __init__(self, for_nan: bool, for_large: bool) -> None:
        self._for_nan, self._for_large = for_nan, for_large
        # The largest norm of each gradient in its first `OBSERVED_STEPS` steps, by parameter. `_check_norm` updates it
        # in these steps. Never cleared, and not in checkpoints: a resumed run observes again.
        self._largest: dict[str, float] = {}
        # The number of steps that `_largest` covers, by parameter, up to `OBSERVED_STEPS`. Set and kept as `_largest`.
        self._seen: dict[str, int] = {}

    def check(self, gradients: Iterable[tuple[str, torch.Tensor]], step: int, *, are_reduced: bool = False) -> None:
        """Checks this rank's gradients of step `step`, counted from 0, by name. Waits once for the device.

        Args:
            are_reduced: gradients are reduced over ranks already, so that another rank may be at fault.

        Raises:
            ShardstackError: names rank, step and parameter.
        """
        if not (self._for_nan or self._for_large):
            return
        named = [(name, gradient) for name, gradient in gradients if gradient.numel()]
        # Norms are in double, so only those of fp64 gradients can overflow: for them check every element.
        norms = HostRead(_norms([gradient for _, gradient in named])).wait() if named else []
        for (name, gradient), norm in zip(named, norms, strict=True):
            if self._for_nan and not math.isfinite(norm) and not torch.isfinite(gradient).all():
                raise ShardstackError(
                    f"{_place(name, step, are_reduced)} is not finite; lower the learning rate, look at the batch, or "
                    "drop check_for_nan_in_grad to go on"
                )
            if self._for_large:
                self._check_norm(name, norm, step, are_reduced)

    def _check_norm(self, name: str, norm: float, step: int, is_reduced: bool) -> None:
        largest, seen = self._largest.get(name, 0.0), self._seen.get(name, 0)
        if seen < OBSERVED_STEPS:
            self._largest[name], self._seen[name] = max(largest, norm), seen + 1
        elif norm >= LARGE_FACTOR * largest and norm > 0.0:
            raise ShardstackError(
                f"{_place(name, step, is_reduced)} has the norm {norm:.3g}, {LARGE_FACTOR:g} times or more that "
                f"of its first {OBSERVED_STEPS} steps, {largest:.3g}; look at the batch, or drop check_for_large_grads"
                " to go on"
            )


def _norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns L2 norms in double, `[n]`, by one kernel for each dtype and device."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(gradients)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, gradient in enumerate(gradients):
        kinds.setdefault((gradient.dtype, gradient.device), []).append(index)
    for indices in kinds.values():
        norms = torch._foreach_norm([gradients[i].detach() for i in indices], 2, dtype=torch.float64)
        for index, norm in zip(indices, norms, strict=True):
            found[index] = norm
    return torch.stack([norm.to(found[0].device) for norm in found])


def _place(name: str, step: int, is_reduced: bool) -> str:
    of = f"{name}, reduced over ranks that may each be at fault," if is_reduced else name
    return f"rank {dist.get_rank()}, step {step}: the gradient of {of}"
