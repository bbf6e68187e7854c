"""Parameters are frozen by the patterns of their names."""

from __future__ import annotations

import pytest
from torch import nn

from core.base.errors import ConfigError
from core.transformer.lora import freeze_parameters


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))


def test_matching_parameters_are_frozen():
    actual = model()
    assert freeze_parameters(actual, ["0.*", "*.bias"]) == ["0.weight", "0.bias", "1.bias", "2.bias"]
    assert [name for name, p in actual.named_parameters() if p.requires_grad] == ["1.weight", "2.weight"]
    assert freeze_parameters(model(), []) == []


def test_patterns_matching_none_or_all_are_refused():
    with pytest.raises(ConfigError, match=r"freeze '3\.\*' matches no parameter; names are as 0\.weight and 2\.bias"):
        freeze_parameters(model(), ["0.*", "3.*"])
    with pytest.raises(ConfigError, match=r"freeze 0\.\* \[12\]\.\* matches all 6 parameters; leave some to train"):
        freeze_parameters(model(), ["0.*", "[12].*"])
