"""Scores, groups, top-k and probabilities, against loops in double."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from core.transformer.moe.routing import choose_experts, count_tokens, shares_of_experts
from tests.unit.transformer.moe._layers import config_of

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
