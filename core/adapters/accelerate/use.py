"""`use_shardstack`: the one line of a script."""

from __future__ import annotations

from typing import Any, TypeVar

from accelerate import Accelerator

from ...distributed import _BaseDataParallel
from ...distributed.model.rewrapping import reject_wrapped
from ...errors import ConfigError
from ..versions import check_version
from .accelerator import ShardstackAccelerator
from .plugin import ShardstackPlugin
from .unsupported import reject_arguments, reject_settings

Target = TypeVar("Target")


def use_shardstack(target: Target, plugin: ShardstackPlugin | None = None) -> Target:
    """Makes a `Trainer` or an `Accelerator`, of any subclass, run its model in this library's wrappers.

    Call it before training begins, and before anything is prepared. The object stays what it is, and what a subclass
    overrides stays overridden.

    Args:
        target: the trainer, or the accelerator.
        plugin: the strategy; ZeRO-3 on flat buffers by default.

    Returns:
        `target`.

    Raises:
        ConfigError: neither of the two, a setting that has no counterpart here, or a version that is not supported.
        WrapError: a trainer's model that is wrapped already.
    """
    plugin = ShardstackPlugin() if plugin is None else plugin
    if isinstance(target, Accelerator):
        reject_settings(target)
        _mix_in(target, ShardstackAccelerator)
        vars(target)["plugin"] = plugin
        return target
    check_version("transformers", "core.adapters.accelerate")
    from transformers import Trainer  # accelerate alone needs no transformers

    from .trainer import ShardstackTrainer

    if not isinstance(target, Trainer):
        raise ConfigError(f"use_shardstack was given a {type(target).__name__}; it takes a Trainer or an Accelerator")
    reject_arguments(target)
    reject_wrapped(target.model_wrapped, (_BaseDataParallel,))
    target.accelerator.free_memory()  # of what was prepared for evaluation, as `train` does first
    use_shardstack(target.accelerator, plugin)
    _mix_in(target, ShardstackTrainer)
    return target


def _mix_in(target: Any, kind: type) -> None:
    """Puts the methods of `kind`, a subclass of the target's base, before those of its own class."""
    own = type(target)
    # The class is set on the user's object: nothing puts the old one back, and a second call keeps it.
    if issubclass(kind, own):
        target.__class__ = kind
    elif not isinstance(target, kind):
        target.__class__ = type(f"Shardstack{own.__name__}", (kind, own), {"__module__": own.__module__})
