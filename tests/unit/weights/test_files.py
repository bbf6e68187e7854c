"""Models of transformers from and to the files that transformers writes, and LoRA adapters as PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import CheckpointError, ConfigError
from core.distributed import wrap_model
from core.models.gpt.hugging_face import save_hugging_face
from core.weights import WeightStream, load_pretrained, save_adapter, save_pretrained
from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.distributed._hugging_face import hugging_face_model
from tests.unit.weights._models import CONFIGS, VOCABULARY, gpt, start, wrapped

pytestmark = needs("transformers", "peft")

_SMALL = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "eos_token_id": 1}
_OF_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
_OF_DEEPSEEK |= {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "eos_token_id": 1}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {**_EXPERTS, "head_dim": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_OF_DEEPSEEK, "head_dim": 4},
    "deepseek_v3": {**_OF_DEEPSEEK, **_LATENT},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
}


def _model(kind: str, seed: int, **fields: Any) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **{**_SMALL, **KINDS[kind], **fields})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    for tensor in model.state_dict().values():  # biases and the counts of routers too
        tensor.copy_(torch.randn(tensor.shape))
    return model


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_transformers(kind: str, tmp_path: Path):
    written, filled = _model(kind, 1), _model(kind, 2)
    written.save_pretrained(tmp_path / "theirs")
    load_pretrained(filled, tmp_path / "theirs")
    for name, tensor in written.state_dict().items():
        assert torch.equal(filled.state_dict()[name], tensor), name
    save_pretrained(filled, tmp_path / "ours")
    theirs, ours = _stored(tmp_path / "theirs"), _stored(tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_the_config_has_the_dtype_that_is_written(tmp_path: Path):
    model: Any = _model("llama", 1).bfloat16()
    before = model.config.dtype
    save_pretrained(model, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.dtype == before


def test_a_plain_model_on_the_meta_device_is_refused(tmp_path: Path):
    import transformers

    _model("llama", 1).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(_model("llama", 1).config)
    with pytest.raises(CheckpointError, match="is on the meta device: nothing was loaded"):
        load_pretrained(model, tmp_path)


def test_other_models_are_refused(tmp_path: Path):
    _model("mixtral", 1).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"is of another model.*experts\.4\.w1\.weight"):
        load_pretrained(_model("mixtral", 1, num_local_experts=5), tmp_path)
    with pytest.raises(ConfigError, match="GPTModel is no model of transformers; write a GPTModel by save_hugging"):
        save_pretrained(gpt(), tmp_path / "ours")


def _save(folder: Path) -> None:
    start()
    save_hugging_face(gpt(), folder / "base")
    save_adapter(wrapped("zero3", gpt(lora=True)), folder / "adapter", base_model="some/base")


def test_peft_loads_the_files_and_computes_the_same(tmp_path: Path):
    import peft
    import transformers

    run_distributed(_save, 2, tmp_path)
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
    import peft

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


@pytest.mark.parametrize("kind", ["ddp", "zero3", "fsdp2"])
def test_pefts_models_send_what_pefts_files_have(kind: str):
    import peft

    (received, sources, merged), _ = run_distributed(_streams, 2, kind)
    model = _of_peft()
    expected = peft.get_peft_model_state_dict(model)
    assert received.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in received.items())
    assert not any("base_layer" in name for name in sources)
    base = model.merge_and_unload().state_dict()
    assert merged.keys() == base.keys()
    assert all(torch.allclose(value, base[name], rtol=1e-6, atol=1e-6) for name, value in merged.items())


def test_prompts_of_peft_are_refused():
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="of PEFT's adapters only those of layers go out here"):
        WeightStream(peft.get_peft_model(hugging_face_model("llama"), config))
