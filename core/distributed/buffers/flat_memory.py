"""The base class of flat buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...comm import streams
from ..plan.make_flat_plan import is_expert_parameter
from .grad_memory import GradMemory


class FlatMemory:
    """Owns a flat buffer, which buckets divide among them.

    The subclasses are `ParamAndGradBuffer` and `ShardedBuffer`. Their constructors set every field; no field is set
    again later.
    """

    names: list[str]
    """Names of `params` in the model."""
    params: list[nn.Parameter]
    """In the order of their places in the buffer."""
    param_dtype: torch.dtype
    """Dtype of `param_data`, or of the shards."""
    grad_dtype: torch.dtype
    """Dtype of whole gradients, which are reduced in it."""
    shard_grad_dtype: torch.dtype
    """Dtype of `Bucket.separate_shard`."""
    device: torch.device
    """The device that the model computes on; holds `param_data` and whole gradients."""
    shard_device: torch.device
    """The device of separate shards; the CPU if they are offloaded."""
    pins_memory: bool = False
    """Whether that memory is pinned, so that copies to and from the device overlap with computation."""
    num_grad_shards: int
    """Equal parts that each bucket is cut into; a rank keeps the reduced gradient of one of them."""
    grad_shard_index: int
    """The part that this rank keeps."""
    accumulated_in_fp32: frozenset[str]
    """Names of parameters whose gradients accumulate in a separate fp32 tensor (`GradSlot.accumulator`)."""
    param_data: Tensor | None
    """`[numel]`; parameters are views of it. None where they keep their own memory."""
    grad_data: Tensor | None
    """`[numel]`; every bucket's ``grad_data`` is a view of it. None where buckets allocate and release theirs."""
    grad_memory: GradMemory
    """Memory of whole gradients that buckets release, or set aside in a tree of micro-batches."""

    def zeros_for_shards(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates `[numel]` on the device of shards."""
        if self.pins_memory:
            return streams.pinned([numel], dtype).zero_()
        return torch.zeros(numel, dtype=dtype, device=self.shard_device)

    @property
    def holds_experts(self) -> bool:
        """Whether the parameters carry Megatron-LM's mark of experts. A buffer holds only marked or only unmarked
        ones."""
        return is_expert_parameter(self.params[0])
