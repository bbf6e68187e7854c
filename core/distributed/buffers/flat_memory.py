"""The base of both kinds of memory that buckets are parts of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..plan.make_flat_plan import is_expert_parameter
from .grad_memory import GradMemory


class FlatMemory:
    """Owns the memory that buckets are parts of.

    A `ParamAndGradBuffer` or a `ShardedBuffer`; their constructors set every field, and nothing changes it later.
    """

    names: list[str]
    """Of `params`, in the model."""
    params: list[nn.Parameter]
    """In the order of their places in the buffer."""
    param_dtype: torch.dtype
    """Of `param_data`, or of the shards."""
    grad_dtype: torch.dtype
    """Of whole gradients, in which they are reduced."""
    shard_grad_dtype: torch.dtype
    """Of a reduced shard that has memory of its own."""
    device: torch.device
    """Where the model computes; of `param_data` and whole gradients."""
    shard_device: torch.device
    """Of shards that have memory of their own: the host's, where they are offloaded."""
    num_shards: int
    """Equal parts that each bucket is cut into; a rank keeps the reduced gradient of one of them."""
    shard_index: int
    """The part that this rank keeps."""
    accumulated_in_fp32: frozenset[str]
    """Names of parameters whose gradient adds up in fp32 memory of its own (`GradSlot.accumulator`)."""
    param_data: Tensor | None
    """`[numel]`; parameters are views of it. None where they keep their own memory."""
    grad_data: Tensor | None
    """`[numel]`; every bucket's ``grad_data`` is a view of it. None where buckets allocate and release theirs."""
    grad_memory: GradMemory
    """Memory of whole gradients that buckets release, or set aside in a tree of micro-batches."""

    @property
    def holds_experts(self) -> bool:
        """Whether its parameters carry Megatron-LM's mark of experts; those with and without share no buffer."""
        return is_expert_parameter(self.params[0])
