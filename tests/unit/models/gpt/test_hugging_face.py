"""Models that `transformers` loads and gives the same logits for, and models of its own in any layout here.

In fp32 logits are bitwise those of `transformers`' GPT-2, whose kernels are the same. Its RMSNorm is composed of
several operations, and its projections of queries, keys and values, gate and up are products of their own: there
logits agree to 2e-6 of the largest. A model that goes out and comes back has the same bits.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.base.errors import CheckpointError
from core.dist_checkpointing import model_state_dict
from core.distributed import wrap_model
from core.models.gpt import GPTModel
from core.models.gpt.architecture import architecture_of
from core.models.gpt.hf_config import Layout, architecture_from_hf, choose_layout, hf_config
from core.models.gpt.hugging_face import hf_architecture, load_hugging_face, save_hugging_face
from core.transformer.transformer_config import TransformerConfig
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed
from tests.unit.optimizer._squares import CONFIGS

BOUND = 2e-6
"""Of the largest logit, that any logit may be off in fp32."""

VOCABULARY, LENGTH = 48, 12
_MODERN = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "num_query_groups": 2,
    "rotary_base": 5000.0,
    "layernorm_epsilon": 1e-6,
}
KINDS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "llama": ("llama", _MODERN),
    "llama with biases and gelu": ("llama", _MODERN | {"add_bias_linear": True, "activation_func": "gelu_tanh"}),
    "llama with wide heads": ("llama", _MODERN | {"kv_channels": 6, "num_query_groups": 1}),
    "qwen2": ("qwen2", _MODERN | {"add_qkv_bias": True}),
    "qwen3": ("qwen3", _MODERN | {"qk_layernorm": True, "kv_channels": 10, "hidden_size": 18}),
    "mixtral": ("mixtral", _MODERN | {"num_moe_experts": 4, "kv_channels": 6}),
    "qwen3_moe": (
        "qwen3_moe",
        _MODERN
        | {"qk_layernorm": True, "num_moe_experts": 5, "moe_ffn_hidden_size": 6, "moe_layer_freq": [0, 1]}
        | {"moe_router_pre_softmax": True, "moe_router_topk": 3},
    ),
    "glm4_moe": (
        "glm4_moe",
        _MODERN
        | {"num_layers": 3, "num_moe_experts": 8, "moe_ffn_hidden_size": 6, "moe_layer_freq": [0, 1, 1]}
        | {"moe_router_topk": 4, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5}
        | {"moe_shared_expert_intermediate_size": 12, "moe_router_dtype": "fp32", "rotary_percent": 0.5}
        | {"add_qkv_bias": True, "qk_layernorm": True, "kv_channels": 8},
    ),
    "gpt2": ("gpt2", {"activation_func": "gelu_tanh", "position": "learned_absolute"}),
    "gpt2 with exact gelu": ("gpt2", {"position": "learned_absolute", "ffn_hidden_size": 26}),
}


def build(kind: str, tied: bool = True, *, seed: int = 3, vocab_size: int = VOCABULARY, **more: Any) -> GPTModel:
    fields = {"hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 20, **KINDS[kind][1], **more}
    position = fields.pop("position", "rope")
    config = TransformerConfig(
        **{"num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.3, **fields}
    )
    torch.manual_seed(seed)
    model = GPTModel(
        config,
        vocab_size=vocab_size,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=position,
        parallel_output=False,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "layernorm" in name:  # ones and zeros would hide what is swapped
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    actual = model.eval()(tokens())
    return actual if isinstance(actual, torch.Tensor) else actual.logits


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("kind", "tied"), quick(product(KINDS, (True, False)), lambda case: [*KINDS].index(case[0]) % 2 == (not case[1]))
)
def test_export_loads_in_transformers(kind: str, tied: bool, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model = build(kind, tied)
    folder = tmp_path / "model"
    save_hugging_face(model, folder, max_shard_bytes=4000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert theirs.config.model_type == KINDS[kind][0]
    assert theirs.dtype == torch.float32
    assert off(logits_of(theirs), logits_of(model)) <= (0.0 if KINDS[kind][0] == "gpt2" else BOUND)

    back = build(kind, tied, seed=4)
    assert off(logits_of(back), logits_of(model)) > 0.1
    load_hugging_face(back, folder)
    assert torch.equal(logits_of(back), logits_of(model))
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())


@pytest.mark.parametrize(
    ("model_class", "config_class", "settings"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2, "rope_parameters": {"rope_theta": 777.0}}),
        ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Qwen2ForCausalLM", "Qwen2Config", {"num_key_value_heads": 2}),
        ("Qwen3ForCausalLM", "Qwen3Config", {"num_key_value_heads": 2, "head_dim": 6}),
        ("MixtralForCausalLM", "MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 4}),
        (
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 6, "num_experts_per_tok": 2}
            | {"norm_topk_prob": True, "decoder_sparse_step": 2},
        ),
        (
            "Glm4MoeForCausalLM",
            "Glm4MoeConfig",
            {"num_key_value_heads": 2, "n_routed_experts": 4, "moe_intermediate_size": 6, "num_experts_per_tok": 2},
        ),
        ("GPT2LMHeadModel", "GPT2Config", {}),
    ],
)
def test_transformers_model_imports(model_class: str, config_class: str, settings: dict[str, Any], tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    if model_class.startswith("GPT2"):
        sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": LENGTH}
    else:
        sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 20}
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(
        **{"vocab_size": VOCABULARY, "initializer_range": 0.3, **sizes, **settings}
    )
    config._experts_implementation = "eager"
    theirs = getattr(transformers, model_class)(config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = hf_architecture(tmp_path / "theirs").build(hidden_dropout=0.0, attention_dropout=0.0)
    load_hugging_face(model, tmp_path / "theirs")
    model.parallel_output = False
    assert off(logits_of(model), logits_of(theirs)) <= BOUND


def test_vocabulary_padding_roundtrip(tmp_path: Path):
    model = build("llama", tied=False, vocab_size=64)
    save_hugging_face(model, tmp_path / "model", vocab_size=VOCABULARY, config={"eos_token_id": 7})
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (described["vocab_size"], described["eos_token_id"]) == (VOCABULARY, 7)
    back = build("llama", tied=False, vocab_size=64, seed=4)
    load_hugging_face(back, tmp_path / "model")
    for actual, expected in (
        (back.embedding.word_embeddings.weight, model.embedding.word_embeddings.weight),
        (back.output_layer.weight, model.output_layer.weight),
    ):
        assert torch.equal(actual[:VOCABULARY], expected[:VOCABULARY])
        assert not actual[VOCABULARY:].any()
    with pytest.raises(CheckpointError, match="vocabulary of 48, and the model's has 40 rows"):
        load_hugging_face(build("llama", tied=False, vocab_size=40), tmp_path / "model")


@pytest.mark.parametrize("kind", ["qwen3", "glm4_moe"])
def test_half_precision_roundtrip(kind: str, tmp_path: Path):
    model = build(kind)
    save_hugging_face(model, tmp_path / "model", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    back = build(kind, seed=4)
    load_hugging_face(back, tmp_path / "model")
    assert all(
        torch.equal(a, b.bfloat16().float()) for a, b in zip(back.parameters(), model.parameters(), strict=True)
    )
    biases = [(a, b) for a, b in zip(back.buffers(), model.buffers(), strict=True) if a.dtype == torch.float32]
    assert all(torch.equal(a, b) for a, b in biases)  # of routers: as they are


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    model = build("glm4_moe")
    save_hugging_face(model, tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*.safetensors")
    save_file(load_file(path) | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, path)
    load_hugging_face(build("glm4_moe", seed=4), tmp_path / "model")
    save_file(load_file(path) | {"model.layers.4.eh_proj.weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"left over there: model.layers.4.eh_proj.weight"):
        load_hugging_face(build("glm4_moe", seed=4), tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization": "LayerNorm"}, r"llama cannot express normalization 'LayerNorm'; .*gpt2 cannot express"),
        ({"rotary_percent": 0.5, "kv_channels": 8}, r"qwen3 cannot express .*rotary_percent 0.5"),
        ({"hidden_size": 18}, r"llama cannot express hidden_size 18, which 4 heads do not divide"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, r"qwen3 cannot express add_qkv_bias True"),
        (
            {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 6},
            r"mixtral cannot express .*moe_shared_expert_intermediate_size 6; .*glm4_moe cannot express its settings "
            r"\(config.json has n_shared_experts 0; it takes",
        ),
        (
            {"num_moe_experts": 8, "moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 3}
            | {"moe_shared_expert_intermediate_size": 20},
            r"glm4_moe cannot express .*moe_router_topk 3 in 3 of 4 groups \(a group's score is that of its 2 best",
        ),
    ],
)
def test_inexpressible_models_are_refused_on_export(changes: dict[str, Any], message: str, tmp_path: Path):
    model = build("llama with wide heads", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        save_hugging_face(model, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        CheckpointError, match=r"the layout gpt2 cannot express num_query_groups 2, .*normalization 'RMSNorm'"
    ):
        save_hugging_face(build("llama"), tmp_path / "model", layout="gpt2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "olmoe"}, "model_type is 'olmoe'; llama, qwen2, qwen3, mixtral, qwen3_moe, glm4_moe, gpt2"),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512},
            r"'deepseek_v3', whose multi-head latent attention \(kv_lora_rank 512\) no model here has; its router is",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "cannot express rotary embeddings of type 'llama3'",
        ),
        ({"mlp_bias": True}, "attention_bias False with mlp_bias True"),
        ({"hidden_act": "relu", "quantization_config": {"bits": 4}}, "quantization_config, the activation 'relu'"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
    ],
)
def test_unsupported_models_are_refused_on_import(changes: dict[str, Any], message: str):
    config = hf_config("llama", architecture_of(build("llama"))) | changes
    with pytest.raises(CheckpointError, match=message):
        architecture_from_hf(config)


def test_mismatched_architecture_lists_differences(tmp_path: Path):
    save_hugging_face(build("llama"), tmp_path / "model")
    before = build("llama", tied=False, rotary_base=10000.0, ffn_hidden_size=24)
    saved = [parameter.clone() for parameter in before.parameters()]
    with pytest.raises(
        CheckpointError, match=r"ffn_hidden_size 24 and 20, rotary_base 10000.0 and 5000.0, ties_embeddings False"
    ):
        load_hugging_face(before, tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), saved, strict=True))
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        save_hugging_face(build("llama"), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file"):
        load_hugging_face(build("llama"), tmp_path / "nowhere")


def test_every_layout_is_recognized():
    assert [choose_layout(architecture_of(build(kind))) for kind in KINDS] == [layout for layout, _ in KINDS.values()]
    for kind, (layout, _) in KINDS.items():
        architecture = architecture_of(build(kind))
        assert not architecture.differences(architecture_from_hf(hf_config(layout, architecture)))


def _into_any_layout_and_back(kinds: list[str], folder: Path) -> list[str]:
    """Returns what is wrong, on this rank of two, with what each wrapper read and what it wrote again."""
    problems = []
    for kind in kinds:
        parallel_state.destroy_model_parallel()
        whole = {name: tensor.detach() for name, tensor in build(kind, False).state_dict().items()}
        layouts = [(1, 1, "fsdp2"), (2, 1, "ddp"), (2, 1, "fsdp2")]
        if "moe" in kind:
            layouts = [(1, 1, "zero2"), (2, 1, "fsdp2"), (1, 2, "ddp"), (1, 2, "zero2"), (1, 2, "fsdp2")]
        for tp, ep, wrapper in layouts:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
            sizes = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep}
            gpt = build(kind, False, seed=9, **sizes)
            model = wrap_model(gpt, gpt.config, CONFIGS[wrapper])
            load_hugging_face(model, folder / kind)
            for name, tensor in model_state_dict(gpt).items():
                actual = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                if not torch.equal(actual, whole[name]):
                    problems.append(f"{kind}, {wrapper}, tp {tp}, ep {ep}: {name}")
            again = folder / f"{kind}-{wrapper}-{tp}-{ep}"
            save_hugging_face(model, again, max_shard_bytes=4000)
            for path in (folder / kind).iterdir():
                if path.read_bytes() != (again / path.name).read_bytes():
                    problems.append(f"{kind}, {wrapper}, tp {tp}, ep {ep}: {path.name} as written")
    return problems


def test_export_and_import_are_equal_for_every_rank_layout(tmp_path: Path):
    kinds = ["llama with biases and gelu", "qwen3", "glm4_moe", "gpt2"]
    for kind in kinds:
        save_hugging_face(build(kind, False), tmp_path / kind, max_shard_bytes=4000)
    assert run_distributed(_into_any_layout_and_back, 2, kinds, tmp_path) == [[], []]


HOSTILE = {
    "no heads": {"num_attention_heads": 0},
    "heads as text": {"num_attention_heads": "2"},
    "heads as a fraction": {"num_attention_heads": 2.5},
    "negative layers": {"num_hidden_layers": -1},
    "true layers": {"num_hidden_layers": True},
    "layers without end": {"num_hidden_layers": 10**9},
    "a hidden size beyond memory": {"hidden_size": 2**31 - 1},
    "a hidden size beyond numbers": {"hidden_size": 10**20},
    "a vocabulary beyond memory": {"vocab_size": 2**31 - 1},
    "scaling as text": {"rope_scaling": "x"},
    "scaling of no kind": {"rope_scaling": {"rope_type": ["a"]}},
    "scaling as a list": {"rope_parameters": [1]},
    "a base as text": {"rope_parameters": {"rope_theta": "x"}},
    "a base of nothing": {"rope_parameters": {"rope_theta": 0}},
    "an activation as a list": {"hidden_act": ["silu"]},
    "an epsilon as text": {"rms_norm_eps": "1e-6"},
    "a kind as a table": {"model_type": {"llama": 1}},
    "positions as text": {"max_position_embeddings": "x"},
    "no text at all": None,
}


HOSTILE_EXPERTS: dict[str, dict[str, Any]] = {
    "no experts": {"n_routed_experts": 0},
    "experts beyond memory": {"n_routed_experts": 2**31 - 1},
    "more choices than experts": {"num_experts_per_tok": 9},
    "groups that do not divide": {"n_group": 3},
    "groups scored by one expert": {"topk_group": 4},
    "probabilities as they are": {"norm_topk_prob": False},
    "dense layers as text": {"first_k_dense_replace": "1"},
    "dense layers only": {"first_k_dense_replace": 3},
    "a negative scale": {"routed_scaling_factor": -1},
    "no shared experts": {"n_shared_experts": 0},
    "layers without end": {"num_hidden_layers": 10**9},
}


@pytest.mark.parametrize("kind", HOSTILE | HOSTILE_EXPERTS)
def test_malformed_config_is_refused_before_allocation(tmp_path: Path, kind: str):
    layout: Layout = "glm4_moe" if kind in HOSTILE_EXPERTS else "llama"
    changes = HOSTILE_EXPERTS[kind] if kind in HOSTILE_EXPERTS else HOSTILE[kind]
    config = hf_config(layout, architecture_of(build(layout)))
    (tmp_path / "config.json").write_text("[" * 1000 + "]" * 1000 if changes is None else json.dumps(config | changes))
    with pytest.raises(CheckpointError) as caught:
        hf_architecture(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
