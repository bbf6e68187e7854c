"""The optimizer for wrappers that shard optimizer state (ZeRO-1), gradients (ZeRO-2) or parameters (ZeRO-3) in flat
buffers.

Each rank updates an equal share of every bucket. A share may end inside a parameter, so a rank updates a run of the
parameter's elements. The gradient's shard, the moments and, in low precision, the fp32 masters exist only for that
run. (Rajbhandari et al., 2020.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import OptimizerError
from ..dist_checkpointing.global_view import flat_range_view, noting_copy
from ..distributed import DistributedDataParallelConfig
from ..distributed.data_parallel_base import unwrap_model
from ..distributed.flat_data_parallel import _FlatDataParallel
from ..distributed.groups import kind_of
from ..distributed.plan.layout import FullParamLayout
from ..distributed.plan.pieces import full_param_layout
from ..distributed.verbs import owner_of
from .main_params import MainParam
from .optimizer import MegatronOptimizer
from .param_groups import collect_main_params


@dataclass(eq=False)
class MainRange(MainParam):
    """The run of a parameter's elements that the plan gives this rank to update. May be empty."""

    wrapper: _FlatDataParallel = field(repr=False)
    """The wrapper whose buffers hold the parameter, and which reduces its gradient."""

    start: int
    end: int
    """The run: elements ``[start, end)`` of the flattened parameter."""

    _run: Tensor = field(init=False, repr=False)
    """A view of the run in the wrapper's buffer, which owns the memory. Set once. Valid while the parameter is in the
    buffer, which `check_storage` checks."""

    def __post_init__(self) -> None:
        self._run = self.wrapper.elements_of(self.param, self.start, self.end)
        super().__post_init__()

    def local(self) -> Tensor:
        return self._run

    def local_gradient(self) -> Tensor | None:
        return self.wrapper.local_gradient(self.param)

    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        plan = self.wrapper.plan.over_ranks_of(kind_of(self.param))
        groups = [plan.groups.shard] if plan.num_shards > 1 else []
        if plan.num_updated_parts > plan.num_shards and plan.groups.replicate is not None:
            groups.append(plan.groups.replicate)
        return tuple(groups)

    def whole(self, state: Tensor) -> Tensor:
        return noting_copy(flat_range_view(self.param, state, self.start), self.param)


class DistributedOptimizer(MegatronOptimizer):
    """Updates this rank's shares of flat buffers as `MegatronOptimizer` does, then gathers the updated parameters.

    The wrapper has reduced each gradient into the share that this rank updates (`finalize_model_grads`). A step ends
    with the wrapper's all-gather of the parameters, in place in the buffers. With ``overlap_param_gather`` the gather
    still runs when the step returns, and the first use of a parameter waits for it.

    Checkpoints have the same format as those of other optimizers: `state_tensors` are flat ranges of the whole model's
    tensors, so that any wrapper and world size can continue.
    """

    @staticmethod
    def compute_full_param_layout(
        params: Sequence[nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: DistributedDataParallelConfig,
    ) -> FullParamLayout:
        """Returns the layout of parameters in the buffers of a wrapper that shards. Allocates nothing.

        Args:
            params: the model's trainable parameters, in order.
            bucket_size: elements in a bucket; None means one bucket for each dtype.
            data_parallel_world_size: number of ranks that share a bucket.
            ddp_config: the wrapper's settings.
        """
        return full_param_layout(params, bucket_size, data_parallel_world_size, ddp_config)

    def _publish_parameters(self) -> None:
        super()._publish_parameters()
        for wrapper in self._wrappers:
            if isinstance(wrapper, _FlatDataParallel):
                wrapper.publish_update()


def collect_main_ranges(
    model_chunks: Sequence[nn.Module], wrappers: Sequence[_FlatDataParallel], *, has_master: bool = True
) -> list[MainParam]:
    """Returns this rank's run of every trainable parameter, under the names of `collect_main_params`.

    Raises:
        OptimizerError: a parameter that is in none of the wrappers' plans, or no longer in their buffers.
    """
    ranges = dict(item for wrapper in wrappers for item in _planned_ranges(wrapper))

    def make(name: str, param: nn.Parameter, owner: nn.Module, attribute: str) -> MainRange:
        if param not in ranges:
            raise OptimizerError(
                f"parameter {name} is in none of the wrapper's buffers: it was added, replaced or unfrozen after "
                "wrapping; wrap the model when it is complete"
            )
        return MainRange(name, param, owner, attribute, *ranges[param], has_master=has_master)

    return collect_main_params(model_chunks, make)


def _planned_ranges(wrapper: _FlatDataParallel) -> Iterator[tuple[nn.Parameter, tuple[_FlatDataParallel, int, int]]]:
    """Yields the planned parameters that are still in the model, with the arguments of their `MainRange`."""
    planned = wrapper.plan.trained
    for name, param in unwrap_model(wrapper).named_parameters():
        if name in planned and owner_of(param) is wrapper and param.is_contiguous():
            index = wrapper.plan.over_ranks_of(kind_of(param)).updated_part
            start, end = planned[name].bounds[index : index + 2]
            yield param, (wrapper, start, end)
