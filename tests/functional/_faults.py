"""Faults planted in `core`, one at a time, that a comparison of runs has to see."""

from __future__ import annotations

import itertools
import sys
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import core.optimizer.optimizer
from core.distributed import TorchFullyShardedDataParallel, _BaseDataParallel, finalize_model_grads
from core.distributed.bucket_group import BucketGroup, GradReduction
from core.optimizer.distrib_optimizer import MainRange
from core.optimizer.main_params import MainParam
from tests.functional._runs import Curve, Training, run_wrapped

PATCHED_BUCKET = 1
"""Which of the model's buckets, in their order, is treated badly."""


def run_with_fault(fault: str, wrapper: str, training: Training) -> Curve:
    """`run_wrapped` with the named function below at work; every rank calls it."""
    with FAULTS[fault]():
        return run_wrapped(wrapper, training)


def _skipped_bucket() -> AbstractContextManager[Any]:
    """The second gradient to leave, and every third after it, is not reduced."""
    reduce, calls = GradReduction.reduce, itertools.count()

    def patched(self: GradReduction, whole: torch.Tensor, kept: torch.Tensor, accumulate: bool, subject: str) -> None:
        if next(calls) % 3 != PATCHED_BUCKET:
            reduce(self, whole, kept, accumulate, subject)
        elif self.shard_group is not None and not accumulate:
            kept.copy_(whole.chunk(self.shard_group.size())[self.shard_group.rank()])

    return mock.patch.object(GradReduction, "reduce", patched)


def _one_instance_only() -> AbstractContextManager[Any]:
    """Hybrid: what the instances reduced is not added up."""
    reduce = GradReduction.reduce

    def patched(self: GradReduction, whole: torch.Tensor, kept: torch.Tensor, accumulate: bool, subject: str) -> None:
        object.__setattr__(self, "replica_group", None)
        reduce(self, whole, kept, accumulate, subject)

    return mock.patch.object(GradReduction, "reduce", patched)


def _scaled_gradients() -> AbstractContextManager[Any]:
    """Gradients are off by one part in a million."""
    finish = _BaseDataParallel.finish_grad_sync

    def patched(self: _BaseDataParallel, force_all_reduce: bool = False) -> None:
        finish(self, force_all_reduce)
        self.scale_gradients(1.0 + 1e-6)

    return mock.patch.object(_BaseDataParallel, "finish_grad_sync", patched)


def _doubled_gradients() -> AbstractContextManager[Any]:
    finish = _BaseDataParallel.finish_grad_sync

    def patched(self: _BaseDataParallel, force_all_reduce: bool = False) -> None:
        finish(self, force_all_reduce)
        self.scale_gradients(2.0)

    return mock.patch.object(_BaseDataParallel, "finish_grad_sync", patched)


def _own_tokens() -> AbstractContextManager[Any]:
    """Per-token loss: each rank divides by its own count."""

    def patched(num_tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return 1.0 / num_tokens / group.size()

    module = sys.modules[finalize_model_grads.__module__]  # whose name in the package is the function's
    return mock.patch.object(module, "_one_over_global_tokens", patched)


def _stale_parameter() -> AbstractContextManager[Any]:
    """One bucket's parameters are not gathered after an update."""
    start = BucketGroup.start_param_sync

    def patched(self: BucketGroup, force_sync: bool = False) -> None:
        if self.bucket.offset != 0:
            start(self, force_sync)

    return mock.patch.object(BucketGroup, "start_param_sync", patched)


def _stale_low_precision() -> AbstractContextManager[Any]:
    """Masters are updated, the parameters that the model computes with are not."""
    return mock.patch.object(core.optimizer.optimizer, "refresh_parameters", lambda params: None)


def _norm_of_one_shard() -> AbstractContextManager[Any]:
    """Each rank clips by the norm of what it updates itself."""
    patches = [mock.patch.object(kind, "shard_groups", lambda self: ()) for kind in (MainParam, MainRange)]
    return _All(patches)


def _clip_of_its_own() -> AbstractContextManager[Any]:
    coefficient = core.optimizer.optimizer.clip_coefficient
    return mock.patch("core.optimizer.optimizer.clip_coefficient", lambda norm, clip: coefficient(norm * 1.0001, clip))


def _without_no_sync() -> AbstractContextManager[Any]:
    """FSDP2 reduces every micro-batch, as Megatron-LM's wrapper of it does."""
    return mock.patch.object(TorchFullyShardedDataParallel, "_set_gradient_sync", lambda self, enabled: None)


def _overflow_forgiven() -> AbstractContextManager[Any]:
    """The loss scale does not answer to an overflow."""
    return mock.patch("core.optimizer.grad_scaler.DynamicGradScaler.update", lambda self, found_inf: None)


class _All(AbstractContextManager["_All"]):
    def __init__(self, patches: list[Any]) -> None:
        self.patches = patches

    def __enter__(self) -> _All:
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *unused: Any) -> None:
        for patch in self.patches:
            patch.stop()


FAULTS = {
    function.__name__.strip("_"): function
    for function in (
        _skipped_bucket,
        _one_instance_only,
        _scaled_gradients,
        _doubled_gradients,
        _own_tokens,
        _stale_parameter,
        _stale_low_precision,
        _norm_of_one_shard,
        _clip_of_its_own,
        _without_no_sync,
        _overflow_forgiven,
    )
}
