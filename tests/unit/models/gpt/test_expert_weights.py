"""A model with experts that starts from a dense one computes what that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base.errors import CheckpointError, ConfigError
from core.dist_checkpointing import model_state_dict
from core.distributed import FullyShardedDataParallelConfig, wrap_model
from core.models.gpt.hugging_face import load_hugging_face, save_hugging_face
from core.models.gpt.megatron_layout import load_megatron
from core.training.config.sections import CheckpointConfig
from tests.unit._spawn import run_distributed
from tests.unit._whole import whole
from tests.unit.models.gpt.test_hugging_face import BOUND, KINDS, build, logits_of, off
from tests.unit.models.gpt.test_megatron_layout import _write, theirs

DENSE = [kind for kind, (_, fields) in KINDS.items() if "num_moe_experts" not in fields]


ROUTED = [
    {"moe_router_topk": 2},
    {"moe_router_topk": 3, "moe_layer_freq": [0, 1], "moe_router_score_function": "sigmoid"},
]


@pytest.mark.parametrize(("kind", "fields"), [(kind, ROUTED[number % 2]) for number, kind in enumerate(DENSE)])
def test_logits_are_those_of_the_dense_model(kind: str, fields: dict[str, Any], tmp_path: Path):
    dense = build(kind)
    save_hugging_face(dense, tmp_path / "hf")
    model = build(kind, seed=5, num_moe_experts=4, **fields)
    routers = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".router." in name}
    load_hugging_face(model, tmp_path / "hf", upcycle=True)
    assert off(logits_of(model), logits_of(dense)) <= BOUND
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in routers.items())
    for name in ("linear_fc1.weight", "linear_fc2.weight"):
        copies, original = (
            state[f"decoder.layers.1.mlp.experts.{name}"],
            dense.state_dict()[f"decoder.layers.1.mlp.{name}"],
        )
        assert all(torch.equal(copy, original) for copy in copies)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_model_of_megatron_becomes_experts(stacked: bool, tmp_path: Path):
    dense = build("llama with biases and gelu")
    folder = _write(tmp_path / "theirs", theirs(dense, stacked=stacked, fused_norms=False), tmp_path / "ran")
    model = build("llama with biases and gelu", seed=5, num_moe_experts=4)
    load_megatron(model, folder, upcycle=True)
    assert off(logits_of(model), logits_of(dense)) <= BOUND


@pytest.mark.parametrize(
    ("kind", "granularity", "fields"),
    [
        ("llama", 2, {"moe_router_topk": 2}),
        ("llama with biases and gelu", 4, {"moe_router_topk": 4, "num_moe_experts": 8}),
        ("gpt2", 2, {"moe_layer_freq": [0, 1], "moe_router_topk": 4, "moe_router_score_function": "sigmoid"}),
    ],
)
def test_pieces_of_the_mlp_make_up_the_dense_model(kind: str, granularity: int, fields: Any, tmp_path: Path):
    dense = build(kind)
    width = dense.config.ffn_hidden_size // granularity
    save_hugging_face(dense, tmp_path / "hf")
    model = build(kind, seed=5, **{"num_moe_experts": 4, "moe_ffn_hidden_size": width, **fields})
    load_hugging_face(model, tmp_path / "hf", upcycle=granularity)
    assert off(logits_of(model), logits_of(dense)) <= BOUND
    state = model.state_dict()
    weight = state["decoder.layers.1.mlp.experts.linear_fc2.weight"]
    assert weight.shape[2] == width and not torch.equal(weight[0], weight[1])
    assert torch.equal(weight[0], weight[granularity])
    router = state["decoder.layers.1.mlp.router.weight"]
    assert torch.equal(router[0], router[granularity - 1]) and not torch.equal(router[0], router[granularity])


def _upcycled_over_ranks(folder: str, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    model = build("llama", seed=5, **fields, expert_model_parallel_size=dist.get_world_size())
    wrap_model(model, model.config, FullyShardedDataParallelConfig())
    load_hugging_face(model, folder, upcycle=2)
    return {name: whole(tensor).clone() for name, tensor in model_state_dict(model).items()}


def test_pieces_are_the_same_over_any_ranks(tmp_path: Path):
    dense, fields = build("llama"), {"num_moe_experts": 4, "moe_ffn_hidden_size": 10, "moe_router_topk": 2}
    save_hugging_face(dense, tmp_path / "hf")
    model = build("llama", seed=5, **fields)
    load_hugging_face(model, tmp_path / "hf", upcycle=2)
    for found in run_distributed(_upcycled_over_ranks, 2, str(tmp_path / "hf"), fields):
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_no_copy_is_refused(tmp_path: Path):
    save_hugging_face(build("llama"), tmp_path / "hf")
    with pytest.raises(CheckpointError, match="for a model without experts; give --num-experts, or drop it"):
        load_hugging_face(build("llama"), tmp_path / "hf", upcycle=True)
    for fields in ({"moe_ffn_hidden_size": 10, "moe_layer_freq": 2}, {"moe_shared_expert_intermediate_size": 20}):
        with pytest.raises(
            CheckpointError, match=r"copies an MLP of width 20, in 1 piece.*into each expert, which has"
        ):
            load_hugging_face(build("llama", num_moe_experts=4, **fields), tmp_path / "hf", upcycle=True)
    with pytest.raises(CheckpointError, match=r"of another model: ffn_hidden_size 10 and 20"):
        load_hugging_face(build("llama", num_moe_experts=4, moe_ffn_hidden_size=10), tmp_path / "hf", upcycle=True)
    save_hugging_face(build("mixtral", kv_channels=4), tmp_path / "experts")
    with pytest.raises(CheckpointError, match="num_moe_experts None and 4"):
        load_hugging_face(build("llama", num_moe_experts=4), tmp_path / "experts", upcycle=True)
    with pytest.raises(
        CheckpointError, match="num_moe_experts is 4, which moe_upcycling_granularity 3 does not divide"
    ):
        load_hugging_face(build("llama", num_moe_experts=4), tmp_path / "hf", upcycle=3)
    with pytest.raises(ConfigError, match="moe_upcycling_granularity is 2 without moe_use_upcycling"):
        CheckpointConfig(moe_upcycling_granularity=2)
    with pytest.raises(ConfigError, match="moe_use_upcycling is set without pretrained_checkpoint"):
        CheckpointConfig(moe_use_upcycling=True)


def test_probabilities_that_do_not_add_up_to_one_are_a_warning(tmp_path: Path):
    dense = build("llama")
    save_hugging_face(dense, tmp_path / "hf")
    model = build("llama", num_moe_experts=4, moe_router_pre_softmax=True)
    with pytest.warns(UserWarning, match="the probabilities of a token's experts do not add up to one"):
        load_hugging_face(model, tmp_path / "hf", upcycle=True)
    assert off(logits_of(model), logits_of(dense)) > BOUND
