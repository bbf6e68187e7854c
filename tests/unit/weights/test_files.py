"""Models of transformers are filled from the files that transformers writes, and written as the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.base.errors import CheckpointError, ConfigError
from core.weights import load_pretrained, save_pretrained
from tests.unit.weights._models import gpt

transformers = pytest.importorskip("transformers", reason="pip install 'shardstack[hf]'")

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
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(written)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_the_config_has_the_dtype_that_is_written(tmp_path: Path):
    model: Any = _model("llama", 1).bfloat16()
    before = model.config.dtype
    save_pretrained(model, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.dtype == before


def test_a_plain_model_on_the_meta_device_is_refused(tmp_path: Path):
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
