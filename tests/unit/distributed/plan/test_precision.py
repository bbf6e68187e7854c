"""The policy that a model's parameters and the settings make together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from core.base.errors import ParallelConfigError
from core.distributed import TorchFullyShardedDataParallelConfig
from core.distributed.plan.pieces import mixed_precision_policy

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
    of_model = SimpleNamespace(bf16=compute is BF16, fp16=compute is FP16)
    policy = mixed_precision_policy([torch.zeros(1, dtype=dtype) for dtype in arrived], of_model, config)
    assert policy == MixedPrecisionPolicy(*expected)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype"])
def test_fp16_needs_a_loss_scale(field):
    config = TorchFullyShardedDataParallelConfig(**{field: "fp16"})
    with pytest.raises(ParallelConfigError, match=rf"{field} (is )?fp16.*fp16=False"):
        mixed_precision_policy([torch.zeros(1)], SimpleNamespace(bf16=True), config)
