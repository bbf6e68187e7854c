"""torchtitan's trainer on this library's FSDP2 engine.

    torchtitan_train --module shardstack.adapters.torchtitan --config llama3_8b     # a config of torchtitan

`parallelize` replaces the ``parallelize_fn`` of a torchtitan model. In a config function of your own, `with_fsdp2`
does so in any ``Trainer.Config``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ..base import device
from ..distributed.engine.engine import own_parameters
from ..distributed.fully_sharded_data_parallel_config import FSDP2, config_of
from ..distributed.guards import reject_wrapped
from ..distributed.plan.units import CONTAINERS, UnitChoice
from .bridge.translation import check_settings, check_version, wrap_for_trainer

check_version("torchtitan", __name__)

from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.distributed.compile import apply_compile  # noqa: E402
from torchtitan.models import _supported_models  # noqa: E402


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Shards a torchtitan model in place, in torchtitan's order and by its settings. Returns the same model.

    Activation checkpointing and compilation are torchtitan's own, and come first. Units are the token embedding, each
    layer and the output layer; the final norm is the root's. Gradients are summed, as torchtitan's loss is divided by
    the tokens of all ranks. Of the micro-batches of a step, ``global_batch_size / (local_batch_size * ranks)``, the
    last one reduces. Tensors on the meta device stay there: the trainer's ``to_empty`` and ``init_weights`` follow.

    Args:
        model: torchtitan's; it keeps its class's methods and its parameters' names.
        parallel_dims: its meshes; ``dp_shard`` and ``dp_replicate`` may be above 1.
        training: ``TrainingConfig``; dtypes of mixed precision, batch sizes and ``enable_cpu_offload`` are read.
        parallelism, compile_config: ``fsdp_reshard_after_forward`` and the degrees, and whether to compile, are read.
        ac_config, dump_folder: the activation checkpointing's config, or None, and the folder for its reports.

    Raises:
        ParallelConfigError: tensor, context, pipeline or expert parallelism, or a setting that cannot be honoured.
        WrapError: a model that is sharded already.
    """
    settings = dataclasses.asdict(parallelism) | dataclasses.asdict(training)
    check_settings(settings, "torchtitan")
    if device.device_type() == "cuda":
        check_settings(settings, "torchtitan on GPUs")
    config = config_of(
        FSDP2,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never",
        reshard_overrides=("lm_head=True",) * (parallelism.fsdp_reshard_after_forward == "always"),
        cpu_offload=training.enable_cpu_offload,
        sync_module_states=False,
    )
    reject_wrapped(model)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    axis = "dp_shard" if parallelism.spmd_backend == "spmd_types" else "fsdp"
    mesh = parallel_dims.get_mesh(["dp_replicate", axis] if parallel_dims.dp_replicate_enabled else axis)
    param, reduce = (
        TORCH_DTYPE_MAP[name] for name in (training.mixed_precision_param, training.mixed_precision_reduce)
    )
    policy = MixedPrecisionPolicy(param, reduce, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "in_place": True,
        "mp_policy": policy,
        "initializes": False,
        "calculate_per_token_loss": True,  # gradients are summed
    }
    wrapper = wrap_for_trainer(model, config, mesh, _units(model), **options)
    per_micro_batch = training.local_batch_size * wrapper.process_group.size()
    _LastReduces(wrapper, max(1, training.global_batch_size // per_micro_batch))  # -1 is one micro-batch
    return model


def with_fsdp2(config: Any) -> Any:
    """Returns a ``Trainer.Config`` whose model is sharded by `parallelize`. Nothing else changes.

    Args:
        config: torchtitan's, changed in place; or a ``ModelSpec``, which is copied.
    """
    if hasattr(config, "model_spec"):
        config.model_spec = with_fsdp2(config.model_spec)
        return config
    return dataclasses.replace(config, parallelize_fn=parallelize)


def __getattr__(name: str) -> Callable[[], Any]:
    """Returns the config function of this name, of any of torchtitan's models. torchtitan's ``--config`` asks here."""
    if name.startswith("_"):  # Python's own look-ups would import every model
        raise AttributeError(f"{__name__} has no attribute {name!r}")
    # A config's name begins with its model's: looking there first imports no other model.
    for model in sorted(_supported_models, key=lambda model: (not name.startswith(model), model)):
        try:
            registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:  # of a package that only this model needs
            if name.startswith(model):
                raise
            continue
        function = vars(registry).get(name)
        if callable(function):
            return lambda: with_fsdp2(function())
    raise AttributeError(f"no model of torchtitan has a config function {name!r}")


class _LastReduces:
    """Reduces gradients only in the last micro-batch of each step. The others accumulate on their rank.

    The trainer does not say which micro-batch is the last, but runs the same number in every step, so this class
    counts forwards with gradients. With a loss in chunks, the output layer runs forward and backward once for each
    chunk, between forward and backward of the other units. torchtitan makes the last chunk reduce; here only the last
    chunk of the last micro-batch does. The other units have no gradients yet in these backwards, and must not reduce.

    Args:
        wrapper: the model's.
        num_micro_batches: micro-batches in a step.
    """

    def __init__(self, wrapper: Any, num_micro_batches: int) -> None:
        self._wrapper = wrapper
        self._num_micro_batches = num_micro_batches
        # Number of forwards with gradients in all steps so far. `_before_forward` counts.
        self._num_forwards = 0
        head: Any = getattr(wrapper.module, "lm_head", None)
        # All units but the output layer.
        self._rest = [module for module in wrapper.engine.fsdp_modules if module is not head]
        wrapper.module.register_forward_pre_hook(self._before_forward)
        if head is not None:  # a unit, by `_units`
            wrapper.module.register_forward_hook(self._after_forward)
            head.register_forward_pre_hook(self._before_head)
            # Replaces torch's method on this instance; never restored. Torchtitan's loss in chunks calls it.
            self._set_sync_of_head = head.set_requires_gradient_sync
            head.set_requires_gradient_sync = lambda requires_gradient_sync, *, recurse=True: self._set_sync_of_head(
                requires_gradient_sync and self._is_last, recurse=recurse
            )

    @property
    def _is_last(self) -> bool:
        return self._num_forwards % self._num_micro_batches == 0

    def _before_forward(self, module: Any, args: Any) -> None:
        if torch.is_grad_enabled():
            if self._num_forwards == 0:  # ``to_empty`` has put other tensors, without marks, into the parameters
                own_parameters(module.parameters(), self._wrapper)
            self._num_forwards += 1
            module.set_requires_gradient_sync(self._is_last)

    @property
    def _is_chunked(self) -> bool:
        return bool(getattr(self._wrapper.module, "_skip_lm_head", False))  # torchtitan's mark

    def _before_head(self, module: FSDPModule, args: Any) -> None:
        if self._is_chunked:  # gather nothing ahead in its backward: what is not used in a chunk is freed with it
            module.set_modules_to_backward_prefetch([module])

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_chunked and self._is_last and output.requires_grad:
            self._set_sync_of_rest(False)
            output.register_hook(self._after_chunks)

    def _after_chunks(self, gradient: torch.Tensor) -> None:
        """Lets the rest reduce, whose backward begins, and the output layer, whose backward has ended, not again."""
        self._set_sync_of_rest(True)
        self._set_sync_of_head(False, recurse=False)

    def _set_sync_of_rest(self, is_enabled: bool) -> None:
        for module in self._rest:
            module.set_requires_gradient_sync(is_enabled, recurse=False)


def _units(model: nn.Module) -> list[UnitChoice]:
    """Returns the modules that become units: items of lists of layers, a decoder's embedding and output layer."""
    embedding, head = (getattr(model, name, None) for name in ("tok_embeddings", "lm_head"))
    if embedding is not None and (head is None or embedding.weight is not head.weight):
        # `plan.units` reads it once, when it plans.
        embedding.weights_used_in_backward = False
    return [*CONTAINERS, *(module for module in (embedding, head) if module is not None)]
