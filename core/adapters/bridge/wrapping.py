"""The wrapper for a trainer's settings: names of strategies, tables of translations, replicas as torch's DDP."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    _BaseDataParallel,
    wrap_model,
)
from ...distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from ...distributed.gradient_state import Phase
from ...distributed.groups import Ranks
from ...distributed.plan.units import UnitChoice
from ...distributed.torch_fully_sharded_data_parallel_config import config_class as class_for_strategy

FSDP2 = "fsdp2"
STRATEGIES = (*SHARDING_STRATEGIES, FSDP2)
"""Those of ``data_parallel_sharding_strategy``, on flat buffers, and torch's FSDP2."""


def config_class(strategy: str) -> type[DistributedDataParallelConfig]:
    """Returns the class of the config of a strategy's wrapper."""
    return class_for_strategy(strategy == FSDP2, strategy)


def config_of(strategy: str, **settings: Any) -> DistributedDataParallelConfig:
    """Returns the config of a strategy's wrapper; `settings` are its other fields.

    Raises:
        ParallelConfigError: settings that contradict each other.
    """
    kind = config_class(strategy)
    if kind is DistributedDataParallelConfig:
        return kind(data_parallel_sharding_strategy=strategy, **settings)
    return kind(**settings)


class Replicas(DistributedDataParallel):
    """`DistributedDataParallel` that finishes gradients in backward; its settings need no choice.

    Args:
        module: the model.
        process_group: the ranks that hold replicas, or a mesh of them.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | DeviceMesh) -> None:
        config = SimpleNamespace(gradient_accumulation_fusion=False)
        settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
        super().__init__(config, settings, module, process_group=process_group, finish_in_backward=True)


class ShardedInPlace(TorchFullyShardedDataParallel):
    """The wrapper of a model that a trainer goes on calling by itself, and that no call finishes after a backward.

    The last backward of a step leaves gradients as any optimizer may read them, means and sums alike: what a trainer
    divides, it divides in its loss. `TorchFullyShardedDataParallel.let_module_be_called` returns the model.
    """

    def let_module_be_called(self) -> nn.Module:
        self.module.register_forward_pre_hook(self._forget_failure, prepend=True)
        return super().let_module_be_called()

    @property
    def _adds_exactly(self) -> bool:
        return True

    def _forget_failure(self, module: nn.Module, args: Any) -> None:
        """Ends a step whose backward raised, once an optimizer has set every gradient to None."""
        self._look_for_failures()
        if self.gradient_state.phase is Phase.BROKEN and all(p.grad is None for p in module.parameters()):
            self.zero_grad_buffer()


def wrap_for_trainer(
    model: nn.Module,
    ddp_config: DistributedDataParallelConfig,
    ranks: Ranks | None,
    units: Iterable[UnitChoice] = (),
    *,
    disable_bucketing: bool = False,
    **model_settings: Any,
) -> _BaseDataParallel:
    """Wraps a model whose ``.module`` may be called too, as for Hugging Face's ``generate``.

    Args:
        ranks: a group, or a mesh of one axis or of ``(replicate, shard)``.
        units: classes or modules.
        model_settings: what the model's config says: ``fp16``, ``calculate_per_token_loss``.
    """
    wrapped = wrap_model(
        model,
        SimpleNamespace(gradient_accumulation_fusion=False, **model_settings),
        ddp_config,
        process_group=ranks,
        sub_modules_to_wrap=units,
        disable_bucketing=disable_bucketing,
    )
    if isinstance(wrapped, TorchFullyShardedDataParallel):
        wrapped.let_module_be_called()
    return wrapped
