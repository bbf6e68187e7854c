"""Which parameters are found, under which names, and how they are grouped."""

import pytest
import torch
from torch import nn

from core.base.errors import ConfigError
from core.optimizer import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from core.optimizer.main_ranges import collect_main_params
from core.optimizer.param_groups import build_param_groups, override_of
from core.transformer import Float16Module, TransformerConfig


class Model(nn.Module):
    """Matrices, vectors, a bias with two dimensions, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(3)
        self.bias = nn.Parameter(torch.zeros(2, 2))
        self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embedding.weight


def _wrapped(model: nn.Module) -> nn.Module:
    return Float16Module(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True), model)


NAMES = ["bias", "embedding.weight", "norm.weight", "norm.bias", "head.bias"]
CONFIG = OptimizerConfig(lr=1e-3, min_lr=1e-5, weight_decay=0.1)


def _grouped_names(model: nn.Module, **kwargs: object) -> list[tuple[list[str], dict]]:
    params = collect_main_params([model])
    name_of = {id(p.main): p.name for p in params}
    groups = build_param_groups(params, CONFIG, **kwargs)  # type: ignore[arg-type]
    return [([name_of[id(main)] for main in group.pop("params")], group) for group in groups]


def test_overrides_by_name_attribute_and_condition_make_groups():
    model = Model()
    model.head.bias.is_output = True
    overrides = {
        ParamKey(name=("*.weight", "bias")): {"wd_mult": 0.5},
        ParamKey(name="module.norm.weight"): {"min_lr": 1e-6},
        ParamKey(attr="is_output"): {"max_lr": 1e-2},
        ParamKey(with_name_predicate=ParamWithNamePredicate("norm's", lambda p, n: n == "norm.bias")): {
            "wd_mult": 0.0
        },
        ParamKey(predicate=ParamPredicate("large", lambda p: p.numel() > 4)): {"wd_mult": 0.5},
    }
    actual = {tuple(names): group for names, group in _grouped_names(model, config_overrides=overrides)}
    settings = ("wd_mult", "weight_decay", "max_lr", "lr", "min_lr", "default_config")
    assert {names: tuple(group[key] for key in settings) for names, group in actual.items()} == {
        ("bias", "embedding.weight"): (0.5, 0.05, 1e-3, 1e-3, 1e-5, False),
        ("norm.weight",): (0.5, 0.05, 1e-3, 1e-3, 1e-6, False),
        ("norm.bias",): (0.0, 0.0, 1e-3, 1e-3, 1e-5, False),
        ("head.bias",): (1.0, 0.1, 1e-2, 1e-2, 1e-5, False),
    }
    assert _grouped_names(model, config_overrides={}) == [
        (NAMES, actual[("head.bias",)] | {"max_lr": 1e-3, "lr": 1e-3, "default_config": True})
    ]


def test_the_standard_overrides_are_the_default():
    model = Model()
    standard = get_standard_config_overrides(CONFIG)
    expected = _grouped_names(model, no_weight_decay_cond=lambda name, p: name != "embedding.weight")
    assert _grouped_names(model, config_overrides=standard) == _grouped_names(model) == expected
    assert standard == get_standard_config_overrides(CONFIG), "keys of equal names are equal"


@pytest.mark.parametrize(
    ("overrides", "conditions", "said"),
    [
        ({ParamKey(name="*"): {"wd_mult": 0.5}, ParamKey(attr="x"): {"lr": 1.0}}, {}, "sets lr for ParamKey.*max_lr"),
        ({ParamKey(name="*"): {"optimizer": "muon"}}, {}, "sets optimizer for ParamKey"),
        ({ParamKey(name="*"): {"wd_mult": 0.5}, ParamKey(name="bias"): {"wd_mult": 1.0}}, {}, "bias the wd_mult 0.5"),
        ({}, {"no_weight_decay_cond": lambda name, p: True}, "no_weight_decay_cond or scale_lr_cond are both given"),
    ],
)
def test_invalid_overrides_are_refused(overrides, conditions, said):
    with pytest.raises(ConfigError, match=said):
        _grouped_names(Model(), config_overrides=overrides, **conditions)


def test_names_of_trainable_parameters():
    for model in (Model(), _wrapped(Model())):
        assert [p.name for p in collect_main_params([model])] == NAMES


def test_names_of_several_chunks_differ():
    names = [p.name for p in collect_main_params([Model(), _wrapped(Model())])]
    assert names == ["chunk0." + name for name in NAMES] + ["chunk1." + name for name in NAMES]


def test_biases_and_vectors_are_spared_weight_decay():
    (spared, no_decay), (decayed, decay) = _grouped_names(Model())
    assert spared == ["bias", "norm.weight", "norm.bias", "head.bias"]
    assert decayed == ["embedding.weight"]
    rates = {"lr_mult": 1.0, "lr": 1e-3, "max_lr": 1e-3, "min_lr": 1e-5}
    assert no_decay == rates | {"default_config": False, "wd_mult": 0.0, "weight_decay": 0.0}
    assert decay == no_decay | {"default_config": True, "wd_mult": 1.0, "weight_decay": 0.1}


def test_empty_groups_do_not_appear():
    assert len(_grouped_names(nn.Linear(2, 2, bias=False))) == 1


def test_conditions_get_name_and_parameter():
    groups = _grouped_names(
        Model(),
        no_weight_decay_cond=lambda name, param: name.startswith("norm"),
        scale_lr_cond=lambda name, param: param.shape == (4, 3),
        lr_mult=0.5,
    )
    assert [(names, group["wd_mult"], group["lr_mult"], group["lr"]) for names, group in groups] == [
        (["bias", "head.bias"], 1.0, 1.0, 1e-3),
        (["embedding.weight"], 1.0, 0.5, 5e-4),
        (["norm.weight", "norm.bias"], 0.0, 1.0, 1e-3),
    ]


def test_ineffective_arguments_are_refused():
    params = collect_main_params([Model()])
    with pytest.raises(ConfigError, match=r"OptimizerConfig\(lr=...\)"):
        build_param_groups(params, OptimizerConfig())
    with pytest.raises(ConfigError, match=r"lr_mult is 2.0, but scale_lr_cond"):
        build_param_groups(params, CONFIG, lr_mult=2.0)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        get_megatron_optimizer(CONFIG, [nn.ReLU()])


def test_ends_of_a_model_have_a_rate_of_their_own():
    config = OptimizerConfig(lr=1e-3, min_lr=1e-5, decoupled_lr=5e-3)
    kinds = {"embedding.word_embeddings": 5e-3, "embedding.position_embeddings": 1e-3, "output_layer": 5e-3, "x": 1e-3}
    parameter = nn.Parameter(torch.zeros(2, 2))
    for name, peak in kinds.items():
        override = override_of(get_standard_config_overrides(config), f"{name}.weight", parameter)
        assert override.get("max_lr", config.lr) == peak and "min_lr" not in override
    config = OptimizerConfig(lr=1e-3, decoupled_lr=5e-3, decoupled_min_lr=1e-6)
    assert override_of(get_standard_config_overrides(config), "module.output_layer.weight", parameter) == {
        "max_lr": 5e-3,
        "min_lr": 1e-6,
    }
    with pytest.raises(ConfigError, match=r"decoupled_min_lr is 0\.1 without decoupled_lr"):
        OptimizerConfig(lr=1e-3, decoupled_min_lr=0.1)
