"""Stock models of transformers with experts, whose matrices are 3-D parameters, train as in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import run_distributed
from tests.unit.distributed._hugging_face import hugging_face_model, loss_of, token_batches
from tests.unit.distributed._toys import full

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
