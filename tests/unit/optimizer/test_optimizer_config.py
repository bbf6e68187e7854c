"""Settings that contradict each other or are out of range are refused, with the field and the remedy."""

import pytest

from core.base.errors import ConfigError
from core.optimizer import OptimizerConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "lion"}, "lion'; it takes one of adam, sgd"),
        ({"lr": -1e-3}, "lr is -0.001"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"clip_grad": -1.0}, "clip_grad is -1.0"),
        ({"clip_grad": float("inf")}, "clip_grad is inf"),
        ({"adam_beta1": 1.0}, "adam_beta1 is 1.0"),
        ({"sgd_momentum": -0.5}, "sgd_momentum is -0.5"),
        ({"adam_eps": 0.0}, "adam_eps is 0.0"),
        ({"loss_scale": 0.0}, "loss_scale is 0.0"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"loss_scale_window": 0}, "loss_scale_window is 0"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "min_lr is 0.001, above lr 0.0001"),
        ({"initial_loss_scale": 1.0, "min_loss_scale": 2.0}, "min_loss_scale is 2.0"),
        ({"fp16": True, "bf16": True}, "choose one"),
    ],
)
def test_invalid_settings_are_refused(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)


def test_defaults_are_accepted_and_zero_turns_things_off():
    OptimizerConfig()
    OptimizerConfig(lr=0.0, clip_grad=0.0, weight_decay=0.0, sgd_momentum=0.0)
