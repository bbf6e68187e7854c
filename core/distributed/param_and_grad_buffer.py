"""The flat buffers under Megatron-LM's names, for scripts that read them: a view, which the library itself never uses.

A `ParamAndGradBuffer` has ``params``, ``param_data``, ``grad_data``, ``numel``, ``buckets`` and ``param_index_map``; a
bucket ``params``, ``param_data``, ``grad_data``, ``offset`` and ``param_to_index``; a bucket group, which here is the
bucket itself, also ``buckets``, ``start_grad_sync`` and ``finish_grad_sync``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .engine.bucket import Bucket
from .engine.buffer import FlatBuffer

__all__ = ["MegatronBuffers", "ParamAndGradBuffer"]


class ParamAndGradBuffer:
    """One flat buffer and its buckets. Attributes are those of `FlatBuffer`, or as Megatron-LM's."""

    def __init__(self, buffer: FlatBuffer, buckets: list[Bucket]) -> None:
        # Made anew at each access. The memory is the `FlatBuffer`'s, and changes with each step.
        self.buckets, self.params = buckets, [param for bucket in buckets for param in bucket.params]
        self.param_data, self.grad_data, self.numel = buffer.param_data, buffer.grad_data, buffer.numel
        self.param_dtype, self.grad_dtype = buffer.kind.param_dtype, buffer.kind.grad_dtype

    @property
    def param_index_map(self) -> dict[nn.Parameter, tuple[int, int, int]]:
        """``(start, end, number of the bucket)`` of each parameter in the buffer."""
        return {
            param: (bucket.offset + start, bucket.offset + end, number)
            for number, bucket in enumerate(self.buckets)
            for param, (start, end) in bucket.param_to_index.items()
        }


class MegatronBuffers:
    """Megatron-LM's attributes of a `DistributedDataParallel` for its buffers.

    Parameters marked ``allreduce=False`` are in buffers of their own, which are reduced over the replicas of experts.
    """

    _flat_buffers: list[FlatBuffer]
    _bucket_at: dict[tuple[int, int], Bucket]
    _buckets: list[Bucket]

    def _views(self, of_experts: bool) -> list[ParamAndGradBuffer]:
        return [
            ParamAndGradBuffer(buffer, [bucket for bucket in self._bucket_at.values() if bucket.buffer is buffer])
            for buffer in self._flat_buffers
            if buffer.kind.holds_experts is of_experts
        ]

    @property
    def buffers(self) -> _BufferList:
        """The flat buffers, in a list. Calling the list returns torch's ``Module.buffers()``."""
        return _BufferList(self._views(False), lambda *args, **kwargs: nn.Module.buffers(self, *args, **kwargs))  # type: ignore[arg-type]

    @property
    def expert_parallel_buffers(self) -> list[ParamAndGradBuffer]:
        """The flat buffers of parameters that carry Megatron-LM's mark of experts."""
        return self._views(True)

    @property
    def bucket_groups(self) -> list[Bucket]:
        """The buckets of `buffers`, in the order in which they leave."""
        return [bucket for bucket in self._buckets if not bucket.buffer.kind.holds_experts]

    @property
    def expert_parallel_bucket_groups(self) -> list[Bucket]:
        """The buckets of `expert_parallel_buffers`, in the order in which they leave."""
        return [bucket for bucket in self._buckets if bucket.buffer.kind.holds_experts]


class _BufferList(list[ParamAndGradBuffer]):
    def __init__(self, items: list[ParamAndGradBuffer], torch_buffers: Callable[..., Iterator[Tensor]]) -> None:
        super().__init__(items)
        # Fixed: torch's ``Module.buffers`` of the wrapper. The list lives as long as its reader keeps it.
        self._torch_buffers = torch_buffers

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        return self._torch_buffers(*args, **kwargs)
