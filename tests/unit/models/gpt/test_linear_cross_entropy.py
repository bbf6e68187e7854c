"""A GPT without whole logits compared with the same GPT with them: under every wrapper, tied, adapted, in parts.

In fp32 parts of the vocabulary change the order of additions alone: 1e-7 of a loss, some 1e-6 of a gradient after it
has passed the layers; 1e-5 is allowed. In low precision the input's gradient is rounded at other places: 2^-8 of its
size in bf16 (2^-11 in fp16), and each layer below rounds again; four times that is allowed after two steps.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base.errors import ConfigError
from core.distributed import finalize_model_grads, wrap_model
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer import TransformerConfig
from core.transformer.lora import add_lora
from core.transformer.module import Float16Module
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed
from tests.unit._whole import whole_weights
from tests.unit.distributed._toys import CountedTraffic
from tests.unit.models._cases import CASES, FUSED, batch, build, relative_error
from tests.unit.optimizer._squares import CONFIGS

TIED, UNTIED = "gelu-learned-tied", "swiglu-gqa-rope-rms"
WRAPPERS = ("ddp", "zero1", "zero2", "fsdp2", "zero3")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _loss(model: Any, seed: int) -> torch.Tensor:
    """Computes the loss of one micro-batch: some labels are ignored, and the caller weighs the others."""
    ids, labels = batch(seed)
    labels[0, 3:5] = -100
    mask = torch.ones_like(labels, dtype=torch.float32)
    mask[1, -2:] = 0.0
    return (model(ids, labels=labels).float() * mask).sum()


def _steps(case: str, wrapper: str, **fields: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Counter[str]]:
    """Returns losses, weights after two steps of two micro-batches, and collectives of the last, counted."""
    frozen, adapts = fields.pop("frozen", ""), fields.pop("adapts", False)
    model: Any = build(CASES[case], **fields)
    if adapts:
        add_lora(model, 2, targets=["output_layer", "linear_qkv"])
        for name, parameter in model.named_parameters():
            if "linear_out" in name:
                parameter.data.normal_(0, 0.3)
    for name, parameter in model.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    if (model.config.bf16 or model.config.fp16) and wrapper not in ("fsdp2", "zero3"):
        model = Float16Module(model.config, model)
    wrapped = wrap_model(model, model.config, CONFIGS[wrapper])
    config = OptimizerConfig(
        optimizer="sgd", lr=0.05, bf16=model.config.bf16, fp16=model.config.fp16, initial_loss_scale=2.0**8
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    per_token = model.config.calculate_per_token_loss
    losses = []
    with CountedTraffic() as collectives:
        for step in range(2):
            collectives.counts.clear()
            wrapped.zero_grad_buffer()
            for index in range(2):
                with wrapped.no_sync() if index == 0 else nullcontext():
                    loss = _loss(wrapped, 10 * step + 2 * index + dist.get_rank())
                    optimizer.scale_loss(loss if per_token else loss / 40).backward()
                losses.append(loss.detach())
            finalize_model_grads([wrapped], 40 if per_token else None)
            assert optimizer.step()[0]
    return losses, whole_weights(wrapped), collectives.counts


def _equals(case: str, wrapper: str, tolerance: float, fields: dict[str, Any]) -> None:
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    losses, weights, collectives = _steps(case, wrapper, **fields, **FUSED)
    torch.manual_seed(0)
    expected_losses, expected_weights, expected_collectives = _steps(case, wrapper, **fields)
    for actual, expected in zip(losses, expected_losses, strict=True):
        assert relative_error(actual, expected) <= tolerance
    assert weights.keys() == expected_weights.keys()
    for name, expected in expected_weights.items():
        assert relative_error(weights[name], expected) <= tolerance, name
    assert collectives == expected_collectives  # the head is gathered no more often


@pytest.mark.parametrize(
    ("case", "wrapper"),
    quick(product((TIED, UNTIED), WRAPPERS), lambda case: (case[0] == TIED) == (case[1] != "zero2")),
)
def test_fused_loss_equals_whole_logits_under_every_wrapper(case, wrapper):
    run_distributed(_equals, 2, case, wrapper, 1e-5, {})


SOFT = {
    "per token": (UNTIED, 1e-5, {"calculate_per_token_loss": True}),
    "recomputed": (TIED, 1e-5, FULL),
    "frozen head": (UNTIED, 1e-5, {"frozen": "output_layer"}),
    "frozen below": (UNTIED, 1e-5, {"frozen": "decoder"}),
    "adapted head": (UNTIED, 1e-5, {"adapts": True}),
    "bf16": (UNTIED, 2**-6, {"bf16": True}),
    "fp16": (TIED, 2**-9, {"fp16": True}),
}


@pytest.mark.parametrize(
    ("soft", "wrapper"),
    quick(product(SOFT, ("zero1", "fsdp2", "zero3")), lambda case: case[1] == "zero3" or case == ("bf16", "fsdp2")),
)
def test_head_settings_compose(soft, wrapper):
    case, tolerance, fields = SOFT[soft]
    run_distributed(_equals, 2, case, wrapper, tolerance, fields)


def test_logits_without_labels_are_whole():
    ids, _ = batch(0)
    assert torch.equal(build(CASES[UNTIED], **FUSED)(ids), build(CASES[UNTIED])(ids))
    assert torch.equal(build(CASES[TIED], **FUSED)(ids), build(CASES[TIED])(ids))


class _OwnLoss(GPTModel):
    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.float().mean(-1)


def test_unfusable_heads_are_refused():
    small = CASES[UNTIED].config
    with pytest.raises(ConfigError, match="set both"):
        TransformerConfig(**small, cross_entropy_fusion_impl="linear")
    with pytest.raises(ConfigError, match="it takes"):
        TransformerConfig(**small, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="liger")
    with pytest.raises(ConfigError, match="leave it out"):
        TransformerConfig(**small, cross_entropy_fusion_vocab_chunk_size=64)
    with pytest.raises(ConfigError, match="positive number"):
        TransformerConfig(**small, **FUSED | {"cross_entropy_fusion_vocab_chunk_size": 0})
    with pytest.raises(ConfigError, match="_OwnLoss has a compute_language_model_loss of its own"):
        _OwnLoss(TransformerConfig(**small, **FUSED), vocab_size=32, max_sequence_length=8)
    head: Any = build(CASES[TIED], **FUSED).output_layer
    with pytest.raises(ConfigError, match="need labels"):
        head(torch.zeros(1, 1, 16), torch.zeros(32, 16), output_cross_entropy_loss=True)
    with pytest.raises(ConfigError, match="reduction"):
        head(torch.zeros(1, 1, 16), output_cross_entropy_loss=True, reduction="mean")
