"""Which parameters are Muon's."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from core.base.errors import ConfigError
from core.optimizer import ParamKey, get_megatron_optimizer
from core.optimizer.muon.rule import Muon
from tests.unit.optimizer.muon._muon import QKV, Fused, Matrices, config_of, gpt, optimizers_by_name


def test_hidden_matrices_are_muons_and_all_others_in_the_table():
    model = gpt()
    optimizer = get_megatron_optimizer(config_of(), [model])
    rule = optimizer.optimizer
    assert isinstance(rule, Muon)
    ours = {name for name, kind in optimizers_by_name(optimizer).items() if kind == "muon"}
    hidden = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
    assert ours == {name for name, _ in model.named_parameters() if name.endswith(hidden)}
    for name in optimizers_by_name(optimizer):
        assert name.replace(".0.", ".*.").replace(".1.", ".*.") in rule.table, name
    assert "embedding or output" in rule.table and "vector" in rule.table


def test_overrides_by_name_and_attribute():
    model = gpt()
    overrides = {ParamKey(name="*layers.0.mlp.linear_fc1.weight"): {"optimizer": "adam"}}
    config = config_of(muon_include=("output_layer.weight",), muon_exclude=("*linear_proj.weight",))
    model.get_parameter("decoder.layers.1.mlp.experts.linear_fc2.weight").use_muon = False  # type: ignore[attr-defined]
    names = optimizers_by_name(get_megatron_optimizer(config, [model], overrides))  # type: ignore[arg-type]
    assert names["output_layer.weight"] == "muon"
    assert names["decoder.layers.0.self_attention.linear_proj.weight"] == "adam"
    assert names["decoder.layers.0.mlp.linear_fc1.weight"] == "adam"
    assert names["decoder.layers.1.mlp.experts.linear_fc1.weight"] == "muon"
    assert names["decoder.layers.1.mlp.experts.linear_fc2.weight"] == "adam"


class _Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(2, 2, 3)


@pytest.mark.parametrize(
    ("model", "settings", "overrides", "message"),
    [
        (_Vectors(), {}, None, "none of the 4 trained parameters is a matrix"),
        (_Vectors(), {"muon_include": ("conv.weight",)}, None, "muon is requested for parameter conv.weight"),
        (Matrices(), {"muon_exclude": ("head.*",)}, None, "'head.*' matches no parameter"),
        (Matrices(), {}, {ParamKey(name="tall"): {"optimizer": "lion"}}, "tall the optimizer 'lion'; it takes"),
        (Fused(QKV, 12), {}, None, "parameter weight has 12 rows, and its layout"),
    ],
)
def test_unfit_models_are_one_line(model: nn.Module, settings: Any, overrides: Any, message: str):
    with pytest.raises(ConfigError) as error:
        get_megatron_optimizer(config_of(**settings), [model], overrides)
    assert message in str(error.value) and "\n" not in str(error.value)
