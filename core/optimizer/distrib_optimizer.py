"""The optimizer that a model gets, and the one for wrappers that shard optimizer state (ZeRO-1), gradients (ZeRO-2) or
parameters (ZeRO-3) in flat buffers.

In the second each rank updates an equal share of every bucket. A share may end inside a parameter, so a rank updates a
run of the parameter's elements. The gradient's shard, the moments and, in low precision, the fp32 masters exist only
for that run. (Rajbhandari et al., 2020.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.device import current_device
from ..base.errors import ConfigError, OptimizerError
from ..base.megatron_names import checks_arguments
from ..base.module_protocol import unwrap_model
from ..base.parameters import elements_of
from ..dist_checkpointing.agreement import pipeline_ranks
from ..dist_checkpointing.global_view import flat_range_view, noting_copy
from ..distributed import DistributedDataParallelConfig, _BaseDataParallel
from ..distributed.data_parallel_base import check_chunks
from ..distributed.engine.engine import owner_of
from ..distributed.flat.flat_engine import FlatEngine
from ..distributed.groups import kind_of
from ..distributed.plan.layout import FullParamLayout
from ..distributed.plan.pieces import full_param_layout
from ..process_groups_config import ProcessGroupCollection, groups_in_effect
from .clip_grads import GradientStatistics
from .grad_scaler import build_grad_scaler
from .main_params import MainParam
from .matrices import check_choice, choose_optimizers
from .muon import Muon
from .optimizer import MegatronOptimizer
from .optimizer_config import OptimizerConfig
from .param_groups import ConfigOverrides, ParamCondition, build_param_groups, collect_main_params
from .update_rules import build_update_rule


@dataclass(eq=False)
class MainRange(MainParam):
    """The run of a parameter's elements that the plan gives this rank to update. May be empty."""

    engine: FlatEngine = field(repr=False)
    """The engine whose buffers hold the parameter, and which reduces its gradient."""

    start: int
    end: int
    """The run: elements ``[start, end)`` of the flattened parameter."""

    _run: Tensor = field(init=False, repr=False)
    """A view of the run in the wrapper's buffer, which owns the memory. Set once. Valid while the parameter is in the
    buffer, which `check_storage` checks."""

    def __post_init__(self) -> None:
        self._run = elements_of(self.param, self.start, self.end)
        super().__post_init__()

    def local(self) -> Tensor:
        return self._run

    def local_gradient(self) -> Tensor | None:
        return self.engine.gradients.of(self.param)

    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        plan = self.engine.plan.over_ranks_of(kind_of(self.param))
        return (plan.groups.shard,) if plan.num_shards > 1 else ()

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
            wrapper.engine.parameters.publish()


def collect_main_ranges(
    model_chunks: Sequence[nn.Module], wrappers: Sequence[_BaseDataParallel], *, has_master: bool = True
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


@checks_arguments
def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: ConfigOverrides | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    *,
    no_weight_decay_cond: ParamCondition | None = None,
    scale_lr_cond: ParamCondition | None = None,
    lr_mult: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
) -> MegatronOptimizer:
    """Builds the optimizer of a model, which may be wrapped and sharded, and must be on its device.

    The wrapper's sharding strategy decides: a `DistributedDataParallel` that shards optimizer state gets the
    :class:`DistributedOptimizer`, everything else an optimizer that updates what the rank holds of the parameters.

    Args:
        config: the update rule and its constants.
        model_chunks: the wrapped model, in a list; several where a rank holds several pipeline stages.
        config_overrides: settings of single parameters, by `ParamKey`. They replace `get_standard_config_overrides`
            and exclude `no_weight_decay_cond` and `scale_lr_cond`.
        use_gloo_process_groups, dump_param_to_param_group_map: Megatron-LM's arguments; the first is not read, because
            optimizers use the wrappers' groups, and the second must be None.
        pg_collection: process groups of the model; by default those of the wrapper, or without one of
            `core.parallel_state`.
        no_weight_decay_cond: whether a parameter, by name and full shape, is spared weight decay; by default biases
            and parameters of at most one dimension.
        scale_lr_cond: whether a parameter's learning rate is multiplied by `lr_mult`.
        lr_mult: factor of the learning rates that `scale_lr_cond` selects.
        tp_group: ranks that share parameters marked ``tensor_model_parallel``, in place of `pg_collection`.

    Raises:
        ConfigError: settings that contradict each other or the model, or an argument that takes None alone.
        OptimizerError: parameters that cannot be updated.
    """
    model_chunks = check_chunks(model_chunks, "get_megatron_optimizer")
    wrappers = [chunk for chunk in model_chunks if isinstance(chunk, _BaseDataParallel)]
    model_groups = _groups_of_model(wrappers, pg_collection, tp_group)
    for wrapper in wrappers:
        wrapper.engine.parameters.settle()
    is_muon, settings = config.optimizer == "muon", (no_weight_decay_cond, scale_lr_cond, lr_mult, config_overrides)

    def choose() -> tuple[list[_BaseDataParallel], list[MainParam], dict[MainParam, str], list[dict[str, Any]]]:
        sharding = _wrappers_that_shard_state(config, model_chunks)
        if sharding:
            params = collect_main_ranges(model_chunks, sharding)
        else:
            params = collect_main_params(model_chunks)
            _check_whole(params)
        _check_precision(config, model_chunks, params)
        if not is_muon:
            return sharding, params, dict.fromkeys(params, ""), build_param_groups(params, config, *settings)
        reasons, groups = choose_optimizers(params, config, config_overrides), list[dict[str, Any]]()
        for name, is_other in (("muon", False), (config.muon_scalar_optimizer, True)):
            own = [p for p in params if bool(reasons[p]) == is_other]
            groups += [group | {"optimizer": name} for group in build_param_groups(own, config, *settings)]
        return sharding, params, reasons, groups

    stages = pipeline_ranks(model_groups, ConfigError)
    sharding, params, reasons, groups = stages.on_all(choose)  # for what one stage alone raised, the others would wait
    of_stages = stages.all_gather({p.name: reason for p, reason in reasons.items()})
    check_choice({name: reason for of_stage in of_stages for name, reason in of_stage.items()}, config)
    device_type = params[0].main.device.type if params else current_device().type  # a stage may be frozen
    rule = Muon(groups, config, reasons, model_groups) if is_muon else build_update_rule(config, groups, device_type)
    kind = DistributedOptimizer if sharding else MegatronOptimizer
    is_exact = any(wrapper.plan.settings.reproducible_across_ranks for wrapper in wrappers)
    statistics = GradientStatistics(params, model_groups, is_exact=is_exact)
    return kind(config, params, rule, statistics, build_grad_scaler(config), wrappers, groups=model_groups)


def _groups_of_model(
    wrappers: Sequence[_BaseDataParallel], given: ProcessGroupCollection | None, tp_group: dist.ProcessGroup | None
) -> ProcessGroupCollection:
    """Returns the groups given, else the wrappers', or without a wrapper those of `core.parallel_state`."""
    groups = wrappers[0].plan.groups.model if wrappers else groups_in_effect()
    if given is not None:
        groups = given.filled_from(groups)
    return groups if tp_group is None else ProcessGroupCollection(tp=tp_group, mp=tp_group).filled_from(groups)


def _planned_ranges(wrapper: _BaseDataParallel) -> Iterator[tuple[nn.Parameter, tuple[FlatEngine, int, int]]]:
    """Yields the planned parameters that are still in the model, with the arguments of their `MainRange`."""
    engine, plans = wrapper.engine, wrapper.plan.trained_params
    if not isinstance(engine, FlatEngine):
        return
    for name, param in unwrap_model(wrapper).named_parameters():
        if name in plans and owner_of(param) is wrapper and param.is_contiguous():
            index = wrapper.plan.over_ranks_of(kind_of(param)).shard_index
            start, end = plans[name].bounds[index : index + 2]
            yield param, (engine, start, end)


def _wrappers_that_shard_state(config: OptimizerConfig, model_chunks: Sequence[nn.Module]) -> list[_BaseDataParallel]:
    """Returns the chunks' wrappers if each rank updates its share of their flat buffers, else an empty list."""
    wrappers = [chunk for chunk in model_chunks if isinstance(chunk, _BaseDataParallel)]
    strategies = {wrapper.plan.strategy for wrapper in wrappers}
    sharding = [wrapper for wrapper in wrappers if wrapper.plan.shards_buffers]
    if sharding and len(sharding) < len(model_chunks):
        raise ConfigError(
            f"the model's chunks are sharded by different strategies, {', '.join(sorted(strategies))}; wrap all "
            "of them by one strategy"
        )
    is_sharded = config.use_distributed_optimizer
    if is_sharded is not None and is_sharded != bool(sharding):
        names = " and ".join(sorted(strategies)) or "no_shard"
        raise ConfigError(
            f"use_distributed_optimizer is {is_sharded} in OptimizerConfig, but data_parallel_sharding_strategy is "
            f"{names} in the config of the model's wrapper, which decides; leave the first at None"
        )
    return sharding


def _check_whole(params: list[MainParam]) -> None:
    for p in params:
        wrapper = owner_of(p.param)
        if wrapper is not None and wrapper.plan.shards_buffers:
            raise OptimizerError(
                f"parameter {p.name} belongs to a model whose wrapper shards gradients over ranks, and the optimizer "
                "was not given that wrapper; give it what wrap_model returned"
            )


def _check_precision(config: OptimizerConfig, model_chunks: Sequence[nn.Module], params: list[MainParam]) -> None:
    if not config.fp16 and any(getattr(getattr(chunk, "config", None), "fp16", False) for chunk in model_chunks):
        raise ConfigError(
            "the model computes in fp16, but OptimizerConfig has fp16=False, so that no loss scale would keep small "
            "gradients from vanishing; set fp16=True"
        )
    for p in params:
        dtype = p.local().dtype
        if (dtype == torch.float16 and not config.fp16) or (dtype == torch.bfloat16 and config.fp16):
            setting = "fp16=True" if dtype == torch.float16 else "bf16=True"
            raise ConfigError(
                f"parameter {p.name} is {dtype}, but OptimizerConfig has fp16={config.fp16}, bf16={config.bf16}; "
                f"set {setting}, or create the model in the configured precision"
            )
