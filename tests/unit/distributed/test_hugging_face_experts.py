"""Stock models of transformers with experts, whose matrices are 3-D parameters, train as in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import ShardstackError
from core.dist_checkpointing.flat_range import whole_view
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.moe import cut_experts
from core.weights import WeightStream
from tests.unit._spawn import run_distributed
from tests.unit._whole import whole
from tests.unit.distributed._hugging_face import assert_close, hugging_face_model, loss_of, token_batches
from tests.unit.distributed._toys import full
from tests.unit.distributed._unused import give_unused_zero_gradients

STEPS, RANKS = 3, 2
_QWEN3 = {"num_experts": 5, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral, grouped": ("mixtral", {"num_local_experts": 5, "experts_implementation": "grouped_mm"}),
    "qwen3": ("qwen3_moe", _QWEN3),
    "qwen3, balanced": ("qwen3_moe", _QWEN3 | {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
}
WRAPPERS: dict[str, Any] = {
    "ddp": DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=500),
    "zero1": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim"),
    "zero3": FullyShardedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params"),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
}


def _trained(case: str, wrapper: str | None) -> dict[str, torch.Tensor]:
    """Returns the weights after some steps of this rank, or of one process on the batches of both."""
    kind, fields = CASES[case]
    module = hugging_face_model(kind, initializer_range=0.3, **{"experts_implementation": "eager", **fields})
    model = module
    if wrapper is not None:
        model = wrap_model(module, SimpleNamespace(), WRAPPERS[wrapper], process_group=dist.group.WORLD)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.02, clip_grad=0.0), [model])
    batches = token_batches(STEPS * RANKS)
    for step in range(STEPS):
        optimizer.zero_grad()
        both = batches[step * RANKS : (step + 1) * RANKS]
        if wrapper is None:
            for tokens in both:
                (loss_of(model, tokens) / RANKS).backward()
        else:
            loss_of(model, both[dist.get_rank()]).backward()
            finalize_model_grads([model])
        optimizer.step()
    return {name: full(tensor).clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(case: str, wrapper: str):
    pytest.importorskip("transformers")
    expected = _trained(case, None)
    assert any(tensor.dim() == 3 for tensor in expected.values())
    for weights in run_distributed(_trained, RANKS, case, wrapper):
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected[name]), name


# Experts cut over ranks. One process computes an expert's tokens of a micro-batch in one product, ranks those of all
# micro-batches: sums are the same numbers in another order.

_SGD = {"optimizer": "sgd", "lr": 0.05, "sgd_momentum": 0.9, "weight_decay": 0.01, "clip_grad": 0.5}
EVEN = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3, balanced, grouped": (
        "qwen3_moe",
        {**_QWEN3, "num_experts": 4, "num_experts_per_tok": 3, "output_router_logits": True}
        | {"router_aux_loss_coef": 0.1, "experts_implementation": "grouped_mm"},
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
CUT_WRAPPERS = WRAPPERS | {
    "zero2": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads", bucket_size=500)
}
LONGEST_SUMS = 2 * 3 * (4 * 16 + 24 + 12 + 6)
"""Additions behind a gradient: inner sizes of the products of two layers, in forward and twice in backward."""
BOUND = STEPS * LONGEST_SUMS**0.5 * torch.finfo(torch.float32).eps
"""Of the difference, relative to the largest element: roundings of n additions add up like sqrt(n) (Higham and Mary,
2019), in each of the steps."""


def _model(case: str) -> nn.Module:
    kind, fields = EVEN[case]
    return hugging_face_model(kind, initializer_range=0.3, **{"experts_implementation": "eager", **fields})


def _steps(module: nn.Module, wrapper: str | None) -> dict[str, Any]:
    model = module
    if wrapper is not None:
        model = wrap_model(module, SimpleNamespace(), CUT_WRAPPERS[wrapper])
    optimizer = get_megatron_optimizer(OptimizerConfig(**_SGD), [model])
    batches, norms = token_batches(STEPS * RANKS), []
    for step in range(STEPS):
        optimizer.zero_grad()
        both = batches[step * RANKS : (step + 1) * RANKS]
        if wrapper is None:
            for tokens in both:
                (loss_of(model, tokens) / RANKS).backward()
            give_unused_zero_gradients(module.parameters())
        else:
            loss_of(model, both[dist.get_rank()]).backward()
            finalize_model_grads([model])
        norms.append(optimizer.step()[1])
    return {"norms": torch.tensor(norms), **_whole_weights(module)}


def _whole_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(whole_view(parameter)).clone() for name, parameter in module.named_parameters()}


def _over_ranks(wrapper: str) -> dict[str, dict[str, Any]]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    found = {}
    for case in EVEN:
        module = cut_experts(_model(case))
        experts = [p for p in module.parameters() if getattr(p, "expert_model_parallel", False)]
        assert len(experts) in (4, 8) and {len(p) for p in experts} == {2}
        found[case] = _steps(module, wrapper)
    return found


@pytest.mark.parametrize("wrapper", CUT_WRAPPERS)
def test_experts_over_ranks_equal_one_process(wrapper: str):
    pytest.importorskip("transformers")
    for found in run_distributed(_over_ranks, RANKS, wrapper):
        for case, values in found.items():
            assert_close(values, _alone(case), BOUND)


@functools.cache
def _alone(case: str) -> dict[str, Any]:
    return _steps(_model(case), None)


def _one_expert(wrapper: str) -> list[float]:
    """All tokens go to the experts of the first rank: the other has none in any micro-batch."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    module = _model("mixtral")
    for layer in module.model.layers:
        layer.mlp.gate.weight.data[2:] = 0.0
        layer.mlp.gate.weight.data[:2] = layer.mlp.gate.weight.data[:1].abs() + 1
        layer.post_attention_layernorm.weight.data.zero_()
    model = wrap_model(cut_experts(module), SimpleNamespace(), CUT_WRAPPERS[wrapper])
    model.zero_grad_buffer()
    loss_of(model, token_batches(RANKS)[dist.get_rank()]).backward()
    finalize_model_grads([model])
    experts = [p for p in module.parameters() if getattr(p, "expert_model_parallel", False)]
    return [model.local_gradient(p).abs().sum().item() for p in experts]


@pytest.mark.parametrize("wrapper", ["zero2", "fsdp2"])
def test_a_rank_without_tokens_waits_for_nothing(wrapper: str):
    pytest.importorskip("transformers")
    assert run_distributed(_one_expert, RANKS, wrapper, limit_s=120)[1] == [0.0] * 4


def _loaded(folder: str) -> list[str]:
    """Loads a folder on each rank; returns names of tensors that are not the file's, whole or on this rank."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    module, rank = AutoModelForCausalLM.from_pretrained(folder), dist.get_rank()
    stacked = {name: p.detach().clone() for name, p in module.named_parameters() if p.dim() == 3}
    model = wrap_model(cut_experts(module), SimpleNamespace(), CUT_WRAPPERS["zero3"])
    stored = load_file(f"{folder}/model.safetensors")
    sent = dict(WeightStream(model))
    assert len(stacked) == 4 and sent.keys() == stored.keys()
    wrong = [name for name, tensor in stored.items() if not torch.equal(sent[name], tensor)]
    with model.whole_parameters():
        own = dict(module.named_parameters())
        return wrong + [n for n, tensor in stacked.items() if not torch.equal(own[n], tensor.chunk(RANKS)[rank])]


def test_each_rank_has_its_experts_of_the_files(tmp_path: Path):
    pytest.importorskip("transformers")
    for case in ("mixtral", "qwen3, balanced, grouped"):
        _model(case).save_pretrained(tmp_path / case)
        assert run_distributed(_loaded, RANKS, str(tmp_path / case)) == [[]] * RANKS


def _refused() -> list[str]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    messages = []
    for module in (hugging_face_model("llama"), hugging_face_model("mixtral", num_local_experts=5)):
        with pytest.raises(ShardstackError) as raised:
            cut_experts(module)
        messages.append(str(raised.value))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_tensor_parallel_size=2)
    with pytest.raises(ShardstackError) as raised:
        cut_experts(_model("mixtral"))
    return [*messages, str(raised.value)]


def test_models_that_cannot_be_cut_are_refused():
    pytest.importorskip("transformers")
    for no_experts, does_not_divide, tensor_parallel in run_distributed(_refused, RANKS):
        assert no_experts.startswith("LlamaForCausalLM has no module with num_experts and 3-D parameters of experts")
        assert "has 5 experts, which expert_model_parallel_size 2 does not divide" in does_not_divide
        assert tensor_parallel.endswith("leave out expert_tensor_parallel_size")
