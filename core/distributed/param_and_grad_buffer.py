"""The flat buffers under Megatron-LM's names, for scripts that read them: a view, which the library itself never uses.

A `ParamAndGradBuffer` has ``params``, ``param_data``, ``grad_data``, ``numel``, ``buckets`` and ``param_index_map``; a
bucket ``params``, ``param_data``, ``grad_data``, ``offset`` and ``param_to_index``; a bucket group, which here has one
bucket, ``params``, ``buckets``, ``start_grad_sync`` and ``finish_grad_sync``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .engine.bucket_group import BucketGroup
from .engine.buffer import ParamAndGradBuffer

__all__ = ["MegatronBuffers", "ParamAndGradBuffer"]


class MegatronBuffers:
    """Megatron-LM's attributes of a `DistributedDataParallel` for its buffers.

    Parameters marked ``allreduce=False`` are in buffers of their own, which are reduced over the replicas of experts.
    """

    _flat_buffers: Sequence[ParamAndGradBuffer]
    _bucket_groups: list[BucketGroup]

    @property
    def buffers(self) -> _BufferList:
        """The flat buffers, in a list. Calling the list returns torch's ``Module.buffers()``."""
        dense = [buffer for buffer in self._flat_buffers if not buffer.plan.holds_experts]
        return _BufferList(dense, lambda *args, **kwargs: nn.Module.buffers(self, *args, **kwargs))  # type: ignore[arg-type]

    @property
    def expert_parallel_buffers(self) -> list[ParamAndGradBuffer]:
        """The flat buffers of parameters that carry Megatron-LM's mark of experts."""
        return [buffer for buffer in self._flat_buffers if buffer.plan.holds_experts]

    @property
    def bucket_groups(self) -> list[BucketGroup]:
        """The buckets of `buffers`, in the order in which they leave."""
        return [group for group in self._bucket_groups if not group.bucket.buffer.plan.holds_experts]

    @property
    def expert_parallel_bucket_groups(self) -> list[BucketGroup]:
        """The buckets of `expert_parallel_buffers`, in the order in which they leave."""
        return [group for group in self._bucket_groups if group.bucket.buffer.plan.holds_experts]


class _BufferList(list[ParamAndGradBuffer]):
    def __init__(self, items: list[ParamAndGradBuffer], torch_buffers: Callable[..., Iterator[Tensor]]) -> None:
        super().__init__(items)
        self._torch_buffers = torch_buffers

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        return self._torch_buffers(*args, **kwargs)
