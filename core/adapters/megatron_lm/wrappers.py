"""The wrappers inside Megatron-LM's loop: they take what it gives to its own, and say which was built."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel as MegatronWrapper
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection as MegatronGroups
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from ... import distributed
from ...base.errors import ParallelConfigError
from ...distributed.distributed_data_parallel_config import EngineKind, shards_parameters
from ...distributed.groups import Ranks
from ...distributed.guards import reject_wrapped
from ...distributed.plan.settings import own_settings
from ...distributed.plan.units import UnitChoice
from ..bridge.translation import check_settings
from .pieces import ModelInPieces
from .settings import print_first, translate_config

DEFAULT_UNIT_CLASSES: tuple[type[nn.Module], ...] = (
    TransformerLayer,
    LanguageModelEmbedding,
    RotaryEmbedding,
    tensor_parallel.ColumnParallelLinear,
)
"""Megatron-LM's layers that become units, as in its own wrapper. Only outermost instances count."""


class DistributedDataParallel(distributed.DistributedDataParallel):
    """`core.distributed.DistributedDataParallel` inside Megatron-LM: replicas, ZeRO-1 with
    ``use_distributed_optimizer``, and what `chosen_strategy` finds: for ``optim_grads_params`` the constructor returns
    a `FullyShardedDataParallel`.

    Megatron-LM's loop, schedules and checkpoints call the wrapper as they call their own. Where a strategy was chosen
    an optimizer of this library updates the model; else Megatron-LM's do, its `DistributedOptimizer` on the buffers of
    this wrapper.

    Args:
        config: the model's, of Megatron-LM's classes.
        ddp_config: Megatron-LM's ``DistributedDataParallelConfig``. What it changes of its defaults is translated;
            what would change a number and does not exist here raises.
        module: the model; usually a ``Float16Module`` in bf16 or fp16.
        disable_bucketing: reduce each buffer in one piece.
        pg_collection: Megatron-LM's groups; by default those of its ``parallel_state``.
        full_param_layout: not read. Megatron-LM's optimizer finds parameters by the buffers.

    Raises:
        ParallelConfigError, ConfigError: a field that this wrapper cannot honour.
        WrapError: a model that is wrapped already.
    """

    overlap_param_gather_with_optimizer_step = False
    """Set by Megatron-LM's `get_megatron_optimizer`, and read there."""

    def __new__(
        cls,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        full_param_layout: Any = None,
    ) -> Any:
        if shards_parameters(chosen_strategy(ddp_config) or "no_shard"):
            return FullyShardedDataParallel(config, ddp_config, module, pg_collection=pg_collection)
        return super().__new__(cls)

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        full_param_layout: Any = None,
    ) -> None:
        reject_wrapped(module, (MegatronWrapper, distributed._BaseDataParallel))
        strategy = chosen_strategy(ddp_config)
        settings = _own_settings(ddp_config, EngineKind.FLAT_BUFFERS)
        if strategy is None:  # Megatron-LM names the last micro-batch of a step only where gradients overlap
            gradients, parameters = bool(ddp_config.overlap_grad_reduce), bool(ddp_config.overlap_param_gather)
            settings = replace(settings, overlap_grad_reduce=gradients, overlap_param_gather=parameters)
        else:
            settings = replace(
                settings, data_parallel_sharding_strategy=strategy, use_distributed_optimizer=strategy != "no_shard"
            )
        groups = MegatronGroups.use_mpu_process_groups() if pg_collection is None else pg_collection
        super().__init__(config, settings, module, disable_bucketing, groups)
        self.has_own_optimizer = strategy is not None
        self.ddp_config = _for_the_loop(ddp_config, self.has_own_optimizer)
        # Whether the next forward gathers what Megatron-LM's optimizer may have updated, which leaves that to the
        # wrapper if gathers overlap. The calls before and after an update set it; a forward clears it.
        self._gathers_next = False
        _say(self)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        super().finish_grad_sync(force_all_reduce)
        self._gathers_next = self._is_gathered_in_forward

    def zero_grad_buffer(self) -> None:
        super().zero_grad_buffer()
        self._gathers_next = self._is_gathered_in_forward

    @property
    def _is_gathered_in_forward(self) -> bool:
        return self.plan.settings.overlap_param_gather and not self.has_own_optimizer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._gathers_next:
            self._gathers_next = False
            self.start_param_sync()
        return super().forward(*inputs, **kwargs)

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        super().disable_forward_pre_hook(param_sync)
        if param_sync:
            self.start_param_sync(force_sync=True)

    def _start_bucket_group_param_sync(self, bucket_group: object, force_sync: bool = False) -> None:
        # Megatron-LM's optimizer calls it for one after the other. The first call gathers all.
        if bucket_group is (self.bucket_groups or self.expert_parallel_bucket_groups)[0]:
            self.start_param_sync(force_sync=force_sync)


class FullyShardedDataParallel(ModelInPieces, distributed.FullyShardedDataParallel):
    """`core.distributed.FullyShardedDataParallel` (ZeRO-3 on flat buffers) inside Megatron-LM, in the place of its
    Megatron-FSDP. For another strategy than ``optim_grads_params`` the constructor returns a
    `DistributedDataParallel`.

    An optimizer of this library updates the model.

    Args:
        config: the model's, of Megatron-LM's classes.
        ddp_config: Megatron-LM's ``DistributedDataParallelConfig``, as of `DistributedDataParallel`.
        module: the model; usually a ``Float16Module`` in bf16 or fp16, whose parameters stay in its dtype.
        fsdp_unit_modules: classes of units; `DEFAULT_UNIT_CLASSES` by default.
        disable_bucketing: changes nothing: a unit is the bucket.
        device: not read. The model is on its device.
        pg_collection: Megatron-LM's groups; by default those of its ``parallel_state``.

    Raises:
        ParallelConfigError, ConfigError: a field that this wrapper cannot honour.
        WrapError: a model that is wrapped already.
    """

    has_own_optimizer = True

    def __new__(
        cls,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        fsdp_unit_modules: Any = None,
        disable_bucketing: bool = False,
        device: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        if not shards_parameters(chosen_strategy(ddp_config) or "optim_grads_params"):
            return DistributedDataParallel(config, ddp_config, module, disable_bucketing, pg_collection)
        return super().__new__(cls)

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        fsdp_unit_modules: Iterable[UnitChoice] | None = None,
        disable_bucketing: bool = False,
        device: Any = None,
        pg_collection: Any = None,
    ) -> None:
        reject_wrapped(module, (MegatronWrapper, distributed._BaseDataParallel))
        super().__init__(
            config,
            _own_settings(ddp_config, EngineKind.FULLY_SHARDED),
            module,
            DEFAULT_UNIT_CLASSES if fsdp_unit_modules is None else fsdp_unit_modules,
            pg_collection=MegatronGroups.use_mpu_process_groups() if pg_collection is None else pg_collection,
        )
        self.ddp_config = _for_the_loop(ddp_config, True)
        self.save_in_pieces()
        _say(self)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Does nothing, as the two methods below, by Megatron-LM's names: forward gathers each unit."""

    def enable_forward_pre_hook(self) -> None: ...

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None: ...


def chosen_strategy(ddp_config: Any) -> str | None:
    """Returns the sharding strategy that a Megatron-LM config and the command line choose, None if they choose none.

    The config's strategy counts with ``use_megatron_fsdp``, or if ``--data-parallel-sharding-strategy`` is on the
    command line: Megatron-LM's arguments set it in every run. There ``no_shard`` chooses none.
    """
    strategy = str(ddp_config.data_parallel_sharding_strategy)
    if getattr(ddp_config, "use_megatron_fsdp", False):
        return strategy
    is_typed = any(word.partition("=")[0] == "--data-parallel-sharding-strategy" for word in sys.argv)
    return strategy if is_typed and strategy != "no_shard" else None


def _own_settings(ddp_config: Any, engine: EngineKind) -> distributed.DistributedDataParallelConfig:
    check_settings(vars(ddp_config), "megatron_lm ddp_config")
    # Megatron-LM has made bucket_size of num_buckets.
    has_number = getattr(ddp_config, "num_buckets", None) is not None
    return own_settings(replace(ddp_config, num_buckets=None) if has_number else ddp_config, engine)


def _for_the_loop(ddp_config: Any, has_own_optimizer: bool) -> Any:
    """Returns the config that Megatron-LM's loop and schedules read of a wrapper: fields that only its own config has.

    It asks Megatron-FSDP's wrapper for more, and for DTensors.
    """
    return (
        replace(ddp_config, use_megatron_fsdp=False, overlap_param_gather=False) if has_own_optimizer else ddp_config
    )


def _say(wrapper: distributed._BaseDataParallel) -> None:
    kind = type(wrapper)
    print_first(f"the model is wrapped by {kind.__module__}.{kind.__name__}: {wrapper.plan.strategy}")


class TorchFullyShardedDataParallel(ModelInPieces, distributed.TorchFullyShardedDataParallel):
    """`core.distributed.TorchFullyShardedDataParallel` inside Megatron-LM.

    It takes the arguments that Megatron-LM's ``get_model`` gives, and its models: units are Megatron-LM's layers, and
    an output layer that shares the embedding's weight reads it from the root, which is gathered for the whole forward.
    The constructor sets ``config.no_sync_func``, so that of the micro-batches of a step only the last one reduces
    gradients.

    Args:
        config: the model's, of Megatron-LM's classes.
        ddp_config: Megatron-LM's ``TorchFullyShardedDataParallelConfig`` or ``DistributedDataParallelConfig``, or one
            of this library. Fields that differ from their defaults are translated; those that FSDP2 cannot honour
            raise.
        module: the model; usually a ``Float16Module`` in bf16 or fp16, whose optimizer keeps fp32 masters.
        sub_modules_to_wrap: classes of units; `DEFAULT_UNIT_CLASSES` by default.
        disable_bucketing: changes nothing.
        process_group: the ranks to shard over; by default Megatron-LM's data-parallel group with context parallelism.
        pg_collection: Megatron-LM's; its ``dp_cp`` serves as `process_group`.

    Raises:
        ParallelConfigError: virtual pipeline stages, expert parallelism, gradient accumulation fusion, a
            ``config.no_sync_func`` of another origin, or a field that FSDP2 cannot honour.
        WrapError: a model that is wrapped already.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        sub_modules_to_wrap: Iterable[UnitChoice] | None = None,
        disable_bucketing: bool = False,
        process_group: Ranks | None = None,
        *,
        pg_collection: Any = None,
    ) -> None:
        reject_wrapped(module, (MegatronWrapper, distributed._BaseDataParallel))
        no_sync = getattr(config, "no_sync_func", None)
        if not (no_sync is None or isinstance(getattr(no_sync, "__self__", None), TorchFullyShardedDataParallel)):
            raise ParallelConfigError(
                f"config.no_sync_func is {no_sync!r}, and the wrapper sets its own; leave it None"
            )
        check_settings(vars(config), "megatron_lm", where=" with --use-torch-fsdp2")
        if process_group is None:
            process_group = (
                parallel_state.get_data_parallel_group(with_context_parallel=True)
                if pg_collection is None
                else pg_collection.dp_cp
            )
        submodule: Any  # FSDP2 reads these marks: a shared weight is in one unit, and a look-up needs none in backward
        for submodule in module.modules():
            if getattr(submodule, "share_embeddings_and_output_weights", False):
                submodule.shared_embedding_or_output_weight().shared_embedding = True
            if isinstance(submodule, LanguageModelEmbedding):
                submodule.weights_used_in_backward = False
        super().__init__(
            config,
            translate_config(ddp_config),
            module,
            DEFAULT_UNIT_CLASSES if sub_modules_to_wrap is None else sub_modules_to_wrap,
            disable_bucketing,
            process_group,
        )
        self.ddp_config = ddp_config  # Megatron-LM reads fields that only its own config has
        config.no_sync_func = self.no_sync  # never removed
        self.save_in_pieces()
        _say(self)
