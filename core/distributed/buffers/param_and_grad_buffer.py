"""Contiguous memory for gradients, and where something is sharded for parameters: collectives work in place on it.

A `ParamAndGradBuffer` holds all trainable parameters of one dtype, device and gradient dtype, in reverse order of
construction, which is roughly the order in which backward finishes their gradients. It is cut into `Bucket`s, each
reduced or gathered by one collective. Nothing here talks to another rank; `bucket_group` does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ..plan.layout import BucketLayout
from .bucket import Bucket
from .flat_memory import FlatMemory
from .grad_memory import GradMemory


class ParamAndGradBuffer(FlatMemory):
    """Flat memory for parameters of one dtype and their gradients.

    Args:
        params: names and parameters, in reverse order of construction.
        grad_dtype: dtype of the gradients.
        layouts: the buckets, from `plan.layout.lay_out`.
        num_shards: number of ranks that shard each bucket; 1 if nothing is sharded.
        shard_index: this rank's index among them.
        holds_params: make the parameters views of `param_data`. Copies their values; their old memory is freed unless
            something else refers to it.
        releases_grads: allocate a bucket's whole gradient when one of its gradients arrives, and free it once it is
            reduced.
        accumulated_in_fp32: names of parameters whose gradients accumulate over micro-batches in separate fp32
            tensors, and are rounded to `grad_dtype` when they are reduced.

    Attributes:
        param_data: `[numel]`, or None without `holds_params`.
        grad_data: `[numel]`, or None with `releases_grads`.
        buckets: in the order in which backward is expected to finish them.
        ranges: ``[start, end)`` of each parameter in the buffer.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        grad_dtype: torch.dtype,
        layouts: Sequence[BucketLayout],
        *,
        num_shards: int = 1,
        shard_index: int = 0,
        holds_params: bool = False,
        releases_grads: bool = False,
        accumulated_in_fp32: Collection[str] = (),
    ) -> None:
        self.names = [name for name, _ in params]
        self.params = [param for _, param in params]
        self.param_dtype = self.params[0].dtype
        self.device = self.shard_device = self.params[0].device
        self.grad_dtype = self.shard_grad_dtype = grad_dtype
        self.accumulated_in_fp32 = frozenset(accumulated_in_fp32)
        self.num_grad_shards, self.grad_shard_index = num_shards, shard_index
        self.numel = layouts[-1].end
        self.param_data: Tensor | None = None
        if holds_params:
            self.param_data = torch.empty(self.numel, dtype=self.param_dtype, device=self.device)
        self.grad_data: Tensor | None = None
        if not releases_grads:
            self.grad_data = torch.zeros(self.numel, dtype=grad_dtype, device=self.device)
        self.grad_memory = GradMemory(grad_dtype, self.device)
        self.buckets = [Bucket(self, layout) for layout in layouts]
        self.ranges = {
            param: (bucket.offset + start, bucket.offset + end)
            for bucket in self.buckets
            for param in bucket.params
            for start, end in [bucket.range_of(param)]
        }
        if self.param_data is not None:
            self._adopt_params(self.param_data)

    @property
    def param_index_map(self) -> dict[nn.Parameter, tuple[int, int, int]]:
        """``(start, end, number of the bucket)`` of each parameter in the buffer."""
        return {
            param: (*self.ranges[param], number)
            for number, bucket in enumerate(self.buckets)
            for param in bucket.params
        }

    @property
    def extra_main_grads(self) -> list[Tensor]:
        """All separate fp32 ``main_grad`` tensors, by Megatron-LM's name."""
        return [gradient for bucket in self.buckets for gradient in bucket.extra_main_grads]

    def reset(self) -> None:
        """Writes zeros into all gradients in memory. A wrapper's `zero_grad_buffer` is cheaper: it writes nothing."""
        for gradient in self._held_grads():
            gradient.zero_()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiplies all gradients in memory, reduced or not; a wrapper's `scale_gradients` only reduced ones."""
        for gradient in self._held_grads():
            gradient.mul_(scaling_factor)

    def _held_grads(self) -> list[Tensor]:
        whole = [bucket.grad_data for bucket in self.buckets if bucket.grad_data is not None]
        shards = [bucket.separate_shard for bucket in self.buckets if bucket.separate_shard is not None]
        return [*whole, *shards, *self.extra_main_grads]

    def _adopt_params(self, data: Tensor) -> None:
        """Moves parameters one at a time, so that no second copy of the model exists at any moment."""
        for bucket in self.buckets:
            bucket.zero_padding(data[bucket.offset : bucket.offset + bucket.numel])
        for param, (start, end) in self.ranges.items():
            view = data[start:end].view(param.shape)
            view.copy_(param.detach())
            param.data = view
