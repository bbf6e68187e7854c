"""Tiny Hugging Face models from configs, with random weights, and one process's gradients for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 13  # odd, so that neither tensor nor data parallelism divides it
KINDS = ("llama", "qwen3", "gemma", "mistral", "gpt2")

_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
}


def hugging_face_model(kind: str, tied: bool = False, **fields: Any) -> nn.Module:
    import transformers

    common = {"vocab_size": VOCAB, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32, "pad_token_id": 0}
    config, model = (getattr(transformers, name) for name in _CLASSES[kind])
    torch.manual_seed(0)
    return model(config(**{**common, **sizes, **fields}))


def token_batches(count: int) -> list[torch.Tensor]:
    return [torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(i)) for i in range(count)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def serial_gradients(model: nn.Module, num_replicas: int) -> dict[str, torch.Tensor]:
    """Returns the mean over the batches of as many replicas, in one process."""
    model.zero_grad()
    for tokens in token_batches(num_replicas):
        (loss_of(model, tokens) / num_replicas).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Asserts that the largest difference of each is within `tolerance` of its largest element."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().item()
        worst = (found[name] - value).abs().max().item()
        assert worst <= tolerance * scale, f"{name} differs by {worst:.3g} of {scale:.3g}"
