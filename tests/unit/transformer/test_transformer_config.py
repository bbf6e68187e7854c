"""TransformerConfig: what it derives, and that it names everything that is wrong at once."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F

from core.base.errors import ConfigError, ParallelConfigError, warn_once
from core.model_parallel_config import ModelParallelConfig
from core.models.gpt import GPTModel
from core.transformer import TransformerBlock, TransformerConfig, TransformerLayer
from core.transformer.attention import SelfAttention
from core.transformer.mlp import MLP

SIZES = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 6}


def config(**changes):
    return TransformerConfig(**(SIZES | changes))


def test_missing_sizes_are_derived():
    derived = config()
    assert (derived.num_query_groups, derived.ffn_hidden_size, derived.kv_channels) == (6, 192, 8)
    given = config(num_query_groups=2, ffn_hidden_size=100, kv_channels=16)
    assert (given.num_query_groups, given.ffn_hidden_size, given.kv_channels) == (2, 100, 16)
    assert config(hidden_size=50, kv_channels=8).kv_channels == 8  # heads need not divide the width then


def test_dropout_and_norm_defaults_are_megatrons():
    plain = config()
    assert (plain.hidden_dropout, plain.attention_dropout, plain.layernorm_epsilon) == (0.1, 0.1, 1e-5)


@pytest.mark.parametrize("name", ["context_parallel_size", "num_layers", "hidden_dropout"])
def test_a_number_that_is_none_is_refused(name):
    with pytest.raises(ConfigError, match=f"TransformerConfig: {name} is None; give a number"):
        config(**{name: None})
    assert config(kv_channels=None, expert_tensor_parallel_size=None).kv_channels


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 50}, "num_attention_heads 6 does not divide hidden_size 50; take a hidden_size of 48 or 54"),
        ({"num_query_groups": 4}, "num_query_groups 4 does not divide num_attention_heads 6; take 3 or 6 groups"),
        ({"num_query_groups": 12}, "num_query_groups 12 does not divide num_attention_heads 6; take 6 groups"),
        (
            {"num_attention_heads": 12, "num_query_groups": 5, "tensor_model_parallel_size": 4},
            "^num_query_groups 5 does not divide num_attention_heads 12; take 4 or 12 groups$",
        ),
        ({"num_layers": -1}, "num_layers is -1; it takes a positive number"),
        ({"kv_channels": -8}, "kv_channels is -8"),
        ({"hidden_dropout": 1.0}, "hidden_dropout is 1.0; it takes a probability"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1"),
        ({"layernorm_epsilon": 0.0}, "layernorm_epsilon is 0.0"),
        ({"rotary_percent": 1.5}, "rotary_percent is 1.5"),
        ({"rotary_base": float("nan")}, "rotary_base is nan"),
        ({"init_method_std": -1.0}, "init_method_std is -1.0"),
        ({"normalization": "BatchNorm"}, "normalization is 'BatchNorm'; it takes one of LayerNorm, RMSNorm"),
        ({"activation_func": "relu"}, "activation_func is 'relu'"),
        ({"recompute_granularity": "some"}, "recompute_granularity is 'some'; it takes None or one of selective"),
        ({"recompute_granularity": "full", "recompute_num_layers": 1}, 'needs recompute_method: "uniform" or "block"'),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            r"recompute_num_layers from 1 to 2 \(num_layers\), and it is 3",
        ),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "and it is None"),
        (
            {"recompute_granularity": "selective", "recompute_num_layers": 1},
            "recompute_num_layers given with.*drop it",
        ),
        ({"recompute_method": "block"}, "recompute_method given with recompute_granularity None"),
    ],
)
def test_invalid_config_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as raised:
        config(**changes)
    assert not isinstance(raised.value, ParallelConfigError) and " | " not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "num_attention_heads 6 cannot be split over tensor_model_parallel_size 4; take 4 or 8"),
        ({"num_attention_heads": 12, "num_query_groups": 3}, "num_query_groups 3 .* over .* 4, nor .*; take 2 or 4"),
        (
            {"num_attention_heads": 4, "num_query_groups": 1, "kv_channels": 7},
            "num_query_groups 1 .* over .* 4.*take 2$",
        ),
        (
            {"num_attention_heads": 8, "ffn_hidden_size": 30},
            "ffn_hidden_size 30 cannot be split over .*; take 28 or 32",
        ),
    ],
)
def test_sizes_that_tensor_parallelism_cannot_split(changes, message):
    with pytest.raises(ParallelConfigError, match=message) as raised:
        config(tensor_model_parallel_size=4, **changes)
    assert " | " not in str(raised.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as raised:
        config(hidden_size=50, fp16=True, bf16=True, hidden_dropout=2.0, tensor_model_parallel_size=4)
    actual = str(raised.value).split(" | ")
    starts = (
        "fp16 and bf16",
        "num_attention_heads 6 does not",
        "num_attention_heads 6 cannot",
        "hidden_dropout is 2.0",
    )
    assert len(actual) == len(starts) and all(map(str.startswith, actual, starts))


def test_replace_checks_again():
    with pytest.raises(ConfigError, match="num_query_groups 4"):
        dataclasses.replace(config(), num_query_groups=4)


def test_each_field_says_what_it_is():
    source = __import__("inspect").getsource(TransformerConfig)
    for field in dataclasses.fields(TransformerConfig):
        if field.name in TransformerConfig.__annotations__:
            after = source.split(f"    {field.name}: ", 1)[1].split("\n", 2)[1]
            assert after.strip().startswith('"""'), field.name


def test_config_without_sizes_builds_no_model():
    stub = TransformerConfig(num_attention_heads=1, num_layers=1)
    assert (stub.hidden_size, stub.ffn_hidden_size, stub.kv_channels) == (0, 0, 0)
    assert TransformerConfig(num_layers=1, kv_channels=1, bf16=True).num_query_groups == 0
    for build in (GPTModel, TransformerBlock, TransformerLayer, SelfAttention, MLP):
        with pytest.raises(ConfigError, match="hidden_size is 0; it takes a positive number"):
            build(stub)


def test_activations_are_functions_or_their_names():
    assert config(activation_func=F.gelu).activation_func == "gelu"
    assert config(activation_func=F.silu).activation_func == "silu"
    squared = config(activation_func=lambda x: F.relu(x) ** 2)
    mlp = MLP(squared)
    x = torch.randn(3, 1, 48)
    expected = mlp.linear_fc2(F.relu(mlp.linear_fc1(x)[0]) ** 2)[0]
    assert torch.equal(mlp(x), expected)


def test_initialisers_default_to_configured_std():
    assert config(init_method=torch.nn.init.zeros_).init_method is torch.nn.init.zeros_
    first = config(init_method_std=0.5)
    assert (first.init_method.sigma, first.output_layer_init_method.sigma) == (0.5, 0.25)  # / sqrt(2 x 2 layers)
    changed = dataclasses.replace(first, init_method_std=1.0)
    assert (changed.init_method.sigma, changed.output_layer_init_method.sigma) == (1.0, 0.5)
    assert dataclasses.replace(config(init_method=len), num_layers=8).init_method is len


def test_embeddings_have_a_standard_deviation_of_their_own():
    assert config(init_method_std=0.5).embedding_init_method.sigma == 0.5
    assert config(init_method=torch.nn.init.zeros_).embedding_init_method is torch.nn.init.zeros_
    other = config(init_method_std=0.5, embedding_init_method_std=2.0)
    assert (other.init_method.sigma, other.embedding_init_method.sigma) == (0.5, 2.0)
    assert dataclasses.replace(other, embedding_init_method_std=1.0).embedding_init_method.sigma == 1.0
    torch.manual_seed(1)
    model = GPTModel(other, None, vocab_size=512, max_sequence_length=64)
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    assert deviations["embedding.word_embeddings.weight"] == pytest.approx(2.0, rel=0.1)
    assert deviations["embedding.position_embeddings.weight"] == pytest.approx(2.0, rel=0.2)
    assert deviations["output_layer.weight"] == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"moe_latent_size": 8}, "TransformerConfig: moe_latent_size is 8, and only None is supported; experts have"),
        ({"multi_latent_attention": True}, "multi_latent_attention is True"),
        ({"fp8_param": True}, "fp8_param is True, and only False is supported; parameters are fp32, fp16 or bf16"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size is 2"),
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma"),
    ],
)
def test_foreign_fields_that_change_numbers_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        config(**given)
    name = next(iter(given))
    default = getattr(config(), name)
    assert getattr(config(**{name: default}), name) == default


def test_harmless_foreign_fields_warn():
    warn_once.cache_clear()
    given = {"bias_dropout_fusion": True, "moe_permute_fusion": True, "pipeline_dtype": torch.float32}
    with pytest.warns(UserWarning, match="ignores bias_dropout_fusion, moe_permute_fusion, pipeline_dtype") as caught:
        result = config(**given)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert {name: getattr(result, name) for name in given} == given
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(**given)
        config(use_cpu_initialization=True, timers=None, cp_comm_type=None)


def test_the_first_field_may_be_given_by_position():
    assert ModelParallelConfig(2).tensor_model_parallel_size == 2
    with pytest.raises(ConfigError, match=r"takes 1 field\(s\) by position, and 2 were given"):
        ModelParallelConfig(2, 2)
    with pytest.raises(TypeError, match="no_such_field"):
        config(no_such_field=1)


def test_sizes_that_the_group_does_not_divide_are_refused():
    with pytest.raises(ParallelConfigError, match=r"num_attention_heads 4 cannot be split over .* 3"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=4).check_split(3)
