"""Adapters of PEFT are merged by PEFT's own arithmetic on whole tensors, to the bit, and the model stays as it is."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ConfigError
from core.distributed import wrap_model
from core.weights import WeightStream
from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.distributed._hugging_face import hugging_face_model
from tests.unit.weights._models import CONFIGS

pytestmark = needs("transformers", "peft")

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "rslora": {"r": 4, "use_rslora": True, "target_modules": ["q_proj"]},
    "dora": {"r": 2, "use_dora": True, "target_modules": ["q_proj"]},
    "embedding": {"r": 2, "target_modules": ["embed_tokens"]},
    "ia3": {"target_modules": ["k_proj"], "feedforward_modules": []},
    "loha": {"r": 2, "target_modules": ["k_proj"]},
    "experts": {"r": 2, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}


def adapted(kind: str, dtype: torch.dtype = torch.float32, active: tuple[str, ...] = ("default",)) -> Any:
    """Returns a model with adapters ``default`` and ``other`` that change what it computes."""
    import peft

    config = {"ia3": peft.IA3Config, "loha": peft.LoHaConfig}.get(kind, peft.LoraConfig)(**KINDS[kind])
    fields = {"kind": "mixtral", "num_local_experts": 3} if kind == "experts" else {"kind": "llama"}
    model = peft.get_peft_model(hugging_face_model(**fields).to(dtype), config)
    if kind != "experts":
        model.add_adapter("other", config)
        model.base_model.set_adapter(list(active))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" not in name and (".default" in name or ".other" in name):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype) * 0.1)
    return model


def merged_by_peft(model: Any) -> dict[str, torch.Tensor]:
    """Returns the parameters of a merged copy, under the base model's names."""
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    own = {name: value for name, value in merged.named_parameters() if merged.prefix not in name}
    plain = {}
    for name, value in own.items():
        if "original_module" not in name and "modules_to_save.other" not in name:
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            plain[name.replace("modules_to_save.default.", "")] = value.detach()
    return plain


def sent(model: Any) -> dict[str, torch.Tensor]:
    names = {name for name, _ in model.named_parameters()}
    received = {}
    for name, value in WeightStream(model, "module"):
        if name in names:
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            received[name.replace("modules_to_save.default.", "")] = value.clone()
    return received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_pefts_to_the_bit(kind, dtype):
    model = adapted(kind, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected, received = merged_by_peft(model), sent(model)
    assert expected.keys() == received.keys()
    assert all(
        torch.equal(received[name], value) and received[name].dtype == dtype for name, value in expected.items()
    )
    plain = {
        name.removeprefix("base_model.model.").replace("base_layer.", ""): value for name, value in before.items()
    }
    assert any(name not in plain or not torch.equal(plain[name], value) for name, value in expected.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(getattr(module, "merged_adapters", []) for module in model.modules())


def test_adapted_experts_go_out_one_by_one():
    received = {name: value.clone() for name, value in WeightStream(adapted("experts"))}
    expected = {name: value.clone() for name, value in WeightStream(adapted("experts").merge_and_unload())}
    assert [*received] == [*expected] and any("experts.2.w1" in name for name in received)
    assert all(torch.equal(received[name], value) for name, value in expected.items())


@pytest.mark.parametrize("active", [("other",), ("default", "other")])
def test_the_active_adapters_are_merged(active):
    model = adapted("rslora", active=active)
    expected, received = merged_by_peft(model), sent(model)
    assert all(torch.equal(received[name], value) for name, value in expected.items())
    assert any(not torch.equal(received[name], value) for name, value in sent(adapted("rslora")).items())


def test_a_layer_that_is_merged_already_stays_so():
    model = adapted("rslora")
    expected = merged_by_peft(model)
    model.merge_adapter()
    assert all(torch.equal(value, expected[name]) for name, value in sent(model).items())


def _sharded(kind: str, wrapper: str) -> dict[str, torch.Tensor]:
    return sent(
        wrap_model(adapted(kind), SimpleNamespace(), CONFIGS[wrapper](), process_group=dist.group.WORLD).module
    )


@pytest.mark.parametrize("wrapper", ["zero3", "fsdp2"])
def test_shards_are_merged_as_whole_models(wrapper):
    expected = merged_by_peft(adapted("dora"))
    for received in run_distributed(_sharded, 2, "dora", wrapper):
        assert received.keys() == expected.keys()
        assert all(torch.equal(received[name], value) for name, value in expected.items())


def test_parts_of_a_module_are_refused():
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2])
    with pytest.raises(
        ConfigError, match="embed_tokens is trained in part by an adapter of PEFT, and cannot be merged"
    ):
        WeightStream(peft.get_peft_model(hugging_face_model("llama"), config))


def test_an_adapter_that_peft_cannot_merge_is_refused():
    import peft

    model = peft.get_peft_model(
        hugging_face_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True)
    )
    with pytest.raises(ConfigError, match=r"cannot be merged here \(RuntimeError: Impossible to merge LoRA with"):
        WeightStream(model)
