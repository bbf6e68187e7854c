"""Parameters and state dicts of a wrapped model, as code around a training step reads and writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from ..base.errors import ParallelConfigError, ShardstackError
from ..dist_checkpointing.global_view import FlatRange
from ..dist_checkpointing.model_state import load_model_state_dict, sharded_state_dict
from .engine.engine import WrappedModel
from .groups import managed_parameters
from .model.initial_values import broadcast_tensors


class _WrappedParameters(WrappedModel):
    """What every wrapper does with a model between steps: show, broadcast, save, load and describe it."""

    module: nn.Module
    process_group: dist.ProcessGroup

    sharded_state_dict = sharded_state_dict

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Makes parameters readable and writable as plain tensors. Keeps what is written to them.

        Every rank enters it, outside of forward and backward, and writes the same values. Does nothing in wrappers
        whose parameters are always whole, or are DTensors.
        """
        self.engine.gradients.state.reject_released("whole_parameters()", "model")
        with self.engine.parameters.whole():
            yield

    def settle(self) -> None:
        """Waits until parameters are what the last step has made them, where it gathers or copies them later."""
        self.engine.parameters.settle()

    def broadcast_params(self) -> None:
        """Broadcasts data-parallel rank 0's parameters and buffers to all replicas.

        A shard is sent to its replicas across optimizer instances. Within an instance it exists once, and is not sent:
        replicas that started different were made equal before they were cut (``sync_module_states``).
        """
        self.engine.gradients.state.reject_released("broadcast_params()", "model")
        self.engine.parameters.settle()
        broadcast_tensors(self.module.buffers(), self.process_group)
        for _, parameter in managed_parameters(self.module):
            groups = self.plan.groups.of(parameter)
            replicas = groups.replicate if self.plan.shards_parameters else groups.whole
            if replicas is not None:
                broadcast_tensors([self.engine.parameters.shard(parameter)], replicas)
        self.engine.parameters.invalidate()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardstackError(
            f"{type(self).__name__} cannot be copied or pickled (copy.deepcopy, torch.save): it holds process groups. "
            "Save its state_dict(), or whole checkpoints with shardstack.dist_checkpointing; copy or save the model "
            "inside, its .module"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the wrapped module's state dict, under the names of the unwrapped module."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns the module's state dict for a checkpoint, by Megatron-LM's name."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copies into the module's parameters and buffers. Every rank calls it.

        `TorchFullyShardedDataParallel` has its own, which loads nothing.

        Args:
            state_dict: whole tensors, as those of a plain module; or this rank's parts, as `load_model_state_dict`
                takes them. The module's own tensors, which a checkpoint loader has filled in place, stay as they are.

        Raises:
            ParallelConfigError: `assign` where parameters are sharded, which would replace them.
            CheckpointError: of `load_model_state_dict`, before anything is written.
        """
        if assign and self.plan.shards_parameters:
            raise ParallelConfigError(
                "load_state_dict was called with assign=True, which replaces the parameters that are views of the "
                "wrapper's memory; leave it out"
            )
        if any(isinstance(value, FlatRange) for value in state_dict.values()):
            return load_model_state_dict(self.module, state_dict, strict, process_group=self.process_group)
        with self.whole_parameters():
            # Megatron-LM's `Float16Module` has a method of its own, which takes no `assign`.
            return self.module.load_state_dict(state_dict, strict=strict, **{"assign": True} if assign else {})

    def describe(self, format: str = "text", num_microbatches: int = 1) -> str:
        """Describes the wrapped model by unit (of FSDP2) or bucket: what a rank keeps, gathers and sends.

        No communication: a rank may call it alone. Bytes are this rank's. The bytes that a step sends are the minimum
        for its collectives, as in a ring algorithm. They include only the wrapper's collectives, not those of tensor
        parallelism or of the gradient norm.

        Args:
            format: ``text``, a table of at most 119 columns in which equal layers share a line; or ``html``, a page in
                one file, in which bars show bytes.
            num_microbatches: micro-batches in a step.

        Raises:
            ConfigError: an unknown format.
        """
        from .report import describe, model_facts  # in few runs: the library is read and imported without it

        return describe(model_facts(self.plan, self.module, num_microbatches), format)
