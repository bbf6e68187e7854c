"""Settings of experts: what contradicts itself is refused in one line."""

import pytest

from core.base.errors import ConfigError, warn_once
from core.transformer import TransformerConfig


def config(**fields):
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    return TransformerConfig(**{**sizes, "num_moe_experts": 8, **fields})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"moe_router_topk": 9}, "moe_router_topk 9 is above num_moe_experts 8; take at most as many"),
        ({"moe_router_topk": 0}, "moe_router_topk is 0; it takes a positive number"),
        ({"num_moe_experts": -1}, "num_moe_experts is -1"),
        ({"moe_router_topk": 1}, "moe_router_topk is 1 with a softmax .*; set moe_router_pre_softmax"),
        ({"moe_router_num_groups": 2}, "moe_router_num_groups is 2 and moe_router_group_topk None; give both"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "num_groups 3 does not divide num_moe_experts 8"),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 3},
            "moe_router_group_topk 3 is above .*moe_router_topk 2",
        ),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 1, "moe_router_topk": 3},
            "moe_router_topk 3 is above the 2 experts of moe_router_group_topk 1 groups",
        ),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "'sinkhorn' is none of aux_loss, seq_aux_loss, global_aux_los",
        ),
        ({"moe_router_load_balancing_type": ["aux_loss", "none"], "moe_aux_loss_coeff": [1, 1]}, "contradicts itself"),
        ({"moe_router_load_balancing_type": ["aux_loss"] * 2, "moe_aux_loss_coeff": [1, 1]}, "contradicts itself"),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            r"has 2 type\(s\), and moe_aux_loss_coeff 1",
        ),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, "has no loss; drop one of the two"),
        ({"moe_aux_loss_coeff": -1.0}, "moe_aux_loss_coeff is -1.0; it takes zero or positive numbers"),
        ({"moe_z_loss_coeff": -1.0}, "moe_z_loss_coeff is -1.0"),
        ({"moe_router_enable_expert_bias": True}, "'softmax', whose scores compete; take 'sigmoid'"),
        ({"moe_router_dtype": "bf16"}, "moe_router_dtype is 'bf16'; .*it takes None or one of fp32, fp64"),
        ({"moe_router_score_function": "tanh"}, "moe_router_score_function is 'tanh'"),
        ({"moe_token_drop_policy": "random"}, "moe_token_drop_policy is 'random'"),
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type is 'flex'"),
        (
            {"expert_model_parallel_size": 3},
            "num_moe_experts is 8, which expert_model_parallel_size 3 does not divide",
        ),
        ({"expert_tensor_parallel_size": 0}, "expert_tensor_parallel_size is 0; it takes a positive number"),
        (
            {"num_moe_experts": None, "expert_model_parallel_size": 2},
            "expert_model_parallel_size is 2 without num_moe_experts",
        ),
        ({"moe_ffn_hidden_size": 5, "expert_tensor_parallel_size": 2}, "moe_ffn_hidden_size 5 cannot be split over"),
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor is 0.0"),
        ({"moe_input_jitter_eps": 1.0}, "moe_input_jitter_eps is 1.0; it takes a number between 0 and 1"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0; it takes a positive number"),
        ({"moe_layer_freq": [1, 0, 1]}, "takes 0 or 1 for each of num_layers 4"),
        ({"moe_layer_freq": "[0]*4"}, "with experts in one layer or more"),
        ({"moe_layer_freq": "__import__('os')"}, "it takes a number, or lists of 0 and 1"),
        ({"moe_layer_freq": "[1]*999999999999"}, "it takes a number, or lists of 0 and 1"),
        ({"num_moe_experts": None, "moe_ffn_hidden_size": 4}, "moe_ffn_hidden_size is 4 without num_moe_experts"),
        (
            {"num_moe_experts": 0, "moe_shared_expert_intermediate_size": 4},
            "intermediate_size is 4 without num_moe_ex",
        ),
        ({"moe_ffn_hidden_size": 5, "tensor_model_parallel_size": 2}, "moe_ffn_hidden_size 5 cannot be split over"),
        ({"moe_apply_probs_on_input": True}, "probabilities multiply the outputs of experts"),
        ({"moe_token_dropping": True}, "give moe_expert_capacity_factor"),
    ],
)
def test_contradictions_are_one_line(given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config(**given)
    assert "\n" not in str(caught.value)


def test_settings_without_experts_are_ignored_with_warning():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"ignores moe_grouped_gemm, moe_router_topk: num_moe_experts is not set"):
        config(num_moe_experts=None, moe_router_topk=4, moe_grouped_gemm=True)


def test_one_of_a_list_is_itself():
    made = config(moe_router_load_balancing_type=["seq_aux_loss"], moe_aux_loss_coeff=[0.5])
    assert (made.moe_router_load_balancing_type, made.moe_aux_loss_coeff) == ("seq_aux_loss", 0.5)
    assert made.auxiliary_losses == {"seq_aux_loss": 0.5}
    several = config(moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"], moe_aux_loss_coeff=[0.5, 0.0])
    assert several.auxiliary_losses == {"aux_loss": 0.5}


def test_derived_and_negative_values():
    made = config(moe_expert_capacity_factor=-1.0, ffn_hidden_size=20)
    assert made.moe_expert_capacity_factor is None
    assert (made.expert_ffn_size, config(moe_ffn_hidden_size=6).expert_ffn_size) == (20, 6)
    assert config(num_moe_experts=0).num_moe_experts is None
    assert config(num_moe_experts=None).num_expert_layers == 0


def test_layers_are_chosen_as_in_megatron():
    assert [config(moe_layer_freq=2).has_experts(n) for n in range(1, 5)] == [True, False, True, False]
    for pattern in ("([0]*1+[1]*3)", [0, 1, 1, 1], "[0, 1] + 2*[1]"):
        assert [config(moe_layer_freq=pattern).has_experts(n) for n in range(1, 5)] == [False, True, True, True]
