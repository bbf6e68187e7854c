"""Settings of single parameters, by Megatron-LM's ``config_overrides``: a key selects the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypedDict, TypeVar

from torch import nn

from ..errors import ConfigError
from .optimizer_config import OptimizerConfig


class ParamGroupOverride(TypedDict, total=False):
    """Settings of some parameters that differ from the config."""

    max_lr: float
    """Peak of the schedule."""

    min_lr: float
    """Floor of the schedule."""

    wd_mult: float
    """Factor of weight decay."""


@dataclass(frozen=True)
class ParamPredicate:
    """A condition on a parameter; two of one name are equal."""

    name: str
    fn: Callable[[nn.Parameter], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter) -> bool:
        return self.fn(param)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A condition on a parameter and its name; two of one name are equal."""

    name: str
    fn: Callable[[nn.Parameter, str], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter, name: str) -> bool:
        return self.fn(param, name)


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ParamKey:
    """Selects the parameters that meet any of its conditions; each field is one condition or a tuple."""

    name: str | tuple[str, ...] = ()
    """Shell patterns of the name in the unwrapped model; one that begins with ``module.``, as in wrappers, serves."""

    attr: str | tuple[str, ...] = ()
    """Attributes that are true, as ``sequence_parallel``."""

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
    """Returns the default overrides: no weight decay for biases and 1-D parameters.

    Args:
        config: Megatron-LM's argument; none of its fields that are taken here changes the answer.
    """
    vector = ParamPredicate("at_most_one_dimension", lambda param: param.ndim <= 1)
    return {ParamKey(name=("bias", "*.bias"), predicate=vector): {"wd_mult": 0.0}}


def override_of(overrides: ConfigOverrides, name: str, param: nn.Parameter) -> ParamGroupOverride:
    """Merges all overrides that apply to one parameter.

    Raises:
        ConfigError: two keys that give it different values of one setting.
    """
    found: dict[str, Any] = {}
    for key, override in overrides.items():
        if key.matches(param, name):
            for setting, value in override.items():
                if found.setdefault(setting, value) != value:
                    raise ConfigError(
                        f"config_overrides gives parameter {name} the {setting} {found[setting]} and, by {key}, "
                        f"{value}; let one key match it"
                    )
    return found  # type: ignore[return-value]


def check_overrides(overrides: ConfigOverrides) -> None:
    """Raises for a setting that groups of parameters do not have here.

    Raises:
        ConfigError: the setting is named.
    """
    for key, override in overrides.items():
        unknown = sorted(override.keys() - ParamGroupOverride.__annotations__.keys())
        if unknown:
            raise ConfigError(
                f"config_overrides sets {', '.join(unknown)} for {key}; groups of parameters have max_lr, min_lr and "
                "wd_mult, and one optimizer, of OptimizerConfig"
            )


def _as_tuple(value: Item | tuple[Item, ...]) -> tuple[Item, ...]:
    return value if isinstance(value, tuple) else (value,)
