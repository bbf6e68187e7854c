"""The optimizer that a model gets, and the one for wrappers that shard optimizer state (ZeRO-1), gradients (ZeRO-2) or
parameters (ZeRO-3) in flat buffers.

In the second each rank updates an equal share of every bucket. A share may end inside a parameter, so a rank updates a
run of the parameter's elements. The gradient's shard, the moments and, in low precision, the fp32 masters exist only
for that run. (Rajbhandari et al., 2020.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import ConfigError, OptimizerError
from ..base.megatron_names import checks_arguments
from ..base.module_protocol import unwrap_model
from ..base.parameters import elements_of
from ..dist_checkpointing.agreement import pipeline_ranks
from ..dist_checkpointing.global_view import flat_range_view, noting_copy
from ..distributed import DistributedDataParallel, DistributedDataParallelConfig, _BaseDataParallel
from ..distributed.data_parallel_base import check_chunks
from ..distributed.engine.engine import owner_of
from ..distributed.flat.flat_engine import FlatEngine
from ..distributed.groups import kind_of
from ..distributed.plan.layout import FullParamLayout
from ..distributed.plan.parts import ParamPlan
from ..distributed.plan.pieces import full_param_layout
from ..process_groups_config import ProcessGroupCollection, groups_in_effect
from .clip_grads import GradientStatistics
from .grad_scaler import build_grad_scaler
from .main_params import MainParam
from .optimizer import MegatronOptimizer
from .optimizer_config import OptimizerConfig
from .param_groups import ConfigOverrides, ParamCondition, build_param_groups
from .update_rules import RuleBuilder


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
            if isinstance(wrapper, DistributedDataParallel):  # others gather parameters in forward
                wrapper.start_param_sync()


def collect_main_params(model_chunks: Sequence[nn.Module], *, has_master: bool = True) -> list[MainParam]:
    """Returns every trainable parameter of the chunks once, in order, under its name in the unwrapped model.

    Where chunks have a name in common a name starts with ``chunk<i>.``; virtual pipeline stages have none. A wrapper
    that shards buffers gives this rank's run of each parameter.

    Raises:
        OptimizerError: a parameter that is in no buffers of its wrapper, or whose wrapper is none of the chunks.
    """
    main_params: list[MainParam] = []
    identities: set[int] = set()
    names = [name for chunk in model_chunks for name, _ in unwrap_model(chunk).named_parameters()]
    for index, chunk in enumerate(model_chunks):
        model = unwrap_model(chunk)
        planned = chunk.plan.trained_params if isinstance(chunk, _BaseDataParallel) else {}
        prefix = f"chunk{index}." if len(set(names)) < len(names) else ""
        for name, param in model.named_parameters():
            if not param.requires_grad or id(param) in identities or kind_of(param) == "ignored":
                continue
            identities.add(id(param))
            owner, _, attribute = name.rpartition(".")
            place = prefix + name, param, model.get_submodule(owner), attribute
            run = _planned_run(chunk, planned.get(name), param, name)
            main_params.append(
                MainParam(*place, has_master=has_master)
                if run is None
                else MainRange(*place, *run, has_master=has_master)
            )
    return main_params


def _planned_run(
    chunk: nn.Module, planned: ParamPlan | None, param: nn.Parameter, name: str
) -> tuple[FlatEngine, int, int] | None:
    """Returns the engine and the bounds of a `MainRange`, or None where the rank updates all that it holds."""
    wrapper = owner_of(param)
    if isinstance(chunk, _BaseDataParallel) and chunk.plan.shards_buffers and isinstance(chunk.engine, FlatEngine):
        if wrapper is not chunk or planned is None or not param.is_contiguous():
            raise OptimizerError(
                f"parameter {name} is in none of the wrapper's buffers: it was added, replaced or unfrozen after "
                "wrapping; wrap the model when it is complete"
            )
        index = chunk.plan.over_ranks_of(kind_of(param)).shard_index
        start, end = planned.bounds[index : index + 2]
        return chunk.engine, start, end
    if wrapper is not None and wrapper.plan.shards_buffers:
        raise OptimizerError(
            f"parameter {name} belongs to a model whose wrapper shards gradients over ranks, and the optimizer was "
            "not given that wrapper; give it what wrap_model returned"
        )
    return None


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
        pg_collection: groups of the model; by default the wrapper's, or without one those of `core.parallel_state`.
        no_weight_decay_cond: whether a parameter, by name and full shape, has no weight decay; by default biases and
            vectors.
        scale_lr_cond: whether a parameter's learning rate is multiplied by `lr_mult`.
        lr_mult: factor of the learning rates that `scale_lr_cond` selects.

    Raises:
        ConfigError: settings that contradict each other or the model, or an argument that takes None alone.
        OptimizerError: parameters that cannot be updated.
    """
    model_chunks = check_chunks(model_chunks, "get_megatron_optimizer")
    wrappers = [chunk for chunk in model_chunks if isinstance(chunk, _BaseDataParallel)]
    model_groups = wrappers[0].plan.groups.model if wrappers else groups_in_effect()
    model_groups = model_groups if pg_collection is None else pg_collection.filled_from(model_groups)
    for wrapper in wrappers:
        wrapper.engine.parameters.settle()
    builder = _rule_builder(config, config_overrides)

    def make_groups(params: Sequence[MainParam]) -> list[dict[str, Any]]:
        return build_param_groups(params, config, no_weight_decay_cond, scale_lr_cond, lr_mult, config_overrides)

    def choose() -> tuple[bool, list[MainParam], dict[MainParam, str], list[dict[str, Any]]]:
        is_sharded = _shards_state(config, model_chunks)
        params = collect_main_params(model_chunks)
        _check_precision(config, model_chunks, params)
        reasons = builder.choose(params)
        return is_sharded, params, reasons, builder.groups(reasons, make_groups)

    stages = pipeline_ranks(model_groups, ConfigError)
    # For what one stage alone raised, the others would wait.
    is_sharded, params, reasons, groups = stages.on_all(choose)
    of_stages = stages.all_gather({p.name: reason for p, reason in reasons.items()})
    builder.check({name: reason for of_stage in of_stages for name, reason in of_stage.items()})
    rule = builder.build(groups, reasons, model_groups)
    kind = DistributedOptimizer if is_sharded else MegatronOptimizer
    is_exact = any(wrapper.plan.settings.reproducible_across_ranks for wrapper in wrappers)
    statistics = gradient_statistics(params, model_groups, is_exact=is_exact)
    return kind(config, params, rule, statistics, build_grad_scaler(config), wrappers, groups=model_groups)


def gradient_statistics(
    params: Sequence[MainParam], groups: ProcessGroupCollection, *, is_exact: bool
) -> GradientStatistics:
    """Makes the statistics of a model's gradient.

    Args:
        is_exact: the same bits on any number of ranks.
    """
    if is_exact:
        from .exact_sums import ExactStatistics  # a plug-in of `reproducible_across_ranks`

        return ExactStatistics(params, groups)
    return GradientStatistics(params, groups)


def _rule_builder(config: OptimizerConfig, overrides: ConfigOverrides | None) -> RuleBuilder:
    if config.optimizer == "muon":
        from .muon.builder import MuonBuilder  # a plug-in: runs with other optimizers do not load it

        return MuonBuilder(config, overrides)
    return RuleBuilder(config, overrides)


def _shards_state(config: OptimizerConfig, model_chunks: Sequence[nn.Module]) -> bool:
    """Returns whether each rank updates its share of the wrappers' flat buffers."""
    wrappers = [chunk for chunk in model_chunks if isinstance(chunk, _BaseDataParallel)]
    strategies = {wrapper.plan.strategy for wrapper in wrappers}
    sharding = [wrapper for wrapper in wrappers if wrapper.plan.shards_buffers]
    if sharding and len(sharding) < len(model_chunks):
        raise ConfigError(
            f"the model's chunks are sharded by different strategies, {', '.join(sorted(strategies))}; wrap all "
            "of them by one strategy"
        )
    expected = config.use_distributed_optimizer
    if expected is not None and expected != bool(sharding):
        names = " and ".join(sorted(strategies)) or "no_shard"
        raise ConfigError(
            f"use_distributed_optimizer is {expected} in OptimizerConfig, but data_parallel_sharding_strategy is "
            f"{names} in the config of the model's wrapper, which decides; leave the first at None"
        )
    return bool(sharding)


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
