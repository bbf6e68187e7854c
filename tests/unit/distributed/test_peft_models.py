"""Models of peft under every wrapper train as in one process, and what they freeze stays."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._quick import needs, quick
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks
from tests.unit._whole import whole_weights
from tests.unit.distributed._hugging_face import hugging_face_model, loss_of, token_batches
from tests.unit.distributed._toys import build

pytestmark = needs("peft")

METHODS = ["lora", "dora", "prompt tuning"]
STEPS = 3


def _adapted(method: str) -> nn.Module:
    import peft

    torch.manual_seed(5)
    if method == "prompt tuning":
        config: Any = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    else:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=method == "dora")
    model: nn.Module = peft.get_peft_model(hugging_face_model("llama"), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at the start, which would leave the other factor without a gradient
                parameter.normal_()
    return model


def _train(model: Any) -> list[Tensor]:
    """Trains on one batch for all ranks in a step, so that their mean is exact."""
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, clip_grad=0.0), [model])
    losses = []
    for tokens in token_batches(STEPS):
        optimizer.zero_grad()
        losses.append(loss_of(model, tokens))
        losses[-1].backward()
        if hasattr(model, "zero_grad_buffer"):
            finalize_model_grads([model])
        optimizer.step()
    return [loss.detach() for loss in losses]


@pytest.mark.parametrize(
    ("kind", "method"),
    quick(
        product(["ddp", "zero1_overlap", "zero2_overlap", "zero3", "fsdp2"], METHODS),
        lambda case: case[1] == "lora" or case in (("zero3", "dora"), ("fsdp2", "dora"), ("fsdp2", "prompt tuning")),
    ),
)
@on_ranks(2)
def test_models_of_peft_train_as_in_one_process(kind: str, method: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    losses, expected = _alone(method)
    model = build(kind, _adapted(method), unit_classes=(LlamaDecoderLayer,))
    assert _train(model) == losses
    assert_same(whole_weights(model), expected)


@functools.cache
def _alone(method: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    alone = _adapted(method)
    start = whole_weights(alone)
    losses, expected = _train(alone), whole_weights(alone)
    trained = {name for name, parameter in alone.named_parameters() if parameter.requires_grad}
    assert trained and {name for name, value in expected.items() if not torch.equal(value, start[name])} == trained
    return losses, expected
