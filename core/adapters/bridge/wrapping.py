"""Builds the wrapper for a trainer's settings: one that is called, one whose model is called, or replicas as torch's.

Each adapter has a table of translations for its settings (`translation`), and gives the config that it makes to
`wrap_for_trainer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    _BaseDataParallel,
    wrap_model,
)
from ...distributed.gradient_state import Phase
from ...distributed.groups import Ranks, whole_group
from ...distributed.plan.units import UnitChoice


class Replicas(DistributedDataParallel):
    """`DistributedDataParallel` that finishes gradients in backward; its settings need no choice.

    Args:
        module: the model.
        ranks: those that hold replicas, a group or a mesh.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        group = whole_group(ranks) if isinstance(ranks, DeviceMesh) else ranks
        config = SimpleNamespace(gradient_accumulation_fusion=False)
        settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
        super().__init__(config, settings, module, process_group=group, finish_in_backward=True)


class ShardedInPlace(TorchFullyShardedDataParallel):
    """The wrapper of a model that a trainer goes on calling by itself, and that no call finishes after a backward.

    The last backward of a step leaves gradients as any optimizer may read them, means and sums alike: what a trainer
    divides, it divides in its loss.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module.register_forward_pre_hook(self._forget_failure, prepend=True)
        self.let_module_be_called()

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
    in_place: bool = False,
    disable_bucketing: bool = False,
    mp_policy: MixedPrecisionPolicy | None = None,
    initializes: bool = True,
    **model_settings: Any,
) -> _BaseDataParallel:
    """Wraps a model whose ``.module`` may be called too, as for Hugging Face's ``generate``.

    Args:
        ranks: a group, or a mesh of one axis or of ``(replicate, shard)``.
        units: classes or modules.
        in_place: the trainer calls the model alone, under FSDP2; see `ShardedInPlace`.
        mp_policy, initializes: as of `TorchFullyShardedDataParallel`, with `in_place`.
        model_settings: what the model's config says: ``fp16``, ``calculate_per_token_loss``.
    """
    config = SimpleNamespace(gradient_accumulation_fusion=False, **model_settings)
    if in_place:
        options = {"process_group": ranks, "mp_policy": mp_policy, "initializes": initializes}
        return ShardedInPlace(config, ddp_config, model, units, **options)
    wrapped = wrap_model(
        model, config, ddp_config, process_group=ranks, sub_modules_to_wrap=units, disable_bucketing=disable_bucketing
    )
    if isinstance(wrapped, TorchFullyShardedDataParallel):
        wrapped.let_module_be_called()
    return wrapped
