"""Runs transformers' Trainer and accelerate's loops on this library's wrappers, by the one call `use_shardstack`."""

from __future__ import annotations

from typing import Any, TypeVar

from ...base.errors import ConfigError
from ...distributed import _BaseDataParallel
from ...distributed.guards import reject_wrapped
from ...rendezvous.environment import environment_int
from ..bridge.trained import mix_in
from ..bridge.translation import check_version

check_version("accelerate", __name__)

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import parse_flag_from_env  # noqa: E402

from .accelerator import ShardstackAccelerator  # noqa: E402
from .prepared import ShardstackPlugin  # noqa: E402

__all__ = ["ShardstackPlugin", "use_shardstack"]

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
    given, plugin = plugin, ShardstackPlugin() if plugin is None else plugin
    if isinstance(target, Accelerator):
        reject_settings(target)
        mix_in(target, ShardstackAccelerator)
        vars(target)["plugin"] = plugin
        return target
    check_version("transformers", "shardstack.adapters.accelerate")
    from transformers import Trainer  # accelerate alone needs no transformers

    from .trainer import ShardstackTrainer
    from .trl import use_whole_weights

    if not isinstance(target, Trainer):
        raise ConfigError(f"use_shardstack was given a {type(target).__name__}; it takes a Trainer or an Accelerator")
    reject_arguments(target)
    if target.is_distributed_loading_by_transformers:
        from .sharded_at_load import use_own_checkpoints

        use_own_checkpoints(target, given)
        return target
    use_whole_weights(target, plugin)
    reject_wrapped(target.model_wrapped, (_BaseDataParallel,))
    target.accelerator.free_memory()  # of what was prepared for evaluation, as `train` does first
    use_shardstack(target.accelerator, plugin)
    mix_in(target, ShardstackTrainer)
    return target


def reject_settings(accelerator: Accelerator) -> None:
    """Raises on settings of accelerate that have no counterpart here.

    Raises:
        ConfigError: names the setting, and what to do instead.
    """
    state = accelerator.state
    parallelism = getattr(accelerator, "parallelism_config", None)
    sync_each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    compiles = str(getattr(getattr(state.dynamo_plugin, "backend", None), "value", "NO")).upper() != "NO"
    world = environment_int("WORLD_SIZE", 1)
    has_prepared, precision = accelerator._models or accelerator._optimizers, accelerator.mixed_precision
    plugins = {name: getattr(state, name, None) for name in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin")}
    # Of ranks on CPU accelerate drops the plugin in silence.
    has_fsdp = plugins.pop("fsdp_plugin") is not None or parse_flag_from_env("ACCELERATE_USE_FSDP")
    is_parallel = parallelism is not None and parallelism.total_size > 1
    for is_set, what, remedy in (
        (has_prepared, "a model or optimizer that is prepared already", "call use_shardstack before prepare"),
        (
            has_fsdp,
            "an fsdp_plugin (fsdp=..., or FSDP_* variables)",
            "drop it, and give its settings to ShardstackPlugin (docs/trainer-and-accelerate.md)",
        ),
        *((plugin is not None, f"a {name}", "drop it") for name, plugin in plugins.items()),
        (is_parallel, "a parallelism_config", "drop it: all ranks are data parallel"),
        (precision in ("fp16", "fp8"), f"mixed_precision={precision!r}", "use 'bf16'"),
        (compiles, "torch.compile (dynamo_plugin)", "drop it, and give ShardstackPlugin compile_units=True"),
        (sync_each, "sync_each_batch", "drop it, and give ShardstackPlugin reduce_every_micro_batch=True"),
        (
            world > 1 and accelerator.num_processes == 1,
            f"one process where WORLD_SIZE is {world}",
            "without a GPU give Accelerator(cpu=True), or TrainingArguments(use_cpu=True)",
        ),
    ):
        if is_set:
            raise ConfigError(f"use_shardstack: the accelerator has {what}; {remedy}")


def reject_arguments(trainer: Any) -> None:
    """Raises on arguments of a trainer that have no counterpart here.

    Raises:
        ConfigError: names the argument, and what to do instead.
    """
    has_trained = isinstance(trainer.optimizer, AcceleratedOptimizer)
    for name, is_set, remedy in (
        ("fsdp", bool(trainer.args.fsdp), "drop it, and give its settings to ShardstackPlugin"),
        ("auto_find_batch_size", trainer.args.auto_find_batch_size, "it would wrap a model twice; give a batch size"),
        ("optimizer", has_trained, "it has trained already; build a new Trainer"),
        ("n_gpu", trainer.args.n_gpu > 1, "one process has several GPUs; start one for each with torchrun"),
        ("model", trainer.is_model_parallel, "its layers are on several devices; load it without device_map"),
    ):
        if is_set:
            raise ConfigError(f"use_shardstack: {name} of the trainer has no counterpart here: {remedy}")
