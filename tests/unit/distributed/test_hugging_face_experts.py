"""Stock models of transformers with experts, whose matrices are 3-D parameters, train as in one process."""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import parallel_state
from core.base.errors import ShardstackError
from core.base.module_protocol import unwrap_model
from core.dist_checkpointing import load, model_state_dict, save
from core.dist_checkpointing.global_view import whole_view
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.moe import cut_experts
from core.weights import WeightStream, load_pretrained, save_pretrained
from tests.unit._quick import needs, quick
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit._whole import whole
from tests.unit.distributed._hugging_face import assert_close, hugging_face_model, loss_of, token_batches
from tests.unit.distributed._unused import give_unused_zero_gradients

pytestmark = needs("transformers")

STEPS, RANKS = 3, 2
_QWEN3 = {"num_experts": 5, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral, grouped": ("mixtral", {"num_local_experts": 5, "experts_implementation": "grouped_mm"}),
    "qwen3": ("qwen3_moe", _QWEN3),
    "qwen3, balanced": ("qwen3_moe", _QWEN3 | {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
}
MEETS = {"mixtral, grouped": ("zero3",), "qwen3": ("zero1",), "qwen3, balanced": ("zero3", "fsdp2")}
"""What runs each time, in addition to the first case under every wrapper."""
WRAPPERS: dict[str, Any] = {
    "ddp": DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=500),
    "zero1": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim"),
    "zero3": FullyShardedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params"),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
}


def _model(case: str) -> nn.Module:
    kind, fields = (CASES | EVEN)[case]
    return hugging_face_model(kind, initializer_range=0.3, **{"experts_implementation": "eager", **fields})


@pytest.mark.parametrize(
    ("case", "wrapper"),
    quick(product(CASES, WRAPPERS), lambda case: case[0] == "mixtral" or case[1] in MEETS.get(case[0], ())),
)
@on_ranks(RANKS)
def test_training_equals_one_process(case: str, wrapper: str) -> None:
    adam = {"optimizer": "adam", "lr": 0.02, "clip_grad": 0.0}
    expected = _alone(case, **adam)
    assert any(tensor.dim() == 3 for tensor in expected.values())
    model = wrap_model(_model(case), SimpleNamespace(), WRAPPERS[wrapper], process_group=dist.group.WORLD)
    assert_same(_steps(model, **adam), expected)


# Experts cut over ranks. One process computes an expert's tokens of a micro-batch in one product, ranks those of all
# micro-batches: sums are the same numbers in another order.

_SGD = {"optimizer": "sgd", "lr": 0.05, "sgd_momentum": 0.9, "weight_decay": 0.01, "clip_grad": 0.5}
EVEN = {
    "even mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3, balanced, grouped": (
        "qwen3_moe",
        {**_QWEN3, "num_experts": 4, "num_experts_per_tok": 3, "output_router_logits": True}
        | {"router_aux_loss_coef": 0.1, "experts_implementation": "grouped_mm"},
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
MEET_OVER_RANKS = {"ddp": ["even mixtral"], "zero1": ["qwen3, balanced, grouped"], "zero2": ["gpt-oss"]}
"""Where not all of `EVEN` are trained."""
CUT_WRAPPERS = WRAPPERS | {
    "zero2": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads", bucket_size=500)
}
LONGEST_SUMS = 2 * 3 * (4 * 16 + 24 + 12 + 6)
"""Additions behind a gradient: inner sizes of the products of two layers, in forward and twice in backward."""
BOUND = STEPS * LONGEST_SUMS**0.5 * torch.finfo(torch.float32).eps
"""Of the difference, relative to the largest element: roundings of n additions add up like sqrt(n) (Higham and Mary,
2019), in each of the steps."""


def _steps(model: nn.Module, replicas: int = RANKS, **config: Any) -> dict[str, Any]:
    """Trains a wrapped model on this rank's batches, or a plain one on those of all replicas."""
    module = unwrap_model(model)
    optimizer = get_megatron_optimizer(OptimizerConfig(**config or _SGD), [model])
    batches, norms = token_batches(STEPS * replicas), []
    for step in range(STEPS):
        optimizer.zero_grad()
        of_all = batches[step * replicas : (step + 1) * replicas]
        if model is module:
            for tokens in of_all:
                (loss_of(model, tokens) / replicas).backward()
            give_unused_zero_gradients(p for p in module.parameters() if p.requires_grad)
        else:
            loss_of(model, of_all[dist.get_rank()]).backward()
            finalize_model_grads([model])
        norms.append(optimizer.step()[1])
    return {"norms": torch.tensor(norms), **_whole_weights(module)}


def _wrapped(module: nn.Module, wrapper: str) -> Any:
    return wrap_model(cut_experts(module), SimpleNamespace(), WRAPPERS_OF_FOUR_RANKS[wrapper])


def _whole_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(whole_view(parameter)).clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("wrapper", CUT_WRAPPERS)
@on_ranks(RANKS)
def test_experts_over_ranks_equal_one_process(wrapper: str) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    for case in MEET_OVER_RANKS.get(wrapper, EVEN):
        module = cut_experts(_model(case))
        experts = [p for p in module.parameters() if getattr(p, "expert_model_parallel", False)]
        assert len(experts) in (4, 8) and {len(p) for p in experts} == {2}
        found = _steps(wrap_model(module, SimpleNamespace(), CUT_WRAPPERS[wrapper]))
        assert_close(found, _alone(case), BOUND)


@functools.cache
def _alone(case: str, **config: Any) -> dict[str, Any]:
    return _steps(_model(case), **config)


@pytest.mark.parametrize("wrapper", ["zero2", "fsdp2"])
@on_ranks(RANKS, limit_s=120)
def test_a_rank_without_tokens_waits_for_nothing(wrapper: str) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    module = _model("even mixtral")
    for layer in module.model.layers:
        layer.mlp.gate.weight.data[2:] = 0.0  # all tokens go to the experts of the first rank
        layer.mlp.gate.weight.data[:2] = layer.mlp.gate.weight.data[:1].abs() + 1
        layer.post_attention_layernorm.weight.data.zero_()
    model = _wrapped(module, wrapper)
    model.zero_grad_buffer()
    loss_of(model, token_batches(RANKS)[dist.get_rank()]).backward()
    finalize_model_grads([model])
    experts = [p for p in module.parameters() if getattr(p, "expert_model_parallel", False)]
    assert len(experts) == 4
    if dist.get_rank() == 1:
        assert not any(model.local_gradient(p).any() for p in experts)


# Models that are never whole: from the meta device, filled from files.

HYBRID = {"num_distributed_optimizer_instances": 2}
WRAPPERS_OF_FOUR_RANKS = CUT_WRAPPERS | {
    "hybrid zero3": FullyShardedDataParallelConfig(**HYBRID),
    "hybrid fsdp2": TorchFullyShardedDataParallelConfig(**HYBRID),
}


def _on_meta(folder: Path, draws: bool = False) -> nn.Module:
    """Returns the model of a folder on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, experts_implementation="eager")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    module.config.perform_initialization = draws
    return module


class _Shapes(TorchDispatchMode):
    """Notes the shapes of tensors that operations inside allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {tuple(t.shape) for t in tree_leaves(result) if type(t) is torch.Tensor and not t.is_meta}
        return result


_WIDE = {"num_local_experts": 8, "intermediate_size": 48, "experts_implementation": "eager"}


def _check_from_files(folder: Path, wrapper: str, expected: dict[str, Any]) -> None:
    """Trains a model that each rank has filled from its files, never with all experts of a layer, and writes it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    instances = 2 if "hybrid" in wrapper else 1
    sizes = {"expert_model_parallel_size": 2, "num_distributed_optimizer_instances": instances}
    parallel_state.initialize_model_parallel(**sizes)
    with _Shapes() as shapes:
        model = _wrapped(_on_meta(folder), wrapper)
        load_pretrained(model, folder)
    assert not [shape for shape in shapes.found if len(shape) == 3 and shape[0] == _WIDE["num_local_experts"]]
    stored = load_file(folder / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.7.w2.weight" in stored  # as on the hub
    sent = dict(WeightStream(model))
    assert_same({name: sent[name] for name in stored}, stored)
    values = _steps(model, dist.get_world_size())
    assert_close(values, expected, 2 * BOUND)  # sums of up to twice as many tokens
    save_pretrained(model, folder / wrapper)
    save(model_state_dict(unwrap_model(model)), folder / f"{wrapper} checkpoint")
    parallel_state.destroy_model_parallel()

    parallel_state.initialize_model_parallel(expert_model_parallel_size=4 if dist.get_world_size() == 4 else 1)
    again = unwrap_model(_wrapped(_on_meta(folder), "zero2"))
    load(model_state_dict(again), folder / f"{wrapper} checkpoint")
    written = AutoModelForCausalLM.from_pretrained(folder / wrapper)
    assert written.config.architectures == ["MixtralForCausalLM"]
    del values["norms"]
    assert_same(_whole_weights(again), values)
    assert_same(dict(written.named_parameters()), values)
    parallel_state.destroy_model_parallel()


_FILLED = [
    (2, "zero3"),
    (2, "fsdp2"),
    (4, "zero3"),
    (4, "hybrid fsdp2"),
    (4, "zero2"),
    (4, "fsdp2"),
    (4, "hybrid zero3"),
]


@pytest.mark.parametrize(("ranks", "wrapper"), quick(_FILLED, lambda case: case[0] == 2))
def test_models_filled_from_files_equal_one_process(ranks: int, wrapper: str, tmp_path: Path):
    module = hugging_face_model("mixtral", initializer_range=0.3, **_WIDE)
    module.save_pretrained(tmp_path)
    run_distributed(_check_from_files, ranks, tmp_path, wrapper, _steps(module, ranks))


def _with_adapters(module: nn.Module) -> Any:
    import peft

    return peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def _tuned(folder: str, wrapper: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Trains adapters of attention next to experts over ranks. Returns the adapters' first values, and the results."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    model = _wrapped(_with_adapters(_on_meta(Path(folder), draws=True)), wrapper)
    load_pretrained(model, folder)
    start = {name: value for name, value in _whole_weights(unwrap_model(model)).items() if "lora_" in name}
    return start, _steps(model)


@needs("peft")
@pytest.mark.parametrize("wrapper", quick(["zero3", "fsdp2"], lambda wrapper: wrapper == "fsdp2"))
def test_adapters_train_next_to_experts_over_ranks(wrapper: str, tmp_path: Path):
    module = _model("even mixtral")
    module.save_pretrained(tmp_path)
    alone = _with_adapters(module)
    start, _ = by_rank = run_distributed(_tuned, RANKS, str(tmp_path), wrapper)[0]
    for name, value in start.items():
        assert ("lora_B" in name) != value.any()  # zeros, and values that differ
        alone.get_parameter(name).data.copy_(value)
    assert_close(by_rank[1], _steps(alone), BOUND)


def test_each_rank_has_its_experts_of_a_whole_model(tmp_path: Path):
    _model("even mixtral").save_pretrained(tmp_path)
    run_distributed(_load_and_cut, RANKS, tmp_path)


def _load_and_cut(folder: Path) -> None:
    """Loads a whole model on each rank and cuts it: each 3-D tensor is this rank's part."""
    from transformers import AutoModelForCausalLM

    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    module, rank = AutoModelForCausalLM.from_pretrained(folder), dist.get_rank()
    stacked = {name: p.detach().clone() for name, p in module.named_parameters() if p.dim() == 3}
    model = _wrapped(module, "zero3")
    assert len(stacked) == 4
    with model.whole_parameters():
        own = dict(module.named_parameters())
        assert_same({name: own[name] for name in stacked}, {n: t.chunk(RANKS)[rank] for n, t in stacked.items()})


@on_ranks(RANKS)
def test_models_that_cannot_be_cut_are_refused() -> None:
    for sizes, module, message in (
        (
            {"expert_model_parallel_size": RANKS},
            hugging_face_model("llama"),
            "^LlamaForCausalLM has no module with num_e",
        ),
        (
            {"expert_model_parallel_size": RANKS},
            hugging_face_model("mixtral", num_local_experts=5),
            "has 5 experts, which expert_model_parallel_size 2 does not divide",
        ),
        ({"expert_tensor_parallel_size": 2}, _model("even mixtral"), "drop expert_tensor_parallel_size$"),
    ):
        parallel_state.initialize_model_parallel(**sizes)
        with pytest.raises(ShardstackError, match=message):
            cut_experts(module)
        parallel_state.destroy_model_parallel()
