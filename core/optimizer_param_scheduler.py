"""Learning rate and weight decay over the course of a run, by Megatron-LM's formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from .base.errors import CheckpointError, ConfigError, check_choices

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")

_CHECKPOINTED = (
    *("max_lr", "min_lr", "lr_decay_steps", "lr_warmup_steps", "lr_decay_style", "wsd_decay_steps"),
    *("lr_wsd_decay_style", "start_wd", "end_wd", "wd_incr_steps", "wd_incr_style"),
)


@dataclass(eq=False, repr=False)
class OptimizerParamScheduler:
    """Sets ``lr`` and ``weight_decay`` of every parameter group from the number of steps made.

    A step is one unit of the caller's count, an iteration or a sample, in :meth:`step` and in every ``*_steps``.

    The learning rate rises linearly from `init_lr` to `max_lr` over `lr_warmup_steps`, then falls to `min_lr` at
    `lr_decay_steps`, and stays there: along a line, a half cosine (Loshchilov & Hutter, 2017), or, with ``"WSD"``
    (warm-up, stable, decay; Hu et al., 2024), at `max_lr` until the last `wsd_decay_steps`, which fall by
    `lr_wsd_decay_style`. ``"inverse-square-root"`` is `max_lr` x sqrt(warm-up / step), not below `min_lr`
    (Vaswani et al., 2017). ``"constant"`` stays at `max_lr`.

    Weight decay goes from `start_wd` to `end_wd` over `wd_incr_steps`, along a line or a half cosine.

    A group multiplies by its ``lr_mult`` and ``wd_mult``. Its own ``max_lr`` and ``min_lr``, where not None, take the
    place of the scheduler's.

    `use_checkpoint_opt_param_scheduler` makes a resumed run take the schedule of its checkpoint,
    `override_opt_param_scheduler` makes it keep the one given here; with neither they have to agree.

    Raises:
        ConfigError: an unknown style, numbers out of order, or settings that contradict each other.
    """

    optimizer: Optimizer
    init_lr: float
    max_lr: float
    min_lr: float
    lr_warmup_steps: float
    lr_decay_steps: int
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str
    use_checkpoint_opt_param_scheduler: bool = True
    override_opt_param_scheduler: bool = False
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str | None = None
    num_steps: int = field(default=0, init=False)
    """Steps so far, in the caller's unit. `step` advances it, `load_state_dict` sets it."""

    def __post_init__(self) -> None:
        self._check()
        self._check_groups()
        self.step(0)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Returns the learning rate of a group now, before its ``lr_mult``."""
        max_lr = _or_default(param_group, "max_lr", self.max_lr)
        min_lr = _or_default(param_group, "min_lr", self.min_lr)
        if self.lr_warmup_steps > 0 and self.num_steps <= self.lr_warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * self.num_steps / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return max_lr
        if self.num_steps > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(self.lr_warmup_steps, 1) / max(self.num_steps, 1)))
        return min_lr + (max_lr - min_lr) * self._remaining()

    def get_wd(self) -> float:
        """Returns weight decay now, before a group's ``wd_mult``."""
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return self.end_wd
        progress = self.num_steps / self.wd_incr_steps
        rise = progress if self.wd_incr_style == "linear" else _half_cosine(1.0 - progress)
        return self.start_wd + rise * (self.end_wd - self.start_wd)

    def step(self, increment: int) -> None:
        """Moves on by `increment` steps, and sets every group."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.get_wd() * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Returns the schedule and how far it is, under Megatron-LM's names."""
        return {name: getattr(self, name) for name in _CHECKPOINTED} | {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`, with the schedule that the rules given at construction choose.

        Raises:
            CheckpointError: the schedules differ, and no setting says which one counts.
        """
        if not self.override_opt_param_scheduler:
            values = {name: state_dict[name] for name in _CHECKPOINTED if name in state_dict}
            for name, value in values.items():
                ours = getattr(self, name)
                if ours == value:
                    continue
                if not self.use_checkpoint_opt_param_scheduler:
                    raise CheckpointError(
                        f"{name} is {ours}, but the checkpoint has {value}; set use_checkpoint_opt_param_scheduler to "
                        "go on with the checkpoint's schedule, or override_opt_param_scheduler to go on with this one"
                    )
                for group in self.optimizer.param_groups:
                    if group.get(name) == ours:  # a group that was given the same peak or floor follows
                        group[name] = value
                setattr(self, name, value)
            self._check()
        self.num_steps = state_dict["num_steps"]
        self.step(0)

    def _remaining(self) -> float:
        """Returns the share of the fall from `max_lr` to `min_lr` that is still to come, 1 to 0."""
        if self.lr_decay_style == "WSD":
            length = self.wsd_decay_steps or 1  # `_check` has seen that it is there
            progress = (self.num_steps - (self.lr_decay_steps - length)) / length
            if progress <= 0.0:
                return 1.0
            if self.lr_wsd_decay_style == "exponential":
                return 2.0 * math.pow(0.5, progress) - 1.0
            if self.lr_wsd_decay_style == "minus_sqrt":
                return 1.0 - math.sqrt(progress)
            style = self.lr_wsd_decay_style
        else:
            progress = (self.num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
            style = self.lr_decay_style
        return 1.0 - progress if style == "linear" else _half_cosine(progress)

    def _check(self) -> None:
        check_choices(self, lr_decay_style=LR_DECAY_STYLES, wd_incr_style=WD_INCR_STYLES)
        up_to = f"up to, not including, lr_decay_steps {self.lr_decay_steps}"
        rules = [
            ("min_lr", self.min_lr >= 0.0, "it takes zero or a positive number"),
            ("max_lr", self.max_lr >= self.min_lr, f"it has to reach min_lr {self.min_lr}"),
            ("init_lr", 0.0 <= self.init_lr <= self.max_lr, f"it is between 0 and max_lr {self.max_lr}"),
            ("lr_decay_steps", self.lr_decay_steps > 0, "it takes a positive number"),
            ("lr_warmup_steps", 0 <= self.lr_warmup_steps < self.lr_decay_steps, f"it takes a number from 0 {up_to}"),
        ]
        if self.lr_decay_style == "WSD":
            most, length = self.lr_decay_steps - self.lr_warmup_steps, self.wsd_decay_steps
            fits = length is not None and 0 < length <= most
            rules.append(("wsd_decay_steps", fits, f"WSD takes from 1 to {most}, the steps after the warm-up"))
        rules.append(("start_wd", 0.0 <= self.start_wd <= self.end_wd, f"it is between 0 and end_wd {self.end_wd}"))
        if self.wd_incr_style == "constant":
            both = f"start_wd {self.start_wd} and end_wd {self.end_wd}"
            rules.append(("wd_incr_style", self.start_wd == self.end_wd, f"{both} have to be equal"))
        else:
            rules.append(("wd_incr_steps", self.wd_incr_steps > 0, "it takes a positive number"))
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; {rule}")
        if self.lr_decay_style == "WSD":
            check_choices(self, lr_wsd_decay_style=WSD_DECAY_STYLES)
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both set; choose one"
            )

    def _check_groups(self) -> None:
        for name in ("max_lr", "min_lr"):
            own: set[Any] = {group.get(name) for group in self.optimizer.param_groups}
            if None not in own and own and getattr(self, name) not in own:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, but every parameter group has its own, {sorted(own)}, from "
                    "OptimizerConfig; give both the same value"
                )


def _half_cosine(progress: float) -> float:
    """Falls from 1 to 0 while `progress` goes from 0 to 1."""
    return 0.5 * (math.cos(math.pi * progress) + 1.0)


def _or_default(param_group: dict[str, Any], name: str, default: float) -> float:
    own: float | None = param_group.get(name)
    return default if own is None else own
