"""What `prepare` makes: the wrapper of a model, which a `ShardstackPlugin` chooses, and the optimizer of its shards.

This library's optimizer makes the updates of the user's torch optimizer, on this rank's shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
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
from ..bridge.trained import Trained, build_update, replace_parameters, share_groups, unlike_ours
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

    `optimizer` is the user's optimizer. Its ``step`` first runs this library's update, and then finds no gradient to
    apply. It shares ``param_groups`` and state with this library's optimizer, so that schedulers built on either
    optimizer take effect.

    Args:
        optimizer: the user's optimizer.
        trained: its model. `trained.updates` makes the updates; if it is None, the user's does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.trained = trained
        trained.optimizer = optimizer
        self._is_accelerate_prepared = True  # accelerate then keeps it as it is
        optimizer.register_step_pre_hook(self._before_step)

    @property
    def megatron(self) -> MegatronOptimizer | None:
        """The optimizer that updates. None if it is the user's own."""
        updates = self.trained.updates
        return updates if isinstance(updates, MegatronOptimizer) else None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates the weights in the last micro-batch of a step. Does nothing in the others.

        A gradient that is not finite skips the update on all ranks (`step_was_skipped`).

        Raises:
            OptimizerError: a closure was given.
        """
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(closure is not None for closure in (*args[1:], kwargs.get("closure"))):
            raise OptimizerError("step was given a closure, which would run between reduction and update; drop it")
        self.trained.finish_sums()
        if self.megatron is not None:
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
        if self.megatron is not None:
            share_groups(self.optimizer, self.megatron)


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, trained: Trained, replacements: Mapping[nn.Parameter, nn.Parameter]
) -> PreparedOptimizer:
    """Makes a torch optimizer, built over the plain or the wrapped model, update the wrapped model.

    For AdamW, SGD and Adam without weight decay, an optimizer of `get_megatron_optimizer` makes the updates, with
    their groups and settings. Over replicas, any other optimizer makes its own updates.

    Args:
        replacements: maps parameters of the plain model to those of the wrapped model.

    Raises:
        OptimizerError: the optimizer cannot update shards, has stepped already, or has parameters of another model.
    """
    replace_parameters(optimizer, replacements)
    if unlike_ours(optimizer) and trained.wrapper.plan.is_replicated:
        return PreparedOptimizer(optimizer, trained)
    if optimizer.state and not unlike_ours(optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} has stepped before its model was prepared, and its state would be lost; "
            "prepare a new one, and load the state with load_state"
        )
    # bf16: with fp32 masters of weights in bf16, if there are any.
    trained.updates = build_update(optimizer, trained.wrapper, "ShardstackPlugin('no_shard')", bf16=True)
    return PreparedOptimizer(optimizer, trained)
