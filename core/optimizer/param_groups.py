"""Groups parameters by weight decay and learning rate.

Settings of single parameters come from Megatron's ``config_overrides``, whose keys select the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypedDict, TypeGuard, TypeVar

from torch import Tensor, nn

from ..base.errors import CheckpointError, ConfigError
from ..dist_checkpointing.format.json_values import decode, encode
from .main_params import MainParam
from .optimizer_config import OptimizerConfig


class ParamGroupOverride(TypedDict, total=False):
    """Settings of some parameters that differ from the config."""

    max_lr: float
    """Peak of the schedule."""

    min_lr: float
    """Floor of the schedule."""

    wd_mult: float
    """Factor of weight decay."""

    optimizer: str
    """``"muon"``, or `OptimizerConfig.muon_scalar_optimizer`, where the optimizer is Muon."""


@dataclass(frozen=True)
class ParamPredicate:
    """A condition on a parameter. Two conditions with one name are equal."""

    name: str
    fn: Callable[[nn.Parameter], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter) -> bool:
        return self.fn(param)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A condition on a parameter and its name. Two conditions with one name are equal."""

    name: str
    fn: Callable[[nn.Parameter, str], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter, name: str) -> bool:
        return self.fn(param, name)


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ParamKey:
    """Selects the parameters that meet any of its conditions. Each field is one condition or a tuple."""

    name: str | tuple[str, ...] = ()
    """Shell patterns of the name in the unwrapped model, or of that name after ``module.``, as in wrappers."""

    attr: str | tuple[str, ...] = ()
    """Names of attributes that are true, such as ``sequence_parallel``."""

    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()

    def matches(self, param: nn.Parameter, param_name: str) -> bool:
        """Returns whether a parameter with this name and its full shape is selected."""
        names = (param_name, f"module.{param_name}")
        return (
            any(fnmatchcase(name, pattern) for pattern in _as_tuple(self.name) for name in names)
            or any(getattr(param, attribute, False) for attribute in _as_tuple(self.attr))
            or any(predicate(param) for predicate in _as_tuple(self.predicate))
            or any(predicate(param, param_name) for predicate in _as_tuple(self.with_name_predicate))
        )


ConfigOverrides = Mapping[ParamKey, ParamGroupOverride]


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Returns the default overrides: no weight decay for biases and 1-D parameters, and the learning rate of
    `decoupled_lr` for embeddings and the output projection, which are known by their names in Megatron-LM or by its
    attribute ``is_embedding_or_output_parameter``."""
    vector = ParamPredicate("at_most_one_dimension", lambda param: param.ndim <= 1)
    overrides: dict[ParamKey, ParamGroupOverride] = {
        ParamKey(name=("bias", "*.bias"), predicate=vector): {"wd_mult": 0.0}
    }
    if config.decoupled_lr is not None:
        names = ("*word_embeddings.weight", "*output_layer.weight")
        key = ParamKey(name=names, attr="is_embedding_or_output_parameter")
        ends = overrides[key] = {"max_lr": config.decoupled_lr}
        if config.decoupled_min_lr is not None:
            ends["min_lr"] = config.decoupled_min_lr
    return overrides


def override_of(overrides: ConfigOverrides, name: str, param: nn.Parameter) -> ParamGroupOverride:
    """Merges all overrides that apply to one parameter.

    Raises:
        ConfigError: two keys that give it different values of one setting.
    """
    settings: dict[str, Any] = {}
    for key, override in overrides.items():
        if key.matches(param, name):
            for setting, value in override.items():
                if settings.setdefault(setting, value) != value:
                    raise ConfigError(
                        f"config_overrides gives parameter {name} the {setting} {settings[setting]} and, by {key}, "
                        f"{value}; let one key match it"
                    )
    return settings  # type: ignore[return-value]


def check_overrides(overrides: ConfigOverrides, config: OptimizerConfig) -> None:
    """Checks that the overrides set only what parameter groups have.

    Raises:
        ConfigError: names a setting that they do not have.
    """
    for key, override in overrides.items():
        others = {"optimizer"} if config.optimizer != "muon" else set()
        strays = sorted(override.keys() - (ParamGroupOverride.__annotations__.keys() - others))
        if strays:
            raise ConfigError(
                f"config_overrides sets {', '.join(strays)} for {key}; groups of parameters have max_lr, min_lr and "
                "wd_mult, and with Muon optimizer"
            )


def _as_tuple(value: Item | tuple[Item, ...]) -> tuple[Item, ...]:
    return value if isinstance(value, tuple) else (value,)


ParamCondition = Callable[[str, nn.Parameter], bool]
"""Takes a parameter's name in the unwrapped model and the parameter, which has its full shape even if sharded."""


def build_param_groups(
    params: Sequence[MainParam],
    config: OptimizerConfig,
    no_weight_decay_cond: ParamCondition | None = None,
    scale_lr_cond: ParamCondition | None = None,
    lr_mult: float = 1.0,
    config_overrides: ConfigOverrides | None = None,
) -> list[dict[str, Any]]:
    """Splits the parameters by weight decay and learning rate, as Megatron-LM does, without empty groups.

    `no_weight_decay_cond` selects the parameters without weight decay; by default biases and parameters of at most one
    dimension (norms). `scale_lr_cond` selects those whose learning rate is multiplied by `lr_mult`.

    With `config_overrides`, which exclude both conditions, parameters with equal overrides form a group.

    A group carries its multipliers ``wd_mult`` and ``lr_mult``, ``max_lr`` and ``min_lr`` for the scheduler, and
    ``default_config``, whether no multiplier of its own makes it differ from the config.

    Raises:
        ConfigError: no learning rate, an `lr_mult` that applies to nothing, or conditions next to overrides.
    """
    if config.lr is None:
        raise ConfigError("lr is not set; give OptimizerConfig(lr=...), the peak of the schedule")
    if lr_mult != 1.0 and scale_lr_cond is None:
        raise ConfigError(f"lr_mult is {lr_mult}, but scale_lr_cond names no parameter that it applies to; give both")
    if config_overrides is not None and (no_weight_decay_cond or scale_lr_cond):
        raise ConfigError(
            "config_overrides and no_weight_decay_cond or scale_lr_cond are both given; put the conditions into "
            "overrides, by ParamKey(with_name_predicate=...)"
        )
    overrides = get_standard_config_overrides(config) if config_overrides is None else config_overrides
    check_overrides(overrides, config)
    of_config = (1.0, 1.0, config.lr, config.min_lr)
    # A frozen pipeline stage has a group without parameters, in which schedules and the log find the config's rates.
    members: dict[tuple[Any, ...], list[Tensor]] = {} if params else {of_config: []}
    for p in params:
        scale = lr_mult if scale_lr_cond is not None and scale_lr_cond(p.name, p.param) else 1.0
        if no_weight_decay_cond is None:
            override = override_of(overrides, p.name, p.param)
        else:
            override = {"wd_mult": 0.0} if no_weight_decay_cond(p.name, p.param) else {}
        rates = override.get("max_lr", config.lr), override.get("min_lr", config.min_lr)
        members.setdefault((override.get("wd_mult", 1.0), scale, *rates), []).append(p.main)
    return [
        {
            "params": tensors,
            "default_config": (wd, scale, max_lr, min_lr) == of_config,
            "wd_mult": wd,
            "lr_mult": scale,
            "lr": max_lr * scale,
            "weight_decay": config.weight_decay * wd,
            "max_lr": max_lr,
            "min_lr": min_lr,
        }
        for (wd, scale, max_lr, min_lr), tensors in members.items()
    ]


_OF_CONFIG = ("params", "param_names", "wd_mult", "lr_mult", "max_lr", "min_lr", "default_config")
_KERNELS = ("foreach", "fused", "capturable", "differentiable")
"""What groups have from their construction, by which schedules compute, and torch's choices of kernels. A run that
continues has its own."""


def groups_to_json(groups: Iterable[Mapping[str, Any]], names: Mapping[Tensor, str]) -> list[dict[str, Any]]:
    """Returns the settings of an optimizer's groups, such as ``lr``, and the names of their parameters.

    Args:
        names: of the groups' tensors.

    Raises:
        CheckpointError: a setting that JSON does not hold.
    """
    saved: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        values = {k: v.item() if _is_number(v) else v for k, v in group.items() if k not in (*_OF_CONFIG, *_KERNELS)}
        tensors: dict[str, Tensor] = {}
        saved.append(encode(values, f"group {index} of the optimizer", tensors))
        if tensors:
            raise CheckpointError(f"groups of the optimizer hold tensors ({', '.join(tensors)}); give numbers")
        saved[-1]["params"] = [names[tensor] for tensor in group["params"] if tensor in names]
    return saved


def saved_settings(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Tensor, str], saved: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns for each group the settings that its parameters had in `groups_to_json`.

    Raises:
        CheckpointError: parameters of a group had different settings, or none, or such as change another update.
    """
    of_name = {name: {k: v for k, v in group.items() if k != "params"} for group in saved for name in group["params"]}
    settings: list[dict[str, Any]] = []
    for group in groups:
        own_names = [names[tensor] for tensor in group["params"] if tensor in names]
        there = [of_name.get(name, {}) for name in own_names] or [{}]
        if own_names and any(not values or values != there[0] for values in there):
            raise CheckpointError(
                f"the optimizer's group with parameter {own_names[0]} was saved in groups with different settings, or "
                "without some of its parameters; build the optimizer with the groups that it had, or keep those of "
                "now, by load_state_scalars(scalars, with_groups=False)"
            )
        if lost := [f"{k}={there[0][k]}" for k in _OF_UPDATES if there[0].get(k) and k not in group]:
            raise CheckpointError(
                f"the optimizer was saved with {', '.join(lost)}, which the one here does not have; continue with the "
                "optimizer of torch that was saved, by shardstack.optimizer.shard_optimizer"
            )
        settings.append(decode(there[0], dict[str, Tensor]().__getitem__))
    return settings


_OF_UPDATES = ("maximize", "amsgrad", "nesterov", "dampening")
"""Settings of torch's optimizers that change an update, where they are not 0 or False, and that other optimizers may
lack."""


def load_groups(groups: Sequence[dict[str, Any]], settings: Iterable[Mapping[str, Any]]) -> None:
    """Gives each group its settings, into the tensors that it keeps them in."""
    for group, own in zip(groups, settings, strict=True):
        for key, value in own.items():
            if _is_number(group.get(key)):
                group[key].fill_(value)
            else:
                group[key] = value


def _is_number(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1
