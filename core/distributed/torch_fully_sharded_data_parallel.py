"""Fully sharded data parallelism on PyTorch FSDP2, as a drop-in for `DistributedDataParallel`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.modules.module import _IncompatibleKeys

from ..base.errors import ShardstackError
from ..base.module_protocol import unwrap_model
from ..base.parameters import local_part
from ..process_groups_config import ProcessGroupCollection
from .data_parallel_base import _BaseDataParallel
from .distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from .fsdp2.fsdp2_engine import Fsdp2Engine
from .groups import Ranks
from .model.initial_values import parameter_attributes_kept
from .plan.units import UnitChoice


class TorchFullyShardedDataParallel(_BaseDataParallel):
    """Shards parameters, gradients and optimizer state over the group (ZeRO-3), by PyTorch's `fully_shard`.

    Parameters become DTensors on dim 0 and keep Megatron's attributes; ``param.grad`` is sharded so too. With fp32
    parameters and ``config.bf16`` or ``fp16`` the fp32 shard is the master copy: it is cast for the all-gather, and
    gradients are reduced in that dtype, or in fp32 with ``ddp_config.grad_reduce_in_fp32``. Parameters that arrive in
    low precision stay so, and FSDP2 rounds their gradients to it, also where they were reduced in fp32.

    A parameter that no backward reached has a zero gradient, as under `DistributedDataParallel`.

    Args:
        config: the model's config; ``bf16``, ``fp16`` and ``calculate_per_token_loss`` are read where present.
        ddp_config: the wrapper's settings, of either type; a plain one takes FSDP2's defaults.
        module: the model. With ``sync_module_states`` all ranks start from the values of the group's first rank. A
            model on the meta device is sharded first and then filled shard by shard: values are drawn by parameter
            name, or received from the first rank if only that has values. Every rank must run the same units in
            forward.
        sub_modules_to_wrap: classes, or their names, whose outermost instances become units; by default the
            `default_units` of the model.
            For an `nn.ModuleList` or `nn.ModuleDict` its items become units.
        disable_bucketing: as in Megatron-LM's signature. Here a unit is the bucket, so that it changes nothing.
        process_group: the ranks to shard over, or a mesh of them, (replicate, shard) for hybrid sharding. Given,
            `shardstack.parallel_state` is not touched; by default it is the data-parallel group with context
            parallelism, two-dimensional with several optimizer instances.
        pg_collection: process groups; its `dp_cp` (or `dp`) serves as `process_group`.
        mp_policy: torch's own, in place of the dtypes of `ddp_config` and `config`.
        initializes: if False, ranks keep their tensors, and those on the meta device stay there, sharded: the caller
            allocates and fills them before the first forward, for example with ``to_empty`` and its own
            initialization.

    Raises:
        ParallelConfigError: a field that FSDP2 cannot honour.
        WrapError: a model that is sharded already or cannot be.
    """

    engine: Fsdp2Engine
    engine_kind = EngineKind.FSDP2

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
        initializes: bool = True,
    ) -> None:
        super().__init__(
            config, ddp_config, module, sub_modules_to_wrap, process_group, pg_collection, mp_policy=mp_policy
        )
        engine = Fsdp2Engine(self.plan, module, unwrap_model(module), self.step, initializes=initializes)
        self._set_engine(engine, lives_with_module=True)
        # Whether a hook of the module calls `note_forward`. `let_module_be_called` sets it.
        self._is_called_by_module = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module's forward. Frees gathered parameters if no backward follows or forward raised.

        Between `finish_grad_sync` and the step it frees them too, and a backward gathers them again.
        """
        try:
            output = super().forward(*inputs, **kwargs)
        except BaseException:
            self.engine.forward_failed()
            raise
        if not self._is_called_by_module:
            self.engine.note_forward(self.module, inputs, output)
        return output

    def let_module_be_called(self) -> nn.Module:
        """Lets the module be called in place of the wrapper, which then lives as long as it. Returns the module.

        The module's ``set_requires_gradient_sync``, by which such trainers say which micro-batch is the last, becomes
        that of the wrapper. The module is marked for Hugging Face's ``generate``, so that ranks whose text has ended
        go on until all have.
        """
        self._is_called_by_module = True
        self.module.register_forward_hook(self.engine.note_forward)
        # Both are set on the user's model and never removed. Hugging Face's `generate` reads the mark in each call.
        self.module.set_requires_gradient_sync = self.set_requires_gradient_sync  # type: ignore[assignment]
        self.module._is_fsdp_managed_module = True  # type: ignore[assignment]
        return self.module

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Acts as entering (False) or leaving (True) `no_sync`, by torch's name and arguments.

        Args:
            recurse: False sets it for the root unit alone, as torch does.
        """
        if recurse:
            self.engine.gradients.set_sync(requires_gradient_sync)
        else:
            FSDPModule.set_requires_gradient_sync(self.engine.fsdp_modules[0], requires_gradient_sync, recurse=False)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Does nothing: tensors were loaded in place by the checkpoint loader, as with Megatron-LM's wrapper.

        Args:
            state_dict: the module's own tensors. Anything else is not loaded either, which a warning says:
                `shardstack.dist_checkpointing.load_model_state_dict` loads whole and sharded tensors.
            strict, assign: not read.

        Returns:
            torch's named tuple ``(missing_keys, unexpected_keys)``, both empty.
        """
        own = {0} | {_storage_of(tensor) for tensor in self.module.state_dict().values()} - {None}
        values = state_dict.items() if isinstance(state_dict, Mapping) else ()
        tensors = ((name, value) for name, value in values if isinstance(value, torch.Tensor))
        if foreign := [name for name, tensor in tensors if _storage_of(tensor) not in own]:
            warnings.warn(
                "TorchFullyShardedDataParallel.load_state_dict loads nothing: it expects the module's own tensors, "
                f"filled in place by a checkpoint loader, and was given others, such as {foreign[0]}; load whole or "
                "sharded tensors with shardstack.dist_checkpointing.load_model_state_dict(module, state_dict)",
                stacklevel=2,
            )
        return _IncompatibleKeys([], [])

    def share_memory(self) -> NoReturn:
        """Refuses what would end the process: torch's FSDP2 keeps the old memory of parameters.

        Raises:
            ShardstackError: always.
        """
        raise ShardstackError(
            "share_memory() of a model that FSDP2 has sharded; share the plain model, and then wrap it"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with parameter_attributes_kept(self.module):
            return super()._apply(fn, recurse)


def _storage_of(value: Any) -> int | None:
    """Returns the address of a tensor's memory, or of its local shard's, 0 without elements. None without memory."""
    try:
        return local_part(value.detach()).untyped_storage().data_ptr()
    except (AttributeError, NotImplementedError, RuntimeError):  # no tensor, a sparse one, or one that has parts
        return None
