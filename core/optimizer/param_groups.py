"""Which parameters are updated, under which names, and with which weight decay and learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..distributed.data_parallel_base import unwrap_model
from ..errors import ConfigError
from .main_params import MainParam
from .optimizer_config import OptimizerConfig

ParamCondition = Callable[[str, nn.Parameter], bool]
"""Asked with a parameter's name in the unwrapped model and the parameter, which has its full shape when sharded."""


def collect_main_params(
    model_chunks: Sequence[nn.Module], make: Callable[[str, nn.Parameter, nn.Module, str], MainParam] = MainParam
) -> list[MainParam]:
    """Every trainable parameter of the chunks once, in order, under its name in the unwrapped model.

    With several chunks (virtual pipeline stages) a name starts with ``chunk<i>.``. `make` is called with
    the name, the parameter, the module that holds it, and its name there.
    """
    found: list[MainParam] = []
    seen: set[int] = set()
    for index, chunk in enumerate(model_chunks):
        model = unwrap_model(chunk)
        prefix = f"chunk{index}." if len(model_chunks) > 1 else ""
        for name, param in model.named_parameters():
            if not param.requires_grad or id(param) in seen:
                continue
            seen.add(id(param))
            owner, _, attribute = name.rpartition(".")
            found.append(make(prefix + name, param, model.get_submodule(owner), attribute))
    if not found:
        raise ConfigError("the model has no trainable parameter; nothing is left for an optimizer to do")
    return found


def build_param_groups(
    params: Sequence[MainParam],
    config: OptimizerConfig,
    no_weight_decay_cond: ParamCondition | None = None,
    scale_lr_cond: ParamCondition | None = None,
    lr_mult: float = 1.0,
) -> list[dict[str, Any]]:
    """Splits the parameters by weight decay and learning rate, as Megatron-LM does; empty groups do not appear.

    `no_weight_decay_cond` says which parameters are spared weight decay; by default biases and parameters of at most
    one dimension (norms). `scale_lr_cond` says which have their learning rate multiplied by `lr_mult`.

    A group carries its multipliers ``wd_mult`` and ``lr_mult``, ``max_lr`` and ``min_lr`` for the scheduler, and
    ``default_config``, whether no multiplier of its own makes it differ from the config.

    Raises:
        ConfigError: no learning rate, or an `lr_mult` that applies to nothing.
    """
    if config.lr is None:
        raise ConfigError("lr is not set; give OptimizerConfig(lr=...), the peak of the schedule")
    if lr_mult != 1.0 and scale_lr_cond is None:
        raise ConfigError(f"lr_mult is {lr_mult}, but scale_lr_cond names no parameter that it applies to; give both")
    spared = no_weight_decay_cond or _is_bias_or_vector
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for p in params:
        wd = 0.0 if spared(p.name, p.param) else 1.0
        scale = lr_mult if scale_lr_cond is not None and scale_lr_cond(p.name, p.param) else 1.0
        group = groups.setdefault(
            (wd, scale),
            {
                "params": [],
                "default_config": wd == 1.0 and scale == 1.0,
                "wd_mult": wd,
                "lr_mult": scale,
                "lr": config.lr * scale,
                "weight_decay": config.weight_decay * wd,
                "max_lr": config.lr,
                "min_lr": config.min_lr,
            },
        )
        group["params"].append(p.main)
    return list(groups.values())


def _is_bias_or_vector(name: str, param: nn.Parameter) -> bool:
    return name.rpartition(".")[2] == "bias" or param.ndim <= 1
