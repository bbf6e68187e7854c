"""The router's state: dtypes, jitter, and what one forward counts."""

import copy

import pytest
import torch

from core.base.errors import CheckpointError
from core.dist_checkpointing import load, model_state_dict, save
from core.transformer import materialize
from core.transformer.moe import MoELayer
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
