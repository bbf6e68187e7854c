"""The policy that a model's parameters and the settings make together."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from core.base.errors import ParallelConfigError
from core.distributed import TorchFullyShardedDataParallelConfig
from core.distributed.model.initial_values import apply_to_buffers
from core.distributed.plan.precision import mixed_precision_policy
from core.transformer.moe.router import TopKRouter
from core.transformer.transformer_config import TransformerConfig

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize(
    ("arrived", "compute", "settings", "expected"),
    [
        # (param_dtype, reduce_dtype, output_dtype, cast_forward_inputs)
        ([FP32], FP32, {}, (None, None, None, False)),
        ([FP32], BF16, {}, (BF16, BF16, FP32, True)),
        ([FP32], BF16, {"grad_reduce_in_fp32": True}, (BF16, FP32, FP32, True)),
        ([FP32], FP32, {"param_dtype": "bf16"}, (BF16, BF16, FP32, True)),
        ([FP32], FP16, {"param_dtype": FP16, "reduce_dtype": "bf16"}, (FP16, BF16, FP32, True)),
        ([BF16], FP32, {"param_dtype": "bf16"}, (BF16, BF16, FP32, True)),
        ([BF16, FP32], FP32, {"param_dtype": "bf16", "reduce_dtype": FP32}, (BF16, FP32, FP32, True)),
        ([BF16], BF16, {}, (None, None, None, False)),
        ([BF16], BF16, {"grad_reduce_in_fp32": True}, (None, FP32, None, False)),
        ([BF16, FP32], BF16, {}, (None, None, None, False)),  # fp32 norms stay fp32
        ([FP64], FP32, {}, (None, None, None, False)),
    ],
)
def test_only_what_arrives_in_fp32_is_cast(arrived, compute, settings, expected):
    config = TorchFullyShardedDataParallelConfig(**settings)
    policy = mixed_precision_policy([torch.zeros(1, dtype=dtype) for dtype in arrived], compute, config)
    assert policy == MixedPrecisionPolicy(*expected)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype"])
def test_fp16_needs_a_loss_scale(field):
    config = TorchFullyShardedDataParallelConfig(**{field: "fp16"})
    with pytest.raises(ParallelConfigError, match=rf"{field} (is )?fp16.*fp16=False"):
        mixed_precision_policy([torch.zeros(1)], BF16, config)


def test_buffers_of_a_module_that_keeps_them_stay():
    """A router's bias moves by steps that bf16 would round away."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=3,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    router = TopKRouter(config)
    before = {name: buffer.clone() for name, buffer in router.named_buffers()}
    for cast in (router.bfloat16, router.double):
        cast()
        for name, buffer in router.named_buffers():
            assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name]), name
    apply_to_buffers(router, lambda buffer: buffer.to("meta", BF16))
    assert router.expert_bias.is_meta and router.expert_bias.dtype == FP32


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"param_dtype": "int8"}, ("param_dtype is 'int8'",)),
        ({"forward_prefetch": -1}, ("forward_prefetch is -1",)),
        ({"grad_reduce_in_fp32": True, "reduce_dtype": "bf16"}, ("grad_reduce_in_fp32", "reduce_dtype is bf16")),
        (
            {"keep_gathered_between_micro_batches": "all", "reshard_after_forward": 2},
            ("keep_gathered_between_micro_batches", "reshard_after_forward is 2"),
        ),
        (
            {"keep_gathered_between_micro_batches": "all", "reshard_overrides": ("head=True",)},
            ("keep_gathered_between_micro_batches", "reshard_overrides ['head=True']"),
        ),
        ({"reshard_overrides": ("head",)}, ("reshard_overrides holds 'head'",)),
        ({"keep_gathered_between_micro_batches": "some"}, ("keep_gathered_between_micro_batches is 'some'", "ends")),
    ],
)
def test_contradictory_settings_name_both(settings, said):
    with pytest.raises(ParallelConfigError) as caught:
        TorchFullyShardedDataParallelConfig(**settings)
    assert all(part in str(caught.value) for part in said)
