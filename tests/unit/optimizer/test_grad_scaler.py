"""The loss scale answers to overflow as Megatron-LM's does."""

import pytest

from core.optimizer import OptimizerConfig
from core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, build_grad_scaler


def _scales(scaler: DynamicGradScaler, overflows: str) -> list[float]:
    scales = []
    for step in overflows:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(
    ("scale", "least", "interval", "hysteresis", "overflows", "scales"),
    [
        (8.0, 1.0, 3, 1, "......", [8, 8, 16, 16, 16, 32]),
        (8.0, 1.0, 3, 2, "..x..", [8, 8, 8, 8, 8]),  # an overflow restarts the window
        (8.0, 1.0, 2, 2, "x.xx..xx", [8, 8, 4, 2, 2, 4, 4, 2]),  # hysteresis delays the backoff
        (4.0, 2.0, 9, 1, "xxx", [2, 2, 2]),
    ],
)
def test_scale_follows_overflows(scale, least, interval, hysteresis, overflows, scales):
    scaler = DynamicGradScaler(scale, least, growth_interval=interval, hysteresis=hysteresis)
    assert _scales(scaler, overflows) == scales


def test_state_round_trip_continues_every_counter():
    one = DynamicGradScaler(8.0, 1.0, growth_interval=3, hysteresis=2)
    _scales(one, ".x.")
    other = DynamicGradScaler(1.0, 1.0, growth_interval=3, hysteresis=2)
    other.load_state_dict(one.state_dict())
    assert _scales(one, "x....") == _scales(other, "x....") == [4, 4, 4, 8, 8]


def test_a_constant_scale_stays():
    scaler = ConstantGradScaler(128.0)
    scaler.update(True)
    scaler.load_state_dict({"scale": 4.0})
    assert scaler.scale == 128.0


def test_the_configuration_chooses():
    assert build_grad_scaler(OptimizerConfig()) is None
    assert isinstance(build_grad_scaler(OptimizerConfig(bf16=True, loss_scale=2.0)), ConstantGradScaler)
    dynamic = build_grad_scaler(OptimizerConfig(fp16=True, initial_loss_scale=16.0, min_loss_scale=4.0, hysteresis=1))
    assert isinstance(dynamic, DynamicGradScaler)
    assert _scales(dynamic, "xxx") == [8, 4, 4]
