"""A layer with experts: equal to the sum written out token by token, and to transformers'. The end of a step."""

import pytest
import torch

from core.base.errors import ConfigError, ParallelConfigError
from core.base.recomputation import recompute
from core.distributed.finalize_model_grads import end_step
from core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.transformer import TransformerBlock, TransformerLayer, build_module
from core.transformer.mlp import MLP
from core.transformer.moe import MoELayer, logged_statistics
from core.transformer.moe.load_balancing import pop_balance_loss
from tests.unit._spawn import run_distributed
from tests.unit.transformer.moe._layers import config_of, expert_output, gradients, layer_of, written_out


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_layer_equals_the_sum_written_out(biased, grouped):
    layer = layer_of(add_bias_linear=biased, moe_grouped_gemm=grouped).double()
    if biased:
        for part in (layer.experts.linear_fc1, layer.experts.linear_fc2, layer.router):
            torch.nn.init.normal_(part.bias)
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 3, 8, dtype=torch.float64)
    (layer(x) * weights).sum().backward()
    ours, of_input = gradients(layer), x.grad
    layer.zero_grad()
    x.grad = None
    (written_out(layer, x) * weights).sum().backward()
    torch.testing.assert_close(layer(x), written_out(layer, x), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(of_input, x.grad, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients(layer).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_for_all_experts_equals_one_after_the_other(dtype):
    sizes = {"hidden_size": 16, "ffn_hidden_size": 24, "params_dtype": dtype}
    x, results = torch.randn(9, 2, 16, dtype=dtype), []
    for grouped in (False, True):
        layer = layer_of(moe_grouped_gemm=grouped, **sizes)
        output = layer(x)
        output.float().square().sum().backward()
        results.append({"output": output.detach(), **gradients(layer)})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, msg=name)


def test_all_tokens_to_one_expert_leave_the_others_with_zeros():
    for grouped in (False, True):
        sizes = {"hidden_size": 8, "ffn_hidden_size": 16}
        layer = layer_of(moe_router_topk=1, moe_router_pre_softmax=True, moe_grouped_gemm=grouped, **sizes)
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.weight[2] = 10.0
        x = torch.rand(6, 2, 8)
        layer(x).sum().backward()
        probs = (layer.router.weight @ x.flatten(0, 1).t()).softmax(0)[2]
        expected = torch.stack([p * expert_output(layer, 2, t) for p, t in zip(probs, x.flatten(0, 1), strict=True)])
        torch.testing.assert_close(layer(x).flatten(0, 1), expected)
        for part in (layer.experts.linear_fc1, layer.experts.linear_fc2):
            gradient = part.weight.grad
            assert gradient is not None and gradient[2].abs().min() > 0
            assert not gradient[[0, 1, 3]].any()  # zeros, not None: weight decay and momentum go on


def test_shared_experts_are_added_behind_their_gate():
    fields = {"moe_shared_expert_intermediate_size": 6, "moe_shared_expert_gate": True}
    layer = layer_of(**fields).double()
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    shared = layer.shared_experts
    assert shared is not None and shared.gate_weight.shape == (1, 8)
    expected = written_out(layer, x) + MLP.forward(shared, x) * torch.sigmoid(x @ shared.gate_weight[0])[..., None]
    torch.testing.assert_close(layer(x), expected, rtol=1e-11, atol=1e-11)


def test_a_full_expert_drops_tokens_and_gives_them_nothing():
    for grouped in (False, True):
        fields = {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position", "add_bias_linear": True}
        layer = layer_of(moe_grouped_gemm=grouped, ffn_hidden_size=16, **fields)
        torch.nn.init.ones_(layer.experts.linear_fc2.bias)
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.bias.copy_(torch.tensor([2.0, 1.0, 0.0, -1.0]))  # all tokens to experts 0 and 1
        x = torch.randn(8, 1, 8, requires_grad=True)
        output = layer(x)
        output.square().sum().backward()
        capacity = 2  # 8 tokens x 2 / 4 experts x 0.5
        torch.testing.assert_close(output[:capacity], written_out(layer, x)[:capacity])
        assert not output[capacity:].any() and not x.grad[capacity:].any()
        assert x.grad.isfinite().all()
        assert layer.router.step_sums.tolist()[:6] == [8, 8, 0, 0, 8, 12]


def test_recomputation_gives_the_same_numbers_and_counts_once():
    fields = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "global_aux_loss"}
    results = []
    for recomputed in (False, True):
        layer = layer_of(moe_input_jitter_eps=0.1, **fields)
        x = torch.randn(5, 2, 8, requires_grad=True)
        torch.manual_seed(3)
        output = recompute(layer, x) if recomputed else layer(x)
        (output.square().sum() + pop_balance_loss(layer.router)).backward()
        assert pop_balance_loss(layer.router) is None  # a recomputation leaves none
        results.append({"output": output.detach(), "x": x.grad, "sums": layer.router.step_sums, **gradients(layer)})
        assert layer.router.global_counts.sum() == 20
    assert results[0]["sums"][:5].tolist()[4] == 10
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that two are equal up to roundings of n additions, which add up like sqrt(n) (Higham and Mary, 2019).

    Of each element of a gradient, in forward and backward: logits and softmax, two matrices of an expert and of shared
    ones, k experts, and the tokens.
    """
    additions = 2 * (16 + 16 + 16 + 12 + 16 + 24 + 4 + 7 * 3)
    limit = additions**0.5 * torch.finfo(torch.float32).eps
    assert (found - expected).abs().max() <= limit * expected.abs().max()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_layer_equals_that_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 16, "num_experts_per_tok": 2, "hidden_act": "silu", "experts_implementation": "eager"}
    ours = {"hidden_size": 16, "moe_router_dtype": "fp32"}
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        config = transformers.MixtralConfig(**common, intermediate_size=12, num_local_experts=4)
    elif family == "qwen3_moe":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        config = transformers.Qwen3MoeConfig(**common, moe_intermediate_size=12, num_experts=4, norm_topk_prob=False)
        ours |= {"moe_router_pre_softmax": True}
    else:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE as Block

        experts = {
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
        }
        common["num_experts_per_tok"] = 4
        config = transformers.DeepseekV3Config(
            **common, **experts, moe_intermediate_size=12, routed_scaling_factor=2.5, intermediate_size=12
        )
        ours |= {"num_moe_experts": 16, "moe_router_topk": 4, "moe_shared_expert_intermediate_size": 24}
        ours |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        ours |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5}
    config._experts_implementation = "eager"
    layer, theirs = layer_of(**ours), Block(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(layer.router.weight)
        rows = layer.experts.linear_fc1.weight
        theirs.experts.gate_up_proj.copy_(torch.cat([rows[:, 0::2], rows[:, 1::2]], 1))
        theirs.experts.down_proj.copy_(layer.experts.linear_fc2.weight)
        if layer.shared_experts is not None:
            rows = layer.shared_experts.linear_fc1.weight
            theirs.shared_experts.gate_proj.weight.copy_(rows[0::2])
            theirs.shared_experts.up_proj.weight.copy_(rows[1::2])
            theirs.shared_experts.down_proj.weight.copy_(layer.shared_experts.linear_fc2.weight)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.uniform_(-0.5, 0.5)
            theirs.gate.e_score_correction_bias.copy_(layer.router.expert_bias)
    x = torch.randn(7, 3, 16)
    weights = torch.randn(7, 3, 16)
    output = layer(x)
    (output * weights).sum().backward()
    (expected := theirs(x)).mul(weights).sum().backward()
    assert_close(output, expected)
    assert_close(layer.router.weight.grad, theirs.gate.weight.grad)
    fused, up = theirs.experts.gate_up_proj.grad, 12
    alternating = torch.stack([fused[:, :up], fused[:, up:]], 2).flatten(1, 2)
    assert_close(layer.experts.linear_fc1.weight.grad, alternating)


def test_the_config_says_which_layers_have_experts():
    config = config_of(num_layers=5, moe_layer_freq="[0]+[1,0]*2")
    block = TransformerBlock(config)
    assert [isinstance(layer.mlp, MoELayer) for layer in block.layers] == [False, True, False, True, False]
    assert block.layers[3].mlp.layer_number == 4
    every_third = config_of(num_layers=5, moe_layer_freq=3)
    assert [every_third.has_experts(n) for n in range(1, 6)] == [True, False, False, True, False]
    assert every_third.num_expert_layers == 2
    assert config.moe_layer_freq == [0, 1, 0, 1, 0]  # as a checkpoint has it: a run gives text again when it goes on


def test_a_spec_and_the_config_agree():
    layer = build_module(get_gpt_layer_local_spec(num_experts=4), config=config_of(), layer_number=1)
    assert isinstance(layer.mlp, MoELayer)
    with pytest.raises(
        ConfigError, match=r"layer 1 is to have experts .*its spec has a MLP; give get_gpt_layer_local"
    ):
        build_module(get_gpt_layer_local_spec(), config=config_of(), layer_number=1)
    dense = config_of(num_moe_experts=None)
    with pytest.raises(ConfigError, match="num_moe_experts"):
        build_module(get_gpt_layer_local_spec(num_experts=4), config=dense, layer_number=1)
    with pytest.raises(ConfigError, match="layer 2 is to have no experts"):
        spec = get_gpt_layer_local_spec(num_experts=4)
        build_module(spec, config=config_of(num_layers=2, moe_layer_freq=2), layer_number=2)
    assert isinstance(TransformerLayer(dense).mlp, MLP)


def test_arguments_of_megatron_are_refused_by_name():
    with pytest.raises(ParallelConfigError, match="submodules"):
        MoELayer(config_of(), submodules=object())


_BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def _loads(layer, *loads):
    """Lets the step have these counts."""
    layer.router.step_sums[:4] += torch.tensor(loads, dtype=torch.float64)


def test_biases_move_against_the_load_once_a_step():
    layer = layer_of(**_BIASED, moe_router_bias_update_rate=0.01)
    _loads(layer, 9, 1, 0, 2)
    _loads(layer, 0, 4, 8, 0)  # a second micro-batch: 9, 5, 8, 2 with a mean of 6
    end_step([layer], None)
    torch.testing.assert_close(layer.router.expert_bias, torch.tensor([-0.01, 0.01, -0.01, 0.01]))
    _loads(layer, 3, 3, 3, 3)
    end_step([layer], None)
    torch.testing.assert_close(layer.router.expert_bias, torch.tensor([-0.01, 0.01, -0.01, 0.01]))


def test_a_bias_balances_the_load():
    layer = layer_of(**_BIASED, moe_router_bias_update_rate=0.05)
    with torch.no_grad():
        layer.router.weight[0] += 1.0
    x = torch.rand(64, 4, 8)
    spread = []
    for _ in range(60):
        layer(x).sum().backward()
        counts = layer.router.step_sums[:4]
        spread.append((counts.max() / counts.mean()).item())
        end_step([layer], None)
    assert spread[0] > 1.5 and spread[-1] < 1.2, spread


def test_evaluation_moves_no_bias():
    layer = layer_of(**_BIASED).eval()
    _loads(layer, 9, 1, 0, 2)
    end_step([layer], None)
    assert not layer.router.expert_bias.any()


def test_a_step_that_did_not_end_is_forgotten():
    layer = layer_of(**_BIASED, moe_aux_loss_coeff=1.0)
    layer(torch.randn(5, 2, 8)).sum().backward()
    layer(torch.randn(5, 2, 8))
    layer.clear_step_sums()
    assert not layer.router.step_sums.any() and pop_balance_loss(layer.router) is None


def test_frozen_layers_are_counted():
    layer = layer_of(**_BIASED).requires_grad_(False)
    layer(torch.randn(5, 2, 8))
    assert layer.router.step_sums[:4].sum() == 20


def test_the_log_has_means_over_layers_and_each_layer():
    layers = torch.nn.ModuleList(
        [layer_of(seed, moe_per_layer_logging=True, moe_aux_loss_coeff=0.1) for seed in (0, 1)]
    )
    assert logged_statistics(layers) is None
    for number, layer in enumerate(layers, start=1):
        layer.set_layer_number(number)
        layer(torch.randn(8, 2, 8)).sum().backward()
    counts = [layer.router.step_sums[:4].clone() for layer in layers]
    end_step(list(layers), None)
    names, values = logged_statistics(layers)
    found = dict(zip(names, values.tolist(), strict=True))
    loads = [c / 8 for c in counts]
    assert found["moe/layer_2/expert_3/load"] == loads[1][3]
    assert found["moe/layer_1/load_max"] == loads[0].max()
    assert found["moe/load_max"] == pytest.approx((loads[0].max() + loads[1].max()).item() / 2)
    assert found["moe/load_min"] == pytest.approx((loads[0].min() + loads[1].min()).item() / 2)
    assert 0 < found["moe/entropy"] < 1.3863 and found["moe/dropped_share"] == 0 and found["moe/balance_loss"] > 0.9
    assert len(names) == 6 + 2 * (6 + 4)


def _moves_by_all_ranks(rank_loads):
    import torch.distributed as dist

    layer = layer_of(**_BIASED, moe_router_bias_update_rate=1.0)
    _loads(layer, *rank_loads[dist.get_rank()])
    end_step([layer], dist.group.WORLD)
    return layer.router.expert_bias.tolist(), logged_statistics([layer])[1].tolist()


def test_biases_move_by_the_counts_of_all_ranks():
    results = run_distributed(_moves_by_all_ranks, 2, [(8, 0, 0, 0), (0, 6, 1, 5)])  # 8, 6, 1, 5: a mean of 5
    assert results[0] == results[1]
    assert results[0][0] == [-1.0, -1.0, 1.0, 0.0]
