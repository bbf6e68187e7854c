"""Parameters that are kept in fp32 and cast to be gathered: the bits are those of FSDP2, which does the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from core.distributed import FullyShardedDataParallel, TorchFullyShardedDataParallel, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import UNITS, batches, build, loss_of, synced_last, toy
from tests.unit.distributed._toys import settings as settings_of

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bf16": True}, {}),
    ({"bf16": True}, {"grad_reduce_in_fp32": True}),
    ({"bf16": True}, {"reduce_every_micro_batch": True}),
    ({"bf16": True}, {"activation_checkpointing": "full"}),
    ({"bf16": True, "calculate_per_token_loss": True}, {}),
    ({"bf16": True, "calculate_per_token_loss": True}, {"reduce_every_micro_batch": True}),
    ({"fp16": True}, {}),
    ({"fp16": True}, {"reduce_dtype": "bf16"}),
    ({}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}),
    ({}, {"reduce_dtype": "bf16"}),
]
"""Fields of the model's config, and of the wrapper's."""


def _train(kind: str, fields: dict[str, Any], settings: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the losses and norms of two steps, and all weights after them."""
    model = build(kind, toy(), config=SimpleNamespace(**fields), **settings)
    half = {name: fields.get(name, False) for name in ("bf16", "fp16")}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1, clip_grad=0.5, initial_loss_scale=2.0**8, **half), [model]
    )
    seen = []
    for step in range(2):
        model.zero_grad_buffer()
        for tokens in synced_last(model, [batches(step)[0]] * 2):
            loss = loss_of(model, tokens)
            optimizer.scale_loss(loss).backward()
            seen.append(loss.detach())
        num_tokens = torch.tensor(7.0) if "calculate_per_token_loss" in fields else None
        finalize_model_grads([model], num_tokens)
        seen.append(torch.tensor(optimizer.step()[1]))
    with model.whole_parameters():
        weights = {
            name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
            for name, param in model.module.named_parameters()
        }
    return seen, weights


@pytest.mark.parametrize("num_ranks", quick([1, 2, 4], {1, 2}.__contains__))
@on_ranks("num_ranks")
def test_cast_parameters_give_the_bits_of_fsdp2(num_ranks):
    cases = CASES if num_ranks == 2 else CASES[::2]
    for fields, settings in cases:
        (expected, weights), (found, own) = (_train(kind, fields, settings) for kind in ("fsdp2", "zero3"))
        assert all(map(torch.equal, found, expected)), (fields, settings, found, expected)
        for name, weight in weights.items():
            assert own[name].dtype == weight.dtype == torch.float32, (fields, settings, name)
            assert torch.equal(own[name], weight), (fields, settings, name)


@on_ranks(1)
def test_a_module_that_keeps_its_buffers_keeps_their_dtype() -> None:
    for kind in ("zero3", "fsdp2"):
        module = toy(tied=False).bfloat16()
        module.offset = module.offset.float()
        module.blocks[0].register_buffer("total", torch.full((2,), 1.0 + 2**-20))
        module.blocks[0].buffers_keep_dtype = True
        model = build(kind, module)
        if kind == "zero3":  # torch casts all buffers of what it shards, as of a plain module
            model.bfloat16()  # parameters are in it already
            assert module.offset.dtype == torch.bfloat16
        assert torch.equal(module.blocks[0].total, torch.full((2,), 1.0 + 2**-20))


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(2)
def test_the_model_computes_in_its_dtype_and_shards_stay_fp32(kind: str) -> None:
    module, seen = toy(tied=False), {}
    policy = MixedPrecisionPolicy(torch.float16, output_dtype=torch.bfloat16)
    wrapper = FullyShardedDataParallel if kind == "zero3" else TorchFullyShardedDataParallel
    ddp_config, config = settings_of(kind), SimpleNamespace(fp16=True)
    model = wrapper(config, ddp_config, module, UNITS, process_group=dist.group.WORLD, mp_policy=policy)
    module.blocks[0].up.register_forward_hook(lambda m, args, out: seen.update(weight=m.weight.dtype, out=out.dtype))
    output = model(batches(0)[0])
    assert seen == {"weight": torch.float16, "out": torch.float16}
    assert output.dtype == torch.bfloat16
    assert {held.dtype for held in model.state_dict().values() if held.dtype != torch.float16} == {torch.float32}
    with model.whole_parameters():
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    if kind == "zero3":
        assert {param.dtype for param in model.parameters()} == {torch.float16}
        facts = {(piece.param_dtype, piece.gathered_dtype, piece.grad_dtype) for piece, *_ in model.plan.buffers}
        assert facts == {(torch.float32, torch.float16, torch.float16)}
