"""The memory that buckets are parts of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...host_memory import passing_memory
from ..plan.buffers import is_expert_parameter


class FlatMemory:
    """What buckets are parts of: a `ParamAndGradBuffer` or a `ShardedBuffer`, which set all of this when built."""

    names: list[str]
    params: list[nn.Parameter]
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    shard_grad_dtype: torch.dtype
    """Of a reduced shard that has memory of its own."""
    device: torch.device
    shard_device: torch.device
    """Of shards that have memory of their own: the host's, where they are offloaded."""
    num_shards: int
    shard_index: int
    accumulated_in_fp32: frozenset[str]
    param_data: Tensor | None
    """`[numel]`, or None where parameters keep their own memory."""
    grad_data: Tensor | None
    """`[numel]`, or None where whole gradients are released."""
    reuses_grads: bool = False
    """Memory of released gradients is given back, for another bucket."""

    def take_grads(self, numel: int) -> Tensor:
        """Returns `[numel]`, of any values, for the whole gradient of a bucket that releases it."""
        return passing_memory(numel, self.grad_dtype, self.device)

    def give_back_grads(self, whole: Tensor) -> None:
        """Takes back what `take_grads` gave, once nothing reads or writes it; without it, it is freed."""

    @property
    def holds_experts(self) -> bool:
        """Whether its parameters carry Megatron-LM's mark of experts; those with and without share no buffer."""
        return is_expert_parameter(self.params[0])
