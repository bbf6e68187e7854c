"""What the strategies for Trainer and Fabric share: the process group, wrapper, optimizer, and a checkpoint's folder.

A checkpoint is a trained model, the values of Lightning and random streams. Tensors of callbacks are ``values...``;
each rank's random streams are ``rng.rank<i>``. Other values are a tree as JSON: loops, callbacks, schedulers and
hyper-parameters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from torch import nn
from torch.optim import Optimizer

from ...base import device
from ...base.errors import CheckpointError, ConfigError, OptimizerError, WrapError, warn_once
from ...dist_checkpointing.agreement import Ranks
from ...dist_checkpointing.format.folders import existing_folder
from ...dist_checkpointing.format.index import CheckpointIndex
from ...dist_checkpointing.format.json_values import decode, encode
from ...dist_checkpointing.format.reader import read_index
from ...distributed import DistributedDataParallelConfig, wrap_model
from ...distributed.fully_sharded_data_parallel_config import FSDP2, STRATEGIES, config_of
from ...distributed.plan.units import UnitChoice
from ...rendezvous import default_group
from ..bridge.checkpoints import load_trained, save_trained
from ..bridge.sharding import units_by_class, world_mesh
from ..bridge.trained import Trained, wrapper_of
from ..bridge.translation import reject_reproducible

Units = Sequence[type[nn.Module] | str]
"""Classes, or their names, plain or dotted."""

_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class Processes:
    """The arguments and the process group of a strategy. Mixed in before one of Lightning's two `DDPStrategy`.

    From that class come launcher, ranks, samplers and collectives of Lightning; nothing is wrapped in torch's DDP. A
    process group that exists already, as under Ray Train, is used as it is.

    Its arguments are described in `ShardstackStrategy`.
    """

    root_device: torch.device
    cluster_environment: ClusterEnvironment | None

    def __init__(
        self, sharding: str | DistributedDataParallelConfig = FSDP2, *, units: Units | None = None, **lightning: Any
    ) -> None:
        if not isinstance(sharding, (str, DistributedDataParallelConfig)):
            raise ConfigError(
                f"sharding is {sharding!r}; it takes a config of shardstack.distributed, or one of "
                f"{', '.join(STRATEGIES)}"
            )
        self.settings = config_of(sharding) if isinstance(sharding, str) else sharding
        reject_reproducible(self.settings)
        self.units = (units,) if isinstance(units, (str, type)) else units
        strategy: Any = super()
        strategy.__init__(**lightning)
        of_ddp = {name for name in lightning if name.startswith("ddp_comm_") or name == "model_averaging_period"}
        if names := sorted(of_ddp | vars(self).pop("_ddp_kwargs").keys()):  # which Lightning gives to torch's DDP
            raise ConfigError(
                f"the strategy has no argument {', '.join(names)}; settings of the wrapper are a config of "
                "shardstack.distributed, given as sharding"
            )

    def setup_distributed(self) -> None:
        """Joins the default process group, unless it exists. Lightning's Trainer calls it.

        Raises:
            ConfigError: a device that there are no collectives for, or a process group for another one.
        """
        kind, own = self.root_device.type, cast(Any, self)
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"the strategy got the device {self.root_device}; it takes accelerator='cpu' or 'cuda'")
        set_ranks = own.set_world_ranks if hasattr(self, "set_world_ranks") else own._set_world_ranks  # Fabric's
        set_ranks()
        if "RANK" in os.environ and own.process_group_backend is None and device.device_type() == kind:
            default_group.init_process_group(own._timeout.total_seconds() / 60)  # also after a restart
        _init_dist_connection(  # which does nothing where there is a group
            self.cluster_environment,
            own._get_process_group_backend(),
            timeout=own._timeout,
            device_id=self.root_device if kind == "cuda" else None,
        )
        if device.device_type() != kind:
            raise ConfigError(
                f"the process group is {dist.get_backend()}, which carries {device.device_type()} tensors, and the "
                f"model is on {self.root_device}; use accelerator={device.device_type()!r}, or another backend"
            )

    _setup_distributed = setup_distributed  # Fabric's name

    def folder(self, path: Any) -> Path:
        """Returns the folder of a checkpoint, which all ranks share.

        Raises:
            CheckpointError: a remote path.
        """
        path = cast(Any, self).broadcast(path)
        if "://" in str(path):
            raise CheckpointError(f"{path} is remote, and checkpoints are folders of a file system that ranks share")
        return Path(path)

    def built_here(
        self, empty_init: bool | None, of_precision: AbstractContextManager[Any]
    ) -> AbstractContextManager[Any]:
        """Builds a module inside it on this rank's device, or on meta with ``empty_init``, in a precision."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else self.root_device)
        stack.enter_context(of_precision)
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Moves a module to this rank's device, unless it is on the meta device, from which wrapping takes it."""
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.to(self.root_device)


def wrap(module: nn.Module, settings: DistributedDataParallelConfig, units: Units | None) -> Trained:
    """Wraps a model over all ranks, or takes the wrapper that it has, if that has equal settings.

    Args:
        module: on this rank's device, or on the meta device.
        units: by default the layers that the model repeats.

    Raises:
        WrapError: the model is wrapped with other settings, or has no module of a class in `units`.
    """
    wrapper = wrapper_of(module)
    if wrapper is not None and wrapper.module is module:
        if wrapper.ddp_config != settings:
            raise WrapError(
                f"{type(module).__name__} is wrapped already, with another sharding than this strategy's; give it a "
                "strategy of equal settings, or build the model again"
            )
        return Trained(wrapper)
    mesh = world_mesh(settings.num_distributed_optimizer_instances)
    modules = _units(module, settings, units)
    return Trained(wrap_model(module, SimpleNamespace(), settings, process_group=mesh, sub_modules_to_wrap=modules))


def _units(module: nn.Module, settings: DistributedDataParallelConfig, units: Units | None) -> list[UnitChoice]:
    if units is not None:
        kinds = ([unit] if isinstance(unit, type) else units_by_class(module, unit, "units") for unit in units)
        return [kind for several in kinds for kind in several]
    try:
        return list(units_by_class(module, None, "units"))
    except WrapError as error:
        if settings.shards_parameters:
            warn_once(f"{error}. Until then the whole model is one unit, gathered at once")
        return []


def trained_of(module: nn.Module) -> Trained:
    """Returns a wrapped model, by its wrapper or the module inside.

    Raises:
        ConfigError: it is not wrapped.
    """
    if (wrapper := wrapper_of(module)) is None:
        raise ConfigError(f"{type(module).__name__} is not wrapped; give it to fabric.setup or fabric.setup_module")
    return Trained.of(wrapper) or Trained(wrapper)


def check_precision(plugin: Any) -> None:
    """Raises for a precision plugin, of the Trainer or of Fabric, that has no counterpart here.

    Raises:
        ConfigError: names the precision, and those that there are.
    """
    kind, precision = type(plugin).__name__, getattr(plugin, "precision", None)
    if kind not in ("Precision", "MixedPrecision", "HalfPrecision") or precision not in _PRECISIONS:
        raise ConfigError(f"precision is {precision!r} ({kind}); this strategy takes {', '.join(_PRECISIONS)}")


def take_optimizer(optimizer: Optimizer) -> Trained:
    """Lets an optimizer of the user update its wrapped model, and returns that.

    Raises:
        OptimizerError: of another model, or one that cannot update it.
    """
    trained = Trained.of_parameters(param for group in optimizer.param_groups for param in group["params"])
    if trained is None:
        raise OptimizerError(
            f"{type(optimizer).__name__} holds parameters that the wrapped model has not: it was built for another "
            "one; build it in configure_optimizers, or give fabric.setup both"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS computes gradients several times in a step, which this strategy does not; use AdamW or SGD"
        )
    trained.take(optimizer)
    return trained


def _check_has_state(trained: Trained) -> None:
    if trained.optimizer is not None and trained.updates is None:
        raise CheckpointError(
            f"{type(trained.optimizer).__name__} is not elementwise, and folders hold no state of such an optimizer; "
            "save weights alone (save_weights_only=True), or train by an elementwise one, as AdamW"
        )


_VALUES = "values"


def save_folder(
    folder: Path, trained: Trained, model: Mapping[str, torch.Tensor], values: Any, *, with_optimizer: bool
) -> None:
    """Writes a checkpoint atomically, in place of one of that name. Collective.

    Args:
        model: the tensors of the model to save, by name.
        values: a tree of what else there is.
        with_optimizer: save the state of the optimizer, and of the random streams, too.

    Raises:
        CheckpointError: on all ranks, if it failed on one.
    """
    others: dict[str, torch.Tensor] = {}
    metadata = {"lightning": Ranks().on_all(lambda: encode(values, _VALUES, others))}
    if with_optimizer:
        _check_has_state(trained)
    both = {"with_optimizer": with_optimizer, "with_streams": with_optimizer}
    save_trained(folder, trained, model, **both, others=others, metadata=metadata)


def load_folder(folder: Path, trained: Trained, *, strict: bool, with_optimizer: bool) -> Any:
    """Fills the model, and the optimizer if asked, from a checkpoint. Returns the tree of other values. Collective.

    Args:
        strict: the checkpoint has to hold all of the model's tensors and no others.
        with_optimizer: continue the optimizer, and the random streams on an equal number of ranks.

    Raises:
        CheckpointError: on all ranks: another kind of file, another model or optimizer, before anything is changed;
            or damaged.
    """
    if with_optimizer:
        _check_has_state(trained)
    index = Ranks().from_first(lambda: _checked_index(folder, with_optimizer))
    metadata = index.metadata
    values = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in index.tensors.items() if n.startswith(_VALUES)}
    both = {"with_optimizer": with_optimizer, "with_streams": with_optimizer}
    load_trained(folder, trained, trained.model_tensors(), strict=strict, **both, others=values)
    return decode(metadata["lightning"], values.__getitem__)


def _checked_index(folder: Path, with_optimizer: bool) -> CheckpointIndex:
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is one file, and this strategy's checkpoints are folders; load its weights into the module "
            "before fit (LightningModule.load_from_checkpoint), which starts a new run from them"
        )
    index = read_index(existing_folder(folder))
    metadata = index.metadata
    if "lightning" not in metadata or not isinstance(metadata.get("model_tensors"), list):
        raise CheckpointError(
            f"{folder} is no checkpoint of a Lightning strategy; load its weights with "
            "shardstack.dist_checkpointing.load_weights"
        )
    if with_optimizer and "optimizer" not in metadata:
        raise CheckpointError(
            f"{folder} holds weights alone (save_weights_only), so that no training continues from it; load its "
            "weights with shardstack.dist_checkpointing.load_weights, and fit without ckpt_path"
        )
    return index
