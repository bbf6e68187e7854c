"""The optimizer that a model gets, and the one for wrappers that shard optimizer state (ZeRO-1), gradients (ZeRO-2) or
parameters (ZeRO-3) in flat buffers.

In the second each rank updates an equal share of every bucket. A share may end inside a parameter, so a rank updates a
run of the parameter's elements. The gradient's shard, the moments and, in low precision, the fp32 masters exist only
for that run. (Rajbhandari et al., 2020.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.megatron_names import checks_arguments
from ..base.module_protocol import settle_parameters
from ..dist_checkpointing.agreement import pipeline_ranks
from ..distributed import DistributedDataParallel, DistributedDataParallelConfig, _BaseDataParallel
from ..distributed.data_parallel_base import check_chunks
from ..distributed.plan.layout import FullParamLayout
from ..distributed.plan.pieces import full_param_layout
from ..process_groups_config import ProcessGroupCollection, groups_in_effect
from .clip_grads import GradientStatistics
from .grad_scaler import build_grad_scaler
from .main_params import MainParam
from .main_ranges import collect_main_params, sharing_ranks
from .optimizer import MegatronOptimizer
from .optimizer_config import OptimizerConfig
from .param_groups import ConfigOverrides, ParamCondition, build_param_groups
from .update_rules import RuleBuilder

if TYPE_CHECKING:
    from .torch_rule import UpdateRule


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

    def _publish_parameters(self, weights: Mapping[Tensor, Tensor] | None = None) -> None:
        super()._publish_parameters(weights)
        for wrapper in self._wrappers:
            if isinstance(wrapper, DistributedDataParallel):  # others gather parameters in forward
                wrapper.start_param_sync()


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
        pg_collection: groups of the model; by default the wrapper's, or without one those of
        `shardstack.parallel_state`.
        no_weight_decay_cond: whether a parameter, by name and full shape, has no weight decay; by default biases and
            vectors.
        scale_lr_cond: whether a parameter's learning rate is multiplied by `lr_mult`.
        lr_mult: factor of the learning rates that `scale_lr_cond` selects.

    Raises:
        ConfigError: settings that contradict each other or the model, or an argument that takes None alone.
        OptimizerError: parameters that cannot be updated.
    """
    model_chunks = check_chunks(model_chunks, "get_megatron_optimizer")
    model_groups = groups_of_model(model_chunks)
    if pg_collection is not None:
        model_groups = ProcessGroupCollection.of(pg_collection, "get_megatron_optimizer").filled_from(model_groups)
    settle_parameters(*model_chunks)
    builder = RuleBuilder(config, config_overrides)
    if config.optimizer == "muon":
        from .muon.builder import MuonBuilder  # a plug-in: runs with other optimizers do not load it

        builder = MuonBuilder(config, config_overrides)

    def make_groups(params: Sequence[MainParam]) -> list[dict[str, Any]]:
        return build_param_groups(params, config, no_weight_decay_cond, scale_lr_cond, lr_mult, config_overrides)

    def choose() -> tuple[list[MainParam], dict[MainParam, str], list[dict[str, Any]]]:
        params = collect_main_params(model_chunks, has_master=config.main_params_dtype == "fp32")
        check_model(config, model_chunks, params)
        reasons = builder.choose(params)
        return params, reasons, builder.groups(reasons, make_groups)

    stages = pipeline_ranks(model_groups, ConfigError)
    params, reasons, groups = stages.on_all(choose)  # for what one stage alone raised, the others would wait
    of_stages = stages.all_gather({p.name: reason for p, reason in reasons.items()})
    builder.check({name: reason for of_stage in of_stages for name, reason in of_stage.items()})
    rule = builder.build(groups, reasons, model_groups)
    if config.keeps_low_precision:
        from .low_precision.states import StoredStates  # a plug-in: runs in fp32 do not load it

        has_masters = any(stages.all_gather(any(p.is_low_precision for p in params)))
        if config.main_params_dtype != "fp32" and not has_masters:
            raise ConfigError(
                f"main_params_dtype is {config.main_params_dtype}, and no parameter is in bf16; leave it at fp32: "
                "parameters in fp32, also those that a wrapper gathers in bf16, have no masters"
            )
        rule.stored = stored = StoredStates(params, sharing_ranks(params, model_groups))
        stages.on_all(lambda: stored.add_state(config, rule))
    return assemble(config, model_chunks, params, rule, model_groups)


def groups_of_model(model_chunks: Sequence[nn.Module]) -> ProcessGroupCollection:
    """Returns the groups of a model: those of its wrappers, or without one of `shardstack.parallel_state`."""
    plans = [chunk.plan for chunk in model_chunks if isinstance(chunk, _BaseDataParallel)]
    return plans[0].groups.model if plans else groups_in_effect()


def assemble(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    params: Sequence[MainParam],
    rule: UpdateRule,
    groups: ProcessGroupCollection,
) -> MegatronOptimizer:
    """Makes the optimizer of a model that `check_model` has accepted, by the strategy of its wrappers.

    Args:
        params: what it updates.
        rule: has their main tensors in its groups.
        groups: of the model.
    """
    wrappers = [chunk for chunk in model_chunks if isinstance(chunk, _BaseDataParallel)]
    kind = DistributedOptimizer if any(wrapper.plan.shards_buffers for wrapper in wrappers) else MegatronOptimizer
    is_exact = any(wrapper.plan.settings.reproducible_across_ranks for wrapper in wrappers)
    statistics = gradient_statistics(params, groups, is_exact=is_exact)
    return kind(config, params, rule, statistics, build_grad_scaler(config), model_chunks, groups=groups)


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


def check_model(config: OptimizerConfig, model_chunks: Sequence[nn.Module], params: Sequence[MainParam]) -> None:
    """Checks that chunks are sharded by one strategy, as the config says, and in the precision that it says.

    Raises:
        ConfigError: they are not.
    """
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
