"""LoRA adapters for PEFT: files that it loads, and its own models wrapped."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ConfigError
from core.distributed import wrap_model
from core.models.gpt.hugging_face import save_hugging_face
from core.weights import WeightStream, save_adapter
from tests.unit._spawn import run_distributed
from tests.unit.distributed._hugging_face import hugging_face_model
from tests.unit.weights._models import CONFIGS, VOCABULARY, gpt, start, wrapped

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def _save(kind: str, folder: Path) -> None:
    start()
    save_hugging_face(gpt(), folder / "base")
    save_adapter(wrapped(kind, gpt(lora=True)), folder / "adapter", base_model="some/base")


@pytest.mark.parametrize("kind", ["ddp", "zero3", "fsdp2"])
def test_peft_loads_the_files_and_computes_the_same(kind: str, tmp_path: Path):
    run_distributed(_save, 2, kind, tmp_path)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "some/base" and described["r"] == 3
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        without = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
        ours = gpt(lora=True)(tokens)
    assert not torch.allclose(adapted, without, rtol=1e-2)
    assert torch.allclose(adapted, ours, rtol=1e-4, atol=1e-4)  # of logits of size 1, by two layers in fp32


def _of_peft() -> Any:
    """Returns a model of PEFT's with adapters that change what it computes."""
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(hugging_face_model("llama"), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def _streams(kind: str) -> tuple[dict[str, torch.Tensor], set[str], dict[str, torch.Tensor]]:
    model = wrap_model(_of_peft(), SimpleNamespace(), CONFIGS[kind](), process_group=dist.group.WORLD)
    stream = WeightStream(model, adapters="only")
    merged = {name: value.clone() for name, value in WeightStream(model)}
    return {name: value.clone() for name, value in stream}, set(stream.views), merged


@pytest.mark.parametrize("kind", CONFIGS)
def test_pefts_models_send_what_pefts_files_have(kind: str):
    (received, sources, merged), _ = run_distributed(_streams, 2, kind)
    model = _of_peft()
    expected = peft.get_peft_model_state_dict(model)
    assert received.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in received.items())
    assert not any("base_layer" in name for name in sources)
    base = model.merge_and_unload().state_dict()
    assert merged.keys() == base.keys()
    assert all(torch.allclose(value, base[name], rtol=1e-6, atol=1e-6) for name, value in merged.items())


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True},
        {"target_modules": ["embed_tokens"]},
        {"second": True},
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(fields: dict[str, Any]):
    second = fields.pop("second", False)
    config = peft.LoraConfig(**({"r": 2, "target_modules": ["q_proj"]} | fields))
    kind = {"kind": "mixtral", "num_local_experts": 3} if config.target_parameters else {"kind": "llama"}
    model = peft.get_peft_model(hugging_face_model(**kind), config)
    if second:
        model.add_adapter("other", config)
        model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match="cannot be merged here"):
        WeightStream(model)


@pytest.mark.parametrize("kind", ["IA3Config", "PromptTuningConfig"])
def test_adapters_other_than_lora_are_refused(kind: str):
    of_layers = {"target_modules": ["k_proj"], "feedforward_modules": []}
    fields = {"IA3Config": of_layers, "PromptTuningConfig": {"num_virtual_tokens": 2}}[kind]
    model = peft.get_peft_model(hugging_face_model("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", **fields))
    with pytest.raises(ConfigError, match="of PEFT's adapters only LoRA's go out here"):
        WeightStream(model)
