"""Megatron-LM's training loop on the wrappers of this library: import it before ``megatron.training``.

    import core.adapters.megatron_lm                          # the first line of pretrain_gpt.py

or run a script without a change in it::

    torchrun --nproc-per-node 8 -m core.adapters.megatron_lm pretrain_gpt.py --use-torch-fsdp2 ...

Megatron-LM's flags choose the wrapper. Without any it is `DistributedDataParallel` of this module, with
``--use-distributed-optimizer`` its ZeRO-1, and with ``--use-torch-fsdp2`` `TorchFullyShardedDataParallel`. The first
rank prints which was built. ``--use-megatron-fsdp`` still means Megatron-LM's own. `with_fsdp2` selects FSDP2 without
the flag, for what Megatron-LM's check of the flag refuses, as tied embeddings and fp16; `register` gives FSDP2
settings that have no flag. Fields of Megatron-LM's settings that differ from their defaults become fields of ours;
`bridge/foreign_settings.json` says what is refused.
"""

from __future__ import annotations

import functools
import importlib
import runpy
import sys
from collections.abc import Callable, Iterable, Set
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from .. import distributed
from ..base.errors import ConfigError, ParallelConfigError, ShardstackError
from ..base.megatron_names import changed_fields
from ..base.text import choices
from ..distributed import TorchFullyShardedDataParallelConfig
from ..distributed.distributed_data_parallel_config import EngineKind
from ..distributed.groups import Ranks
from ..distributed.guards import reject_wrapped
from ..distributed.plan.settings import own_settings
from ..distributed.plan.units import UnitChoice
from .bridge.translation import check_settings, check_version

check_version("megatron-core", "core.adapters.megatron_lm")

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import distributed_data_parallel as stock_ddp  # noqa: E402
from megatron.core.distributed import torch_fully_sharded_data_parallel as stock_fsdp2  # noqa: E402
from megatron.core.distributed.data_parallel_base import _BaseDataParallel as MegatronWrapper  # noqa: E402
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding  # noqa: E402
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection as MegatronGroups  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

__all__ = ["DistributedDataParallel", "TorchFullyShardedDataParallel", "register", "with_fsdp2"]

DEFAULT_UNIT_CLASSES: tuple[type[nn.Module], ...] = (
    TransformerLayer,
    LanguageModelEmbedding,
    RotaryEmbedding,
    tensor_parallel.ColumnParallelLinear,
)
"""Megatron-LM's layers that become units, as in its own wrapper. Only outermost instances count."""


registered_settings: dict[str, Any] = {}
"""Fields of `TorchFullyShardedDataParallelConfig` for every FSDP2 wrapper that is constructed from now on. `register`
sets them, for what no flag of Megatron-LM carries to the wrapper."""


class DistributedDataParallel(distributed.DistributedDataParallel):
    """`core.distributed.DistributedDataParallel` inside Megatron-LM: replicas, and ZeRO-1 with
    ``use_distributed_optimizer``.

    Megatron-LM's optimizers update the model, its `DistributedOptimizer` on the buffers of this wrapper, and its loop,
    schedules and checkpoints call the wrapper as they call their own.

    Args:
        config: the model's, of Megatron-LM's classes.
        ddp_config: Megatron-LM's ``DistributedDataParallelConfig``. What it changes of its defaults is translated;
            what would change a number and does not exist here raises.
        module: the model; usually a ``Float16Module`` in bf16 or fp16.
        disable_bucketing: reduce each buffer in one piece.
        pg_collection: Megatron-LM's groups; by default those of its ``parallel_state``.
        full_param_layout: not read. Megatron-LM's optimizer finds parameters by the buffers.

    Raises:
        ParallelConfigError, ConfigError: a field that this wrapper cannot honour.
        WrapError: a model that is wrapped already.
    """

    overlap_param_gather_with_optimizer_step = False
    """Set by Megatron-LM's `get_megatron_optimizer`, and read there."""

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        full_param_layout: Any = None,
    ) -> None:
        reject_wrapped(module, (MegatronWrapper, distributed._BaseDataParallel))
        # Megatron-LM names the last micro-batch of a step only where gradients overlap, and has made bucket_size of
        # num_buckets.
        in_elements = replace(ddp_config, num_buckets=None) if getattr(ddp_config, "num_buckets", None) else ddp_config
        settings = replace(
            own_settings(in_elements, EngineKind.FLAT_BUFFERS),
            overlap_grad_reduce=bool(ddp_config.overlap_grad_reduce),
            overlap_param_gather=bool(ddp_config.overlap_param_gather),
        )
        groups = MegatronGroups.use_mpu_process_groups() if pg_collection is None else pg_collection
        super().__init__(config, settings, module, disable_bucketing, groups)
        self.ddp_config = ddp_config  # Megatron-LM reads fields that only its own config has
        # Whether the next forward gathers what Megatron-LM's optimizer may have updated, which leaves that to the
        # wrapper if gathers overlap. The calls before and after an update set it; a forward clears it.
        self._gathers_next = False
        _say(self)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        super().finish_grad_sync(force_all_reduce)
        self._gathers_next = self.plan.settings.overlap_param_gather

    def zero_grad_buffer(self) -> None:
        super().zero_grad_buffer()
        self._gathers_next = self.plan.settings.overlap_param_gather

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._gathers_next:
            self._gathers_next = False
            self.start_param_sync()
        return super().forward(*inputs, **kwargs)

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        super().disable_forward_pre_hook(param_sync)
        if param_sync:
            self.start_param_sync(force_sync=True)

    def _start_bucket_group_param_sync(self, bucket_group: object, force_sync: bool = False) -> None:
        # Megatron-LM's optimizer calls it for one after the other. The first call gathers all.
        if bucket_group is (self.bucket_groups or self.expert_parallel_bucket_groups)[0]:
            self.start_param_sync(force_sync=force_sync)


def _say(wrapper: distributed._BaseDataParallel) -> None:
    if dist.get_rank() == 0:
        kind = type(wrapper)
        sys.stdout.write(f"> the model is wrapped by {kind.__module__}.{kind.__name__}: {wrapper.plan.strategy}\n")
        sys.stdout.flush()


class TorchFullyShardedDataParallel(distributed.TorchFullyShardedDataParallel):
    """`core.distributed.TorchFullyShardedDataParallel` inside Megatron-LM.

    It takes the arguments that Megatron-LM's ``get_model`` gives, and its models: units are Megatron-LM's layers, and
    an output layer that shares the embedding's weight reads it from the root, which is gathered for the whole forward.
    The constructor sets ``config.no_sync_func``, so that of the micro-batches of a step only the last one reduces
    gradients, and marks parameters with ``is_torch_fsdp2_param``, which Megatron-LM's checkpoints read.

    Args:
        config: the model's, of Megatron-LM's classes.
        ddp_config: Megatron-LM's ``TorchFullyShardedDataParallelConfig`` or ``DistributedDataParallelConfig``, or one
            of this library. Fields that differ from their defaults are translated; those that FSDP2 cannot honour
            raise.
        module: the model; usually a ``Float16Module`` in bf16 or fp16, whose optimizer keeps fp32 masters.
        sub_modules_to_wrap: classes of units; `DEFAULT_UNIT_CLASSES` by default.
        disable_bucketing: changes nothing.
        process_group: the ranks to shard over; by default Megatron-LM's data-parallel group with context parallelism.
        pg_collection: Megatron-LM's; its ``dp_cp`` serves as `process_group`.

    Raises:
        ParallelConfigError: virtual pipeline stages, expert parallelism, gradient accumulation fusion, a
            ``config.no_sync_func`` of another origin, or a field that FSDP2 cannot honour.
        WrapError: a model that is wrapped already.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        sub_modules_to_wrap: Iterable[UnitChoice] | None = None,
        disable_bucketing: bool = False,
        process_group: Ranks | None = None,
        *,
        pg_collection: Any = None,
    ) -> None:
        reject_wrapped(module, (MegatronWrapper, distributed._BaseDataParallel))
        no_sync = getattr(config, "no_sync_func", None)
        if not (no_sync is None or isinstance(getattr(no_sync, "__self__", None), TorchFullyShardedDataParallel)):
            raise ParallelConfigError(
                f"config.no_sync_func is {no_sync!r}, and the wrapper sets its own; leave it None"
            )
        check_settings(vars(config), "megatron_lm", where=" with --use-torch-fsdp2")
        if process_group is None:
            process_group = (
                parallel_state.get_data_parallel_group(with_context_parallel=True)
                if pg_collection is None
                else pg_collection.dp_cp
            )
        submodule: Any  # FSDP2 reads these marks: a shared weight is in one unit, and a look-up needs none in backward
        for submodule in module.modules():
            if getattr(submodule, "share_embeddings_and_output_weights", False):
                submodule.shared_embedding_or_output_weight().shared_embedding = True
            if isinstance(submodule, LanguageModelEmbedding):
                submodule.weights_used_in_backward = False
        super().__init__(
            config,
            translate_config(ddp_config),
            module,
            DEFAULT_UNIT_CLASSES if sub_modules_to_wrap is None else sub_modules_to_wrap,
            disable_bucketing,
            process_group,
        )
        self.ddp_config = ddp_config  # Megatron-LM reads fields that only its own config has
        # Read by Megatron-LM's checkpoints. These attributes and `config.no_sync_func` are never removed.
        for parameter in module.parameters():
            parameter.is_torch_fsdp2_param = True  # type: ignore[attr-defined]
        config.no_sync_func = self.no_sync
        _say(self)


def translate_config(ddp_config: Any) -> TorchFullyShardedDataParallelConfig:
    """Returns the settings of a wrapper: what a config of Megatron-LM changes, attributes that were set on it besides,
    and what was registered.

    Raises:
        ParallelConfigError: both set a field, to different values; or FSDP2 cannot honour one, or does not know it.
    """
    values = changed_fields(ddp_config)
    if not isinstance(ddp_config, distributed.DistributedDataParallelConfig):
        _check_known(values.keys() - {field.name for field in fields(ddp_config)}, "Megatron-LM's settings were given")
    for name, value in registered_settings.items():
        if values.get(name, value) != value:
            raise ParallelConfigError(
                f"{name} is {values[name]!r} in Megatron-LM's settings and {value!r} in register(); give it once"
            )
    return TorchFullyShardedDataParallelConfig(**(values | registered_settings))


REPLACED: dict[type, type[distributed._BaseDataParallel]] = {
    stock_ddp.DistributedDataParallel: DistributedDataParallel,
    stock_fsdp2.TorchFullyShardedDataParallel: TorchFullyShardedDataParallel,
}
"""The wrapper of this module in the place of each of Megatron-LM's."""


def _check_known(names: Set[str], what: str) -> None:
    allowed = {field.name for field in fields(TorchFullyShardedDataParallelConfig)}
    for name in names - allowed:
        raise ParallelConfigError(f"{what} {name}, which is no setting of FSDP2; {choices(name, allowed)}")


def register(**settings: Any) -> None:
    """Puts this library's wrappers in the place of Megatron-LM's. Importing `core.adapters.megatron_lm` calls it.

    The classes are replaced in every module of Megatron-LM that has them, also in those that were imported before.

    Args:
        settings: fields of `core.distributed.TorchFullyShardedDataParallelConfig` for every FSDP2 wrapper from now
            on, as ``grad_reduce_in_fp32=True``: Megatron-LM gives its own ``reshard_after_forward`` alone.

    Raises:
        ParallelConfigError: an unknown setting, or one that contradicts another.
        ShardstackError: a module outside of Megatron-LM, as a training script, imported one of the classes before.
    """
    _check_known(settings.keys(), "register was given")
    TorchFullyShardedDataParallelConfig(**settings)
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    holders = [
        (module, name, own)
        for module in modules
        for name, value in list(vars(module).items())
        for stock, own in REPLACED.items()
        if value is stock  # what else a module has is not looked at: some warn then
    ]
    for module, name, _ in holders:
        if not module.__name__.startswith("megatron."):
            raise ShardstackError(
                f"{module.__name__} imported Megatron-LM's {name} before core.adapters.megatron_lm, and would go on "
                "using it; import core.adapters.megatron_lm first"
            )
    for module, name, own in holders:
        setattr(module, name, own)
    registered_settings.clear()
    registered_settings.update(settings)


def with_fsdp2(model_provider: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns a model provider for ``pretrain`` that selects the FSDP2 wrapper when it builds the model.

    Megatron-LM checks its flags before that: without ``--use-torch-fsdp2`` it demands neither untied embeddings nor
    another precision than fp16, nor a value of ``CUDA_DEVICE_MAX_CONNECTIONS``. What cannot work is refused here.

    Raises:
        ParallelConfigError: by the provider, for an argument that FSDP2 cannot honour.
    """

    @functools.wraps(model_provider)
    def provide(*args: Any, **kwargs: Any) -> nn.Module:
        # Imported here: `core.adapters.megatron_lm` is imported before `megatron.training`.
        arguments = importlib.import_module("megatron.training.global_vars").get_args()
        check_settings(arguments, "megatron_lm arguments", where=" with with_fsdp2")
        arguments.use_torch_fsdp2 = True
        return model_provider(*args, **kwargs)

    return provide


def main() -> None:
    """Runs the script that the first argument names, as Python would, with the other arguments."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise ConfigError(
            f"{' '.join(sys.argv[1:2]) or 'no script'} was given, which is no file; give the path of a script: "
            "python -m core.adapters.megatron_lm pretrain_gpt.py --use-torch-fsdp2"
        )
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":  # of the imported module, whose class scripts find in Megatron-LM
    importlib.import_module("shardstack.adapters.megatron_lm").main()
else:
    register()
