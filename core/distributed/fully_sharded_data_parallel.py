"""Fully sharded data parallelism (ZeRO-3) on contiguous buffers, as a drop-in for `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..base.errors import WrapError
from ..base.module_protocol import unwrap_model
from ..process_groups_config import ProcessGroupCollection
from .data_parallel_base import _BaseDataParallel
from .distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from .flat.flat_engine import FlatEngine
from .groups import Ranks
from .model.initial_values import apply_to_buffers
from .plan.units import UnitChoice


class FullyShardedDataParallel(_BaseDataParallel):
    """Shards parameters, gradients and optimizer state over the group (ZeRO-3), in flat buffers.

    The parameters of a unit are views of a slot of memory. Units of equal size take turns with few slots. A
    step does, for each unit:

    1. forward: all-gathers the shards into the slot while the unit before computes, and runs the unit. Frees nothing:
       the slot keeps the unit until another unit is gathered into it, so the last units of a forward are not gathered
       again;
    2. backward, in reverse order: gathers the unit again if another unit has used the slot. Accumulates gradients in
       the unit's contiguous gradient memory; layers of this package compute them there. After the last gradient
       reduce-scatters this memory while backward goes on, and gives it back;
    3. optimizer: updates this rank's shards, a run of elements of each parameter;
    4. the next forward gathers again.

    Outside of forward and backward, code may read a parameter's shape, dtype and gradient, and `state_dict` returns
    this rank's range of each parameter; other uses raise. Inside `whole_parameters` parameters are whole.

    Inside `no_sync` whole gradients accumulate, as under FSDP2; `reduce_every_micro_batch` saves that memory.

    Args:
        config: the model's config; ``calculate_per_token_loss`` and ``gradient_accumulation_fusion`` are read if
            present.
        ddp_config: the wrapper's settings: a `FullyShardedDataParallelConfig`, or any other whose sharding strategy
            is ``optim_grads_params``.
        module: the model. With ``sync_module_states`` all ranks start from the values of the group's first rank; a
            model on the meta device is materialized. If the config computes in ``bf16`` or ``fp16``, fp32 parameters
            stay in fp32: they are cast when they are gathered, and serve as the optimizer's masters.
        sub_modules_to_wrap: classes of units, or their names, as of `TorchFullyShardedDataParallel`.
        disable_bucketing: as in Megatron-LM's signature. Here a unit is the bucket, so that it changes nothing.
        process_group: the ranks to shard over, or a mesh of them, (replicate, shard) for hybrid sharding.
        pg_collection: process groups; its `dp_cp` (or `dp`) serves as `process_group`.
        mp_policy: torch's own, in place of the dtypes of `ddp_config` and `config`: of outputs and inputs too.

    Raises:
        ParallelConfigError: a field that this wrapper cannot honour.
        WrapError: a parameter that is a DTensor already.
    """

    engine: FlatEngine
    engine_kind = EngineKind.FULLY_SHARDED

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        sub_modules_to_wrap: Iterable[UnitChoice] | None = None,
        disable_bucketing: bool = False,
        process_group: Ranks | None = None,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
    ) -> None:
        super().__init__(
            config, ddp_config, module, sub_modules_to_wrap, process_group, pg_collection, mp_policy=mp_policy
        )
        self._set_engine(FlatEngine(self.plan, module, unwrap_model(module), self.step), lives_with_module=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Applies ``to``, ``cuda``, ``half``... to buffers alone.

        Raises:
            WrapError: it would move or convert the parameters, which are views of the wrapper's memory.
        """
        for buffer in self.engine.buffers:
            probe = torch.empty(0, dtype=buffer.kind.param_dtype, device=buffer.device)
            result = fn(probe)
            if (result.dtype, result.device) != (probe.dtype, probe.device):
                raise WrapError(
                    f"a {type(self).__name__} cannot be moved or converted once wrapped, from {probe.dtype} on "
                    f"{probe.device} to {result.dtype} on {result.device}; move and convert the model before "
                    "it is wrapped"
                )
        apply_to_buffers(self.module, fn)
        return self
