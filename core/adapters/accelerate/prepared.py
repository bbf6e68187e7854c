"""What `prepare` makes: the wrapper of a model, which a `ShardstackPlugin` chooses, and its optimizer over shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ...base.errors import ConfigError, OptimizerError
from ...base.text import choices
from ...distributed import FullyShardedDataParallelConfig, _BaseDataParallel
from ...distributed.fully_sharded_data_parallel_config import config_class, config_of
from ...distributed.guards import reject_wrapped
from ...optimizer import MegatronOptimizer
from ...rendezvous import default_group
from ..bridge.sharding import data_parallel_mesh, units_by_class
from ..bridge.trained import Trained
from ..bridge.translation import reject_reproducible, wrap_for_trainer

_DECIDED_HERE = ("data_parallel_sharding_strategy", "use_distributed_optimizer", "num_distributed_optimizer_instances")


class ShardstackPlugin:
    """Chooses the wrapper of `use_shardstack`, and its settings.

    Args:
        sharding_strategy: ``no_shard`` (replicas), ``optim`` (ZeRO-1), ``optim_grads`` (ZeRO-2),
            ``optim_grads_params`` (ZeRO-3 on flat buffers), or ``fsdp2`` (ZeRO-3 on torch's `fully_shard`).
        transformer_cls_names_to_wrap: names of the classes that are units, by accelerate's name; by default those
            that the model declares whole (``_no_split_modules``), else the largest class in its lists of layers.
        hybrid: shard within machines (``LOCAL_WORLD_SIZE`` ranks), replicate across them.
        settings: any field of the wrapper's config: of `DistributedDataParallelConfig` for the first three, of
            `FullyShardedDataParallelConfig` and `TorchFullyShardedDataParallelConfig` for the others.

    Raises:
        ConfigError: an unknown strategy or setting, or settings that contradict each other.
    """

    def __init__(
        self,
        sharding_strategy: str = "optim_grads_params",
        *,
        transformer_cls_names_to_wrap: str | Iterable[str] | None = None,
        hybrid: bool = False,
        **settings: Any,
    ) -> None:
        kind = config_class(sharding_strategy, "sharding_strategy")
        if hybrid and sharding_strategy == "no_shard":
            raise ConfigError("hybrid is set under no_shard, which shards nothing; drop it, or take another strategy")
        names = transformer_cls_names_to_wrap
        self.unit_names = names if names is None or isinstance(names, str) else ",".join(names)
        self.hybrid = hybrid
        allowed = [field.name for field in dataclasses.fields(kind) if field.name not in _DECIDED_HERE]
        for name in settings:
            if name in _DECIDED_HERE:
                raise ConfigError(f"{name} is given, and sharding_strategy and hybrid decide it; drop it")
            if name not in allowed:
                raise ConfigError(
                    f"ShardstackPlugin({sharding_strategy!r}) has no setting {name!r}; {choices(name, allowed)}"
                )
        self.ddp_config = config_of(sharding_strategy, **settings)
        reject_reproducible(self.ddp_config)

    def wrap(self, model: nn.Module) -> _BaseDataParallel:
        """Wraps the model. Its gradients are summed over ranks, not averaged.

        Raises:
            WrapError: a model that is wrapped already, or a class that it has none of.
        """
        reject_wrapped(model, (_BaseDataParallel,))
        default_group.init_process_group()
        config = self.ddp_config
        if isinstance(config, FullyShardedDataParallelConfig):
            methods = (*config.forward_methods, *(("generate",) if hasattr(model, "generate") else ()))
            config = dataclasses.replace(config, forward_methods=tuple(dict.fromkeys(methods)))
        ranks = data_parallel_mesh(None, hybrid=True) if self.hybrid else dist.group.WORLD
        has_units = config.shards_parameters or config.transforms_units
        units = units_by_class(model, self.unit_names, "transformer_cls_names_to_wrap") if has_units else ()
        wrapper = wrap_for_trainer(model, config, ranks, units, calculate_per_token_loss=True)
        if config.shards_parameters:
            # Hugging Face's `generate` reads it: ranks whose text has ended go on until all have.
            model._is_fsdp_managed_module = True  # type: ignore[assignment]
        return wrapper


class PreparedOptimizer(AcceleratedOptimizer):
    """The result of `Accelerator.prepare` for an optimizer of a prepared model.

    `optimizer` is the user's optimizer, with this rank's shards in its groups and state (`shard_optimizer`). Over
    replicas, one that is not elementwise stays as it is.

    Args:
        optimizer: the user's optimizer, built over the plain or the wrapped model.
        trained: its model.

    Raises:
        OptimizerError: the optimizer cannot update shards, or has parameters of another model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.trained = trained
        trained.take(optimizer)
        (trained.updates or optimizer).register_step_pre_hook(lambda *_: trained.finish_sums())
        self._is_accelerate_prepared = True  # accelerate then keeps it as it is

    @property
    def megatron(self) -> MegatronOptimizer | None:
        """The optimizer that updates shards. None if the user's own updates replicas."""
        return self.trained.updates

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates the weights in the last micro-batch of a step. Does nothing in the others.

        A gradient that is not finite skips the update on all ranks (`step_was_skipped`).

        Raises:
            OptimizerError: a closure was given.
        """
        if closure is not None:
            raise OptimizerError("step was given a closure, which would run between reduction and update; drop it")
        if not self.gradient_state.sync_gradients:
            return
        if self.megatron is None:
            self.optimizer.step()
        else:
            # Accelerate's attribute, which `step_was_skipped` returns. Valid until the next step.
            self._is_overflow = not self.megatron.step()[0]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zeroes the gradients after the last micro-batch of a step. Does nothing in the others."""
        if self.gradient_state.sync_gradients:
            self.trained.wrapper.zero_grad_buffer()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state, for `load_state_dict` on the same layout. `save_state` saves for any layout."""
        return (self.optimizer if self.megatron is None else self.megatron).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from this rank's own `state_dict`."""
        (self.optimizer if self.megatron is None else self.megatron).load_state_dict(state_dict)
