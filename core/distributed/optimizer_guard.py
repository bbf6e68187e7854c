"""Stops a plain torch optimizer from stepping parameters of which this rank owns only a part."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ShardstackError

_MARK = "_is_sharded_by_buffers"


def forbid_plain_optimizers(params: Iterable[nn.Parameter]) -> None:
    """Makes every later ``torch.optim`` step over any of these parameters raise.

    Their ``.grad`` is always None, so that such a step would do nothing, and a step that copied ``main_grad`` there
    would use gradients that are reduced for this rank's shard alone. `core.optimizer`'s optimizer steps flat shards,
    which are no parameters, and is not affected.
    """
    for param in params:
        setattr(param, _MARK, True)
    _watch_optimizers()


def is_sharded_by_buffers(param: nn.Parameter) -> bool:
    """Whether this rank has the gradient of a part of the parameter alone."""
    return hasattr(param, _MARK)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check)  # torch calls it before the step of any optimizer


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(is_sharded_by_buffers(param) for group in optimizer.param_groups for param in group["params"]):
        raise ShardstackError(
            f"{type(optimizer).__name__} was to step parameters whose gradients DistributedDataParallel shards over "
            "ranks: it would see this rank's part alone; use core.optimizer.get_megatron_optimizer, or the sharding "
            "strategy 'no_shard'"
        )
