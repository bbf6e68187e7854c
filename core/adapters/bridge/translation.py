"""Another library's settings become a wrapper: tables say what is refused or ignored.

`check_settings` reads them; `config_of` makes the settings of a wrapper; `wrap_for_trainer` and `Replicas` build it.
`check_version` says which versions of the other library are known.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.torch_version import TorchVersion

from ...base.errors import ConfigError, MissingExtraError, ParallelConfigError, warn_once
from ...base.megatron_names import changed_fields
from ...distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    _BaseDataParallel,
    wrap_model,
)
from ...distributed.groups import Ranks, whole_group
from ...distributed.plan.units import UnitChoice
from ...distributed.step import Phase

_TABLES: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("foreign_settings.json").read_text("utf-8")
)


def table(name: str) -> dict[str, Any]:
    """Returns a table of ``foreign_settings.json``."""
    return _TABLES[name]


def check_settings(settings: Any, table: str, *, where: str = "") -> None:
    """Raises for another library's setting that is refused here. Warns once of each that is given and ignored.

    The tables of ``foreign_settings.json`` say, by names with spaces between, why a setting is ``refused`` and what to
    do, or why it is ``ignored``, which changes no number. It concerns a value that is neither the default nor empty;
    or one that is ``only`` these, or any ``unless`` these.

    Args:
        settings: a mapping; or an object, whose default values, if it is a dataclass, ask for nothing. A setting that
            it lacks is neither refused nor ignored.
        table: the table's name, which begins with that of the adapter.
        where: what refuses, for the message.

    Raises:
        ParallelConfigError: a setting that is refused.
    """
    values = settings if isinstance(settings, Mapping) else getattr(settings, "__dict__", {})
    changes = changed_fields(settings) if dataclasses.is_dataclass(settings) else None
    for fate, rows in _TABLES[table].items():
        for name, row in ((name, row) for names, row in rows.items() for name in names.split() if name in values):
            value, row = values[name], {"reason": row} if isinstance(row, str) else row
            concerns = bool(value) if changes is None else name in changes
            if "only" in row or "unless" in row:
                concerns = value in row["only"] if "only" in row else value not in row["unless"]
            text = value.name if isinstance(value, Enum) else value
            if concerns and fate == "refused":
                raise ParallelConfigError(f"{name} is {text!r}{where}: {row['reason']}")
            if concerns:
                warn_once(f"{name}={text} changes nothing: {row['reason']}")


def reject_reproducible(config: DistributedDataParallelConfig) -> None:
    """Raises for a setting that the samplers of a trainer cannot honour.

    Raises:
        ConfigError: ``reproducible_across_ranks``.
    """
    if config.reproducible_across_ranks:
        raise ConfigError(
            "reproducible_across_ranks is set, which needs samples dealt out by micro_batch_index, and this trainer's "
            "data loaders deal them out by rank; drop it, or train as docs/reproducible.md does"
        )


class Replicas(DistributedDataParallel):
    """`DistributedDataParallel` that finishes gradients in backward. Its settings need no choice.

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
    """Wrapper for trainers that call the unwrapped model and never call `finalize_model_grads`.

    The last backward of a step leaves gradients as any optimizer may read them, means and sums alike: what a trainer
    divides, it divides in its loss.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module.register_forward_pre_hook(self._forget_failure, prepend=True)
        self.let_module_be_called()
        self.engine.gradients.adds_always = True

    def _forget_failure(self, module: nn.Module, args: Any) -> None:
        """Ends a step whose backward raised, once an optimizer has set every gradient to None."""
        self.engine.gradients.recover()
        if self.step.phase is Phase.BROKEN and all(p.grad is None for p in module.parameters()):
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
    wrapper = wrap_model(
        model, config, ddp_config, process_group=ranks, sub_modules_to_wrap=units, disable_bucketing=disable_bucketing
    )
    if isinstance(wrapper, TorchFullyShardedDataParallel):
        wrapper.let_module_be_called()
    return wrapper


SUPPORTED = {
    "accelerate": ("1.15", "2", "hf"),
    "lightning": ("2.6", "2.7", "lightning"),
    "megatron-core": ("0.16", "0.21", "megatron"),
    "torchtitan": ("0.3", "0.4", "titan"),
    "transformers": ("5.23", "6", "hf"),
    "trl": ("1.16", "2", "trl"),
    "verl": ("0.9.1", "0.10", "verl"),
}
"""The first version that an adapter supports, the first that it does not, and the extra that installs it.
`pyproject.toml` has the same."""


def check_version(package: str, adapter: str) -> None:
    """Raises unless a supported version of a package is installed. Adapters call it when they are imported.

    Args:
        package: of `SUPPORTED`.
        adapter: its name, for messages.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: another version.
    """
    at_least, below, extra = SUPPORTED[package]
    if util.find_spec(package.partition("-")[0]) is None:  # what an uninstallation left may still have a version
        raise MissingExtraError(package, extra, adapter)
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingExtraError(package, extra, adapter) from None
    release = version.split("rc")[0].split(".dev")[0]  # which a candidate or a development version precedes
    if TorchVersion(version) < TorchVersion(at_least) or not TorchVersion(release) < TorchVersion(below):
        raise ConfigError(
            f"{package} {version} is installed, and {adapter} knows {package}>={at_least},<{below}; install one of "
            f"these: pip install 'shardstack[{extra}]'"
        )
