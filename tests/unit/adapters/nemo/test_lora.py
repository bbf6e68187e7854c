"""Low-rank adapters of `peft` on a frozen Hugging Face model, sharded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from core.adapters.nemo import fsdp2_strategy_parallelize
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.distributed._hugging_face import (
    assert_close,
    hugging_face_model,
    loss_of,
    serial_gradients,
    token_batches,
)
from tests.unit.distributed._toys import full

pytestmark = needs("peft")


def _with_adapters(kind: str) -> nn.Module:
    import peft

    targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    torch.manual_seed(5)
    options = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets, **options)
    model = peft.get_peft_model(hugging_face_model(kind), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at the start, which would leave the other factor without a gradient
                parameter.normal_()
    return model


@pytest.mark.parametrize(("kind", "recomputes"), [("llama", False), ("llama", True), ("gpt2", False)])
@on_ranks(2)
def test_adapters_train_as_in_one_process_and_the_rest_stays(kind: str, recomputes: bool) -> None:
    model = _with_adapters(kind)
    serial = copy.deepcopy(model)
    frozen = {n: p.detach().clone() for n, p in serial.named_parameters() if not p.requires_grad}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    fsdp2_strategy_parallelize(model, mesh, MixedPrecisionPolicy(), activation_checkpointing=recomputes)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 3
    loss_of(model, token_batches(2)[dist.get_rank()]).backward()
    found = {name: full(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in found)
    assert_close(found, serial_gradients(serial, 2), 0.0)
    get_megatron_optimizer(OptimizerConfig(lr=0.1, optimizer="sgd"), [model]).step()
    after = dict(model.named_parameters())
    assert all(torch.equal(full(after[name]), value) for name, value in frozen.items())
    assert any(not torch.equal(full(after[name]), dict(serial.named_parameters())[name]) for name in found)
