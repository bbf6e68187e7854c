"""Dense GPTs of Llama's shape: their sizes, the operations of a step, their weights and their batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Preset:
    """A model of Llama's shape, and the batch of a step."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocabulary: int = 128_256
    is_tied: bool = True
    sequence: int = 4096
    samples: int = 2
    """Sequences of a micro-batch."""
    micro_batches: int = 1
    """Micro-batches of a step, whose gradients are added up before its one update."""

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.micro_batches * self.samples

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.sequence

    @property
    def batch(self) -> str:
        """The batch of a step as text."""
        return f"{self.micro_batches} x {self.samples} x {self.sequence} tokens"


PRESETS = {
    "small": Preset(2, 64, 4, 2, 160, vocabulary=512, sequence=64),
    "1b": Preset(16, 2048, 32, 8, 8192, samples=4),  # Llama 3.2 1B, whose heads have width 64
    "3b": Preset(28, 3072, 24, 8, 8192),  # Llama 3.2 3B, whose heads have width 128
    # 24 heads of width 128: attention kernels would pad the 96 of 32 heads to 128. Weights, gradients, masters and
    # moments take 16 bytes a parameter, 63 GB; the activations of a sequence in eager layers, without recomputation,
    # 22 GB. With the logits two sequences fit into the 141 GB of an H200, three do not.
    "4b": Preset(32, 3072, 24, 8, 9216),
}


def matrix_parameters(preset: Preset) -> int:
    """Returns the parameters that each token is multiplied by: all but norms and the input embedding.

    A tied embedding counts once, as the projection to the vocabulary.
    """
    attention = preset.hidden * preset.head_width * (2 * preset.heads + 2 * preset.groups)
    return preset.layers * (attention + 3 * preset.hidden * preset.ffn) + preset.vocabulary * preset.hidden


def model_flops(preset: Preset, *, causal: bool = True) -> int:
    """Returns the operations of a step's forwards and backwards, 2 a multiply-add, nothing counted twice.

    6 a token and parameter of a matrix: one product in forward and two in backward (Kaplan et al., 2020). Attention
    has two products in forward and four in backward over the pairs of tokens that see each other, s (s + 1) / 2 of a
    causal sequence.
    """
    pairs = preset.sequence * (preset.sequence + 1) // 2 if causal else preset.sequence**2
    attention = 12 * preset.layers * preset.hidden * preset.sequences * pairs
    return 6 * matrix_parameters(preset) * preset.tokens + attention


def build_on_device(preset: Preset, config: Any, device: torch.device) -> torch.nn.Module:
    """Builds the model in fp32 and draws its weights on the device: on one core of a CPU 3 B take minutes.

    On meta, which has no values, draws none.
    """
    from core.models.gpt import GPTModel

    with device:
        gpt: torch.nn.Module = GPTModel(
            config,
            vocab_size=preset.vocabulary,
            max_sequence_length=preset.sequence,
            share_embeddings_and_output_weights=preset.is_tied,
            position_embedding_type="rope",
        )
    if device.type == "meta":
        return gpt
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, config.init_method_std, generator=generator)
            else:
                parameter.fill_(1.0)  # of a norm: there are no biases
    return gpt


def make_batches(preset: Preset, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Returns the micro-batches of a step: random tokens, the same ones however they are split into micro-batches."""
    shape = (preset.sequences, preset.sequence + 1)
    tokens = torch.randint(0, preset.vocabulary, shape, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(preset.sequence).expand(preset.samples, -1)
    return [
        {
            "tokens": part[:, :-1].contiguous().to(device),
            "labels": part[:, 1:].contiguous().to(device),
            "loss_mask": torch.ones(positions.shape, device=device),
            "position_ids": positions.contiguous().to(device),
        }
        for part in tokens.split(preset.samples)
    ]
