"""Replicated data parallelism on contiguous gradient buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import parallel_state
from ..errors import ParallelConfigError
from ..transformer.module import materialize
from .broadcast import broadcast_tensors
from .data_parallel_base import _BaseDataParallel
from .distributed_data_parallel_config import DistributedDataParallelConfig


class DistributedDataParallel(_BaseDataParallel):
    """Every rank holds the whole model; gradients are averaged over the group once a step.

    Backward adds each gradient into ``param.main_grad``, a view of one contiguous buffer per dtype, and frees
    ``param.grad``. `finish_grad_sync` then all-reduces the buffers where they lie, in pieces of
    ``ddp_config.bucket_size`` elements, so that how many collectives a step takes depends on the model alone and not
    on the number of micro-batches. Nothing overlaps with backward.

    Args:
        config: the model's config; ``calculate_per_token_loss`` is read where present.
        ddp_config: the wrapper's settings.
        module: the model. On the meta device it is materialized here.
        disable_bucketing: reduce each buffer in one piece, whatever the bucket size.
        process_group: the ranks that hold replicas. Given, `core.parallel_state` is not touched; by default it is
            the data-parallel group with context parallelism.

    Raises:
        ParallelConfigError: a field that this wrapper cannot honour.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        _reject_what_is_not_honoured(ddp_config)
        if process_group is None:
            process_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        super().__init__(config, module, ddp_config, process_group)
        if any(parameter.is_meta for parameter in module.parameters()):
            materialize(module)
        bucket_size = None if disable_bucketing else ddp_config.bucket_size
        self._grad_buffers = _build_grad_buffers(module, ddp_config.grad_reduce_in_fp32, bucket_size)

    def _finish_grad_sync(self, force_all_reduce: bool) -> None:
        self._check_gradients_are_finite()
        size = self.process_group.size()
        averages_in_collective = self.ddp_config.average_in_collective and not self.sums_gradients
        operation = dist.ReduceOp.AVG if averages_in_collective else dist.ReduceOp.SUM
        for buffer in self._grad_buffers:
            if not self.sums_gradients and not averages_in_collective:
                buffer.data.mul_(1.0 / size)
            for bucket in buffer.buckets:
                dist.all_reduce(bucket, operation, group=self.process_group)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        for buffer in self._grad_buffers:
            buffer.data.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        for buffer in self._grad_buffers:
            buffer.data.zero_()
        for parameter in self.module.parameters():
            parameter.grad = None

    def broadcast_params(self) -> None:
        broadcast_tensors([*self.module.parameters(), *self.module.buffers()], self.process_group)


class _GradBuffer:
    """One contiguous tensor that holds the gradients of all parameters with one gradient dtype."""

    def __init__(
        self, parameters: list[nn.Parameter], dtype: torch.dtype, device: torch.device, bucket_size: int | None
    ) -> None:
        self.data = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=device)
        self.buckets = list(self.data.split(bucket_size)) if bucket_size else [self.data]
        views = self.data.split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.main_grad = view.view(parameter.shape)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_add_into_main_grad)


def _add_into_main_grad(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None


def _build_grad_buffers(module: nn.Module, reduce_in_fp32: bool, bucket_size: int | None) -> list[_GradBuffer]:
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups[torch.float32 if reduce_in_fp32 else parameter.dtype, parameter.device].append(parameter)
    return [_GradBuffer(members, dtype, device, bucket_size) for (dtype, device), members in groups.items()]


def _reject_what_is_not_honoured(ddp_config: DistributedDataParallelConfig) -> None:
    if ddp_config.sharding_strategy != "no_shard":
        raise ParallelConfigError(
            f"DistributedDataParallel replicates, but the sharding strategy is {ddp_config.sharding_strategy!r}; "
            "use wrap_model, or TorchFullyShardedDataParallel for 'optim_grads_params'"
        )
    unsupported: dict[str, Callable[[Any], bool]] = {
        "overlap_grad_reduce": bool,
        "overlap_param_gather": bool,
        "num_distributed_optimizer_instances": lambda instances: instances > 1,
    }
    for field, is_set in unsupported.items():
        if is_set(getattr(ddp_config, field)):
            raise ParallelConfigError(
                f"DistributedDataParallel does not have {field} (got {getattr(ddp_config, field)}): it overlaps and "
                "shards nothing; drop the field or use TorchFullyShardedDataParallel"
            )
