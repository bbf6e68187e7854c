"""The optimizer of a model whose wrapper shards optimizer state, ZeRO-1, or gradients too, ZeRO-2, in flat buffers.

Every rank holds all parameters, as views of flat buckets, and updates of each bucket its own equal share. A share
ends anywhere inside a parameter, so what a rank updates of one is a run of its elements. The gradient's shard, the
moments and, in low precision, the fp32 masters exist for that run alone. (Rajbhandari et al., 2020, stages 1 and 2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..dist_checkpointing.views.flat_range import flat_range_view
from ..distributed import DistributedDataParallel, DistributedDataParallelConfig
from ..distributed.buffers.bucket import Bucket
from ..distributed.flat_data_parallel import _FlatDataParallel
from ..distributed.plan.buffers import is_expert_parameter, lay_out_params
from ..distributed.plan.layout import FullParamLayout
from ..errors import OptimizerError
from .main_params import MainParam
from .optimizer import MegatronOptimizer
from .param_groups import collect_main_params


@dataclass(eq=False)
class MainRange(MainParam):
    """A run of a parameter's elements, flat: what this rank's share of a bucket holds of it, which may be nothing."""

    bucket: Bucket
    """The bucket of the wrapper's that has the parameter."""

    group: dist.ProcessGroup
    """The ranks that share the bucket."""

    _in_shard: slice = field(init=False)
    _start: int = field(init=False)

    def __post_init__(self) -> None:
        begin, end = self.bucket.shard_range_of(self.param)
        self._in_shard = slice(begin, end)
        begin_of_shard = self.bucket.buffer.shard_index * self._param_shard().numel()
        self._start = max(begin_of_shard - self.bucket.range_of(self.param)[0], 0) if begin < end else 0
        super().__post_init__()

    def local(self) -> Tensor:
        return self._param_shard()[self._in_shard]

    def local_gradient(self) -> Tensor | None:
        if not self.bucket.has_gradient(self.param):
            return None
        return self.bucket.local_grad_shard[self._in_shard]

    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.group,) if self.group.size() > 1 else ()

    def whole(self, state: Tensor) -> Tensor:
        return flat_range_view(self.param, state, self._start)

    def _param_shard(self) -> Tensor:
        if self.bucket.local_param_shard is None:
            raise OptimizerError(
                f"parameter {self.name} lies in no flat buffer; wrap the model in DistributedDataParallel with the "
                "strategy 'optim' or 'optim_grads'"
            )
        return self.bucket.local_param_shard


class DistributedOptimizer(MegatronOptimizer):
    """The same update, norm and state as its base, on this rank's shares of flat buffers; then shares are exchanged.

    The wrapper has reduced each gradient into the share that this rank updates (`finalize_model_grads`). A step ends
    with the wrapper's all-gather of the parameters, straight into the buffers that they are views of; with
    ``overlap_param_gather`` it is left running during what follows: the first use of a parameter waits for it.

    Its checkpoint is that of any other optimizer: `state_tensors` are the whole model's tensors, of which this rank
    holds flat ranges, so that any wrapper and world size continues it.
    """

    @staticmethod
    def compute_full_param_layout(
        params: Sequence[nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: DistributedDataParallelConfig,
    ) -> FullParamLayout:
        """Where a wrapper that shards will put these parameters, before anything is allocated.

        Args:
            params: those of the model that require gradients, in order.
            bucket_size: elements; None means one bucket for each dtype.
            data_parallel_world_size: ranks that share a bucket.
            ddp_config: the wrapper's settings.
        """
        kinds: dict[Any, list[nn.Parameter]] = {}
        for param in reversed(params):
            kinds.setdefault((is_expert_parameter(param), param.dtype, param.device), []).append(param)
        return FullParamLayout(
            tuple(
                tuple(
                    lay_out_params(
                        of_kind,
                        dp_size=data_parallel_world_size,
                        bucket_size=bucket_size,
                        num_buckets=ddp_config.num_buckets,
                        for_high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
                    )
                )
                for of_kind in kinds.values()
            )
        )

    def _publish_parameters(self) -> None:
        super()._publish_parameters()
        for wrapper in self._wrappers:
            if isinstance(wrapper, DistributedDataParallel):  # where each forward gathers there is nothing to do now
                wrapper.start_param_sync()


def collect_main_ranges(model_chunks: Sequence[nn.Module], wrappers: Sequence[_FlatDataParallel]) -> list[MainParam]:
    """What this rank updates of every trainable parameter, as `collect_main_params` names them.

    Raises:
        OptimizerError: a parameter that lies in none of the wrappers' buffers.
    """
    places = {
        param: (bucket, wrapper.intra_instance_group)
        for wrapper in wrappers
        for buffer in wrapper.grad_buffers
        for bucket in buffer.buckets
        for param in bucket.params
    }

    def make(name: str, param: nn.Parameter, owner: nn.Module, attribute: str) -> MainRange:
        if param not in places:
            raise OptimizerError(
                f"parameter {name} lies in none of the wrapper's buffers: it was added, replaced or unfrozen after "
                "wrapping; wrap the model when it is complete"
            )
        return MainRange(name, param, owner, attribute, *places[param])

    return collect_main_params(model_chunks, make)
