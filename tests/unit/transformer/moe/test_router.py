"""The router's state, and its scores, groups, top-k and probabilities against loops in double."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from core import parallel_state
from core.base.errors import CheckpointError
from core.dist_checkpointing import load, model_state_dict, save
from core.tensor_parallel import get_rng_tracker, model_parallel_manual_seed
from core.transformer import materialize
from core.transformer.moe import MoELayer
from core.transformer.moe.router import choose_experts, count_tokens, shares_of_experts
from tests.unit._spawn import run_distributed
from tests.unit.transformer.moe._layers import config_of, layer_of

_BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def test_casts_of_the_model_leave_bias_and_counts_as_they_are():
    layer = layer_of(**_BIASED)
    layer.router.expert_bias.fill_(0.1001)
    layer.router.step_sums.fill_(2**40 + 1)
    before = layer.router.expert_bias.clone()
    layer.bfloat16()
    assert layer.router.weight.dtype == torch.bfloat16
    assert torch.equal(layer.router.expert_bias, before)
    assert layer.router.step_sums.dtype == torch.float64 and (layer.router.step_sums == 2**40 + 1).all()


def test_state_dicts_have_the_bias_and_no_counts():
    names = set(layer_of(**_BIASED).state_dict())
    assert {name for name in names if name.startswith("router.")} == {"router.weight", "router.expert_bias"}
    assert "router.expert_bias" not in layer_of().state_dict()


@pytest.mark.parametrize("dtype", [None, "fp32", "fp64"])
def test_logits_are_computed_in_the_routers_dtype(dtype):
    layer = layer_of(moe_router_dtype=dtype, params_dtype=torch.bfloat16)
    x = torch.randn(5, 2, 8).bfloat16()
    wide = {None: torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[dtype]
    probs, experts = layer.router(x)
    logits = (x.to(wide) @ layer.router.weight.to(wide).t()).flatten(0, 1)
    assert probs.dtype == wide and torch.equal(experts, logits.topk(2).indices)
    assert layer(x).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.router(x)[0].dtype == wide


def test_jitter_changes_what_the_router_reads_in_training_alone():
    layer = layer_of(moe_input_jitter_eps=0.3)
    x = torch.randn(40, 2, 8)
    torch.manual_seed(1)
    jittered = layer.router(x)[0]
    torch.manual_seed(1)
    noise = torch.empty_like(x).uniform_(0.7, 1.3)
    assert torch.equal(jittered, layer.eval().router(x * noise)[0])
    assert not torch.equal(jittered, layer.router(x)[0])


def _jitters(sizes: dict[str, int], fields: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what jitter makes of ones, before and after a change of the stream that ranks share."""
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_manual_seed(5)
    try:
        layer = MoELayer(config_of(moe_input_jitter_eps=0.5, **sizes, **fields))
        return tuple(layer.router._add_jitter(layer._enter(torch.ones(4, 2, 8))) for _ in range(2))
    finally:
        get_rng_tracker().reset()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("sizes", "is_shared"),
    [
        ({"tensor_model_parallel_size": 2}, True),  # all of them route all tokens
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, False),
        ({"context_parallel_size": 2}, False),
    ],
    ids=str,
)
def test_ranks_that_route_other_tokens_have_jitter_of_their_own(sizes, is_shared, sequence_parallel):
    if sequence_parallel and "context_parallel_size" in sizes:
        pytest.skip("sequence parallelism needs tensor parallelism")
    first, second = run_distributed(_jitters, 2, sizes, {"sequence_parallel": sequence_parallel})
    assert [torch.equal(*pair) for pair in zip(first, second, strict=True)] == [is_shared] * 2
    assert not torch.equal(*first)


def test_initial_values_on_meta_equal_those_of_construction():
    direct = layer_of(**_BIASED)
    torch.manual_seed(0)
    with torch.device("meta"):
        late = MoELayer(config_of(**_BIASED))
    late.router.step_sums.data.fill_(1)
    materialize(late, "cpu", seed=3)
    assert not late.router.step_sums.any() and not late.router.expert_bias.any()
    assert {n: p.shape for n, p in late.named_parameters()} == {n: p.shape for n, p in direct.named_parameters()}
    assert late.router.step_sums.dtype == torch.float64


def test_copies_have_counts_of_their_own():
    layer = layer_of()
    twin = copy.deepcopy(layer)
    twin(torch.randn(3, 2, 8)).sum().backward()
    assert twin.router.step_sums.any() and not layer.router.step_sums.any()


def test_checkpoints_keep_the_bias_and_name_other_numbers(tmp_path):
    saved = layer_of(**_BIASED)
    saved.router.expert_bias.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    save(model_state_dict(saved), tmp_path / "it")
    loaded = layer_of(seed=1, **_BIASED)
    load(model_state_dict(loaded), tmp_path / "it")
    assert torch.equal(loaded.router.expert_bias, saved.router.expert_bias)
    assert torch.equal(loaded.experts.linear_fc1.weight, saved.experts.linear_fc1.weight)
    with pytest.raises(
        CheckpointError, match=r"router.expert_bias is float32 .4. in the checkpoint and float32 .6."
    ) as caught:
        load(model_state_dict(layer_of(num_moe_experts=6, **_BIASED)), tmp_path / "it")
    assert "\n" not in str(caught.value)


_FUNCTIONS = {
    "sigmoid": lambda value: 1 / (1 + math.exp(-value)),
    "sqrtsoftplus": lambda value: math.sqrt(math.log1p(math.exp(value))),
}


def _written_out(logits, config, bias):
    """Returns {expert: probability} of one token."""
    values, k = logits.tolist(), config.moe_router_topk
    exponentials = [math.exp(v) for v in values]
    if config.moe_router_score_function == "softmax":
        scores = [e / sum(exponentials) for e in exponentials]
        ranked = scores
    else:
        scores = [_FUNCTIONS[config.moe_router_score_function](v) for v in values]
        ranked = [s + b for s, b in zip(scores, bias, strict=True)]
    open_ = set(range(len(values)))
    if config.moe_router_num_groups:
        size, best = len(values) // config.moe_router_num_groups, k // config.moe_router_group_topk
        groups = [range(g * size, (g + 1) * size) for g in range(config.moe_router_num_groups)]
        groups.sort(key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[:best]))
        open_ = {e for group in groups[: config.moe_router_group_topk] for e in group}
    chosen = sorted(open_, key=lambda e: -ranked[e])[:k]
    probs = {e: scores[e] for e in chosen}
    renormalised = config.moe_router_score_function != "softmax" and k > 1
    if renormalised or (config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax):
        probs = {e: p / sum(probs.values()) for e, p in probs.items()}
    factor = config.moe_router_topk_scaling_factor or 1.0
    return {e: p * factor for e, p in probs.items()}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("function", ["softmax", "pre_softmax", "sigmoid", "sqrtsoftplus"])
def test_choice_equals_the_loop(function, grouped):
    fields = {"num_moe_experts": 8, "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5}
    fields["moe_router_pre_softmax"] = function == "pre_softmax"
    fields["moe_router_score_function"] = function.removeprefix("pre_")
    bias = torch.zeros(8)
    if function in _FUNCTIONS:
        fields["moe_router_enable_expert_bias"] = True
        bias = torch.linspace(-1, 1, 8)
    if grouped and function != "softmax":  # the sum of a group's logits has no such loop: see below
        fields |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    config = config_of(**fields)
    logits = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probs, experts = choose_experts(logits, config, bias if function in _FUNCTIONS else None)
    assert probs.dtype == torch.float64
    for token in range(50):
        found = dict(zip(experts[token].tolist(), probs[token].tolist(), strict=True))
        expected = _written_out(logits[token], config, bias.tolist())
        assert found.keys() == expected.keys()
        for expert, prob in expected.items():
            assert math.isclose(found[expert], prob, rel_tol=1e-6)


def test_groups_of_logits_count_their_best_ones():
    config = config_of(num_moe_experts=4, moe_router_topk=2, moe_router_num_groups=2, moe_router_group_topk=1)
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.5]])  # 3 - 9 < 1 + 1.5, although 3 is the best of all
    probs, experts = choose_experts(logits, config)
    assert sorted(experts[0].tolist()) == [2, 3]
    torch.testing.assert_close(probs.sum(), torch.tensor(1.0))


def test_the_bias_decides_the_choice_and_not_the_probability():
    config = config_of(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    _, plain = choose_experts(logits, config)
    probs, biased = choose_experts(logits, config, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert (sorted(plain[0].tolist()), sorted(biased[0].tolist())) == ([0, 1], [0, 3])
    scores = logits.sigmoid()[0, biased[0]]
    torch.testing.assert_close(probs[0], scores / scores.sum())


def test_probabilities_have_gradients_of_the_formula():
    config = config_of(moe_router_score_function="sigmoid")
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: choose_experts(t, config)[0], logits)
    assert torch.autograd.gradcheck(lambda t: shares_of_experts(t, config), logits)


def test_low_precision_is_computed_in_fp32():
    config = config_of()
    logits = torch.randn(30, 4).bfloat16()
    probs, experts = choose_experts(logits, config)
    expected = logits.float().gather(1, experts).softmax(-1).bfloat16()
    assert probs.dtype == torch.bfloat16 and torch.equal(probs, expected)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_shares_add_up_to_one(function):
    logits = torch.randn(7, 4)
    shares = shares_of_experts(logits, config_of(moe_router_score_function=function))
    torch.testing.assert_close(shares.sum(-1), torch.ones(7))
    if function == "softmax":
        torch.testing.assert_close(shares, F.softmax(logits, -1))


def test_tokens_are_counted_exactly():
    experts = torch.randint(0, 5, (3, 40))
    expected = [[row.tolist().count(e) for e in range(5)] for row in experts]
    assert count_tokens(experts, 5).tolist() == expected
    assert list(itertools.chain(*expected)) != [0] * 15
